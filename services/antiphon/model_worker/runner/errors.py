"""What a runner refuses to run."""

from __future__ import annotations


class PlanRefused(Exception):
    """A plan asks for what this runner does not have, or comes out of order."""
