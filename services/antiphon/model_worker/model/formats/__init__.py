"""Checkpoint formats, one a module: each lists its tensors before any of them is read."""
