"""tersegrad: distributed and federated training that sends few bits."""
