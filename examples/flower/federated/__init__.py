"""A Flower app with compressed messages; see the README beside it."""
