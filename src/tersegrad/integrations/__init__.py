"""Integrations: compressed exchanges inside the training loops that people already have."""
