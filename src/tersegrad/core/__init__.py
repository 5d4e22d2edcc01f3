"""The protocol, its values, randomness, frames and errors: what every other layer leans on."""
