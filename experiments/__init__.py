"""Experiments: one folder a paper, with its claims, one command, and committed results. They import the package, never the reverse."""
