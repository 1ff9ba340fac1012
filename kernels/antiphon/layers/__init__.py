"""Layers of a decoder: they own weights, and get everything else from a `ForwardContext`."""
