"""Puts the compiled CPU kernels into a wheel: `make wheel`.

The wheel is then one for this Python and this torch's minor version. Built where there is no torch
or no compiler, it is one for every Python, without kernels: they are built where it is installed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CpuKernelsHook(BuildHookInterface[Any]):
    """Adds the library beside antiphon/kernels/cpu/build.py, where that looks for it first."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build what is missing, and name the file; an editable install builds its own later."""
        if version == "editable":
            return
        sys.path.insert(0, str(Path(__file__).parents[3]))
        try:
            from antiphon.kernels.cpu import build  # noqa: PLC0415 (where there is torch)
        except ImportError:
            self.app.display_warning("no torch here: a wheel without CPU kernels")
            return
        try:
            library = build.build()
        except build.CannotBuild as error:
            self.app.display_warning(f"a wheel without CPU kernels: {error}")
            return
        build_data["force_include"][str(library)] = f"antiphon/kernels/cpu/{library.name}"
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
