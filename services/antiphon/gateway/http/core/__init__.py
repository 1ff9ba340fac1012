"""Shared by all families of HTTP APIs; imports none of them."""
