"""Reasoning formats of models, one per file."""
