"""Triton kernels for CUDA tensors. Their modules import Triton, so they are imported where they are first used."""
