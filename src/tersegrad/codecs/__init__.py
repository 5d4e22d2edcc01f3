"""Lossless codecs: integers to bytes and back. They know nothing of gradients."""
