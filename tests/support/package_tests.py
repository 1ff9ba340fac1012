"""The test files of one package: `make test-unit PKG=gateway`.

A package's tests are in `tests/unit/<package>` or `tests/<package>`; those that are elsewhere are
listed here. The simulation of the whole protocol takes minutes and belongs to no single package:
`tests/simulation`.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "embedded": ("tests/**/test_embedded_model.py",),
    "encoder": ("tests/models/test_vision_*.py",),
    "gateway": (
        "tests/simulation/test_owner.py",
        "tests/unit/client/test_with_the_gateway.py",
    ),
    "layers": ("tests/models",),
    "model_card": (
        "tests/unit/config/described",
        "tests/unit/config/test_[cm]*.py",
    ),
    "model_worker": (
        "tests/unit/runner",
        "tests/simulation/test_guided_choices.py",
        "tests/simulation/test_radix.py",
        "tests/simulation/test_worker_*.py",
    ),
    "resolve": ("tests/unit/config/test_resolve.py",),
    "text": ("tests/unit/detokenizer/test_stop.py",),
}
"""Patterns below the repository's root, by package."""


def packages() -> list[str]:
    roots = (ROOT / root / "antiphon" for root in ("services", "shared", "kernels"))
    return sorted(p.parent.name for root in roots for p in root.glob("*/__init__.py"))


def paths_of(package: str) -> list[str]:
    """The files and folders that pytest runs for a package, relative to the root."""
    folders = (f"tests/unit/{package}", f"tests/{package}")
    found = [folder for folder in folders if (ROOT / folder).is_dir()]
    for pattern in ELSEWHERE.get(package, ()):
        found += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))
    return found


def main() -> int:
    """Print the paths of the package named on the command line."""
    (package,) = sys.argv[1:] or [""]
    if package not in packages():
        names = ", ".join(packages())
        print(f"PKG={package}: no such package; the packages are {names}", file=sys.stderr)
        return 2
    print(*paths_of(package))
    return 0


if __name__ == "__main__":
    sys.exit(main())
