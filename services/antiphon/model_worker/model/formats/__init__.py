"""Checkpoint formats: each lists its tensors before any of them is read."""
