"""Benchmarks of the kernels and compressors, against the targets that the project holds itself to."""
