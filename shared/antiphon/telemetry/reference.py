"""Writes the table of metrics in docs/metrics.md: `python -m antiphon.telemetry.reference`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from antiphon.telemetry.catalog import FAMILIES, Kind

if TYPE_CHECKING:
    from antiphon.telemetry.catalog import MetricSpec

PAGE = Path("docs/metrics.md")
MARK = "## The metrics of a model\n"
HEAD = f"""{MARK}
<!-- Written by `python -m antiphon.telemetry.reference`; change antiphon.telemetry.catalog. -->

| metric | type | labels | SGLang's name | meaning |
|---|---|---|---|---|
"""


def page(text: str) -> str:
    """The whole page: what stands before the table, and the table."""
    before, _, _ = text.partition(MARK)
    return before + HEAD + "".join(map(_row, FAMILIES.values()))


def _row(family: MetricSpec) -> str:
    kind = f"gauge, {family.merge}" if family.kind is Kind.GAUGE else str(family.kind)
    sglang = " ".join(f"`sglang:{view.name}`" for view in family.sglang)
    labels = " ".join(f"`{label}`" for label in family.labels)
    return f"| `{family.full_name}` | {kind} | {labels} | {sglang} | {family.help} |\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
