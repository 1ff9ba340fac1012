"""Kernels for the CPU in C++, built once per installation; without them the references run."""
