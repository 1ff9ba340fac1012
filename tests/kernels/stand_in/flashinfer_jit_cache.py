"""Stands for the package of modules that are built ahead of time."""
