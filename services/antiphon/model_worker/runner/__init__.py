"""Runs plans on a device: plan to tensors, forward pass, sampling, outcome."""
