"""The family that docs/models.md adds as an example is loaded from that page and goes its way."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import transformers
from tests.models import mutants as no
from tests.models.families import Row
from tests.models.parity import check_logits, check_mutants, check_prefix, check_text, save
from tests.models.specs import fed

from antiphon.model_worker.model import registry

if TYPE_CHECKING:
    from tests.models.parity import Saved

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
FAMILY, ROW = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
LINE = re.search(r'```text\n"(\w+)": "[\w.]+\.(\w+:\w+)",\n```', PAGE.read_text())
NAMES = {"Row": Row, "transformers": transformers, "no": no, "fed": fed}


@pytest.fixture
def arcee(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Saved:
    assert LINE is not None
    architecture, target = LINE.groups()
    (tmp_path / f"{target.partition(':')[0]}.py").write_text(FAMILY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(registry.FAMILIES, architecture, target)
    return save(eval(ROW, NAMES), tmp_path / "model")


def test_a_family_takes_fewer_than_sixty_lines() -> None:
    assert len(FAMILY.splitlines()) + len(ROW.splitlines()) < 60


def test_the_documented_family_is_that_of_transformers(arcee: Saved) -> None:
    check_logits(arcee, "plain")
    check_text(arcee, "plain")
    check_prefix(arcee)
    check_mutants(arcee)
    assert set(arcee.row.mutants) == set(registry.find_family(("ArceeForCausalLM",)).features)
    sys.modules.pop("arcee")
