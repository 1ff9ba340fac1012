"""Errors of the runner."""

from __future__ import annotations


class PlanRefused(Exception):
    """A plan uses what this runner does not support, or is out of order."""
