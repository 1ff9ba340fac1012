"""Triton's interpreter: kernels as Python over numpy, on CPU tensors."""

from __future__ import annotations

import os
import sys


def enable() -> None:
    """Let this process interpret Triton's kernels instead of compiling them.

    Triton reads the variable when it is imported first, also for the functions of its own library.
    """
    assert "triton" not in sys.modules or interpreted(), "triton was imported before"
    os.environ["TRITON_INTERPRET"] = "1"
    from antiphon.kernels.triton.interpreted_language import (  # noqa: PLC0415 (it imports Triton)
        install,
    )

    install()


def interpreted() -> bool:
    """Whether this process interprets kernels."""
    return os.environ.get("TRITON_INTERPRET") == "1"
