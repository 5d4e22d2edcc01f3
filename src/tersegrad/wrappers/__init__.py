"""Compressors made from compressors."""
