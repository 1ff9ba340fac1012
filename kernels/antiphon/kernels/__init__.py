"""Tensor operations: each is defined by its torch reference and may have faster backends."""
