"""Layers of a decoder: they hold weights, and meet the world only through a `ForwardContext`."""
