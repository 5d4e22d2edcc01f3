"""Bits of gradients that small networks really have."""
