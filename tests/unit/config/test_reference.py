"""The generated pages list every setting, flag, subject and message."""

from __future__ import annotations

from pathlib import Path

from tests.support import bus_page as bus
from tests.support import config_page

from antiphon.config.fields import fields
from antiphon.config.sglang.arguments import rows
from antiphon.wire.routes import ROUTES

ROOT = Path(__file__).parents[3]


def test_every_setting_and_every_flag_of_sglang_has_a_line() -> None:
    page = config_page.page()
    for field in fields().values():
        assert f"| `{field.path}` |" in page
    for row in rows():
        assert f"| `{row.flags[0]}`" in page


def test_every_subject_and_every_message_is_told() -> None:
    page = bus.page()
    for route in ROUTES:
        assert f"| `{route.subject}` |" in page
    for message in bus.every_message():
        assert f"### {message.__name__}\n" in page
