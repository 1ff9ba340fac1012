"""Continuous batching: which requests run in the next step. Pure: no torch, no bus."""
