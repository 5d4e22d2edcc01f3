"""Federated learning with compressed messages: score against bytes."""
