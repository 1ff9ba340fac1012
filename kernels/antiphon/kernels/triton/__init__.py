"""Triton kernels: rows of the operations, for CUDA and for Triton's interpreter."""
