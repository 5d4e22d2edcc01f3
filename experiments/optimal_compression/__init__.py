"""Optimal gradient compression: the rate-error plane, worst-case vectors, convergence against bytes, and iteration counts."""
