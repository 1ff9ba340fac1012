"""The code speaks the field's language: words, and class names that are defined once."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = sorted(p for s in ("services", "shared", "kernels") for p in (ROOT / s).rglob("*.py"))
PRIVATE = re.compile(
    r"\b(told|tells?|telling|whoever|nobody|somebody|anybody|everybody|hears?|heard|speech|spoken)\b",
    re.IGNORECASE,
)
DECODE_FAST_PATH = {
    f"services/antiphon/model_worker/{name}"
    for name in (
        "batching/layout.py",
        "batching/logprobs.py",
        "batching/request.py",
        "batching/slots.py",
        "batching/steady.py",
        "batching/stretch.py",
        "lanes.py",
    )
} | {"shared/antiphon/wire/tokens.py"}
"""Files that one decode path replaces, or that call them by their names; exempt until then."""
QUOTED = {
    ("services/antiphon/gateway/http/openai/responses/store.py", "told"),  # a stored key
    ("shared/antiphon/model_card/weight_headers.py", "tell"),  # of a file
}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_code_has_no_private_words() -> None:
    found = {
        (relative(path), match[0].lower())
        for path in CODE
        for match in PRIVATE.finditer(path.read_text())
    }
    assert {(path, word) for path, word in found - QUOTED if path not in DECODE_FAST_PATH} == set()
    assert found >= QUOTED


def test_exempt_files_have_private_words() -> None:
    clean = {path for path in DECODE_FAST_PATH if not PRIVATE.search((ROOT / path).read_text())}
    assert clean == set()


def test_prefill_is_the_workers_word() -> None:
    worker = (path for path in CODE if "model_worker" in path.parts)
    assert sum(len(re.findall(r"\bprefill", path.read_text())) for path in worker) > 60


def test_class_names_are_defined_once() -> None:
    counts = Counter(
        node.name
        for path in CODE
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in counts.items() if count > 1} == set()
