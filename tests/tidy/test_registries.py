"""Routes, settings, services and generated pages agree with each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.bench.page import write as benchmarks
from tests.bench.page.open_load import PLOT
from tests.bench.serving.report import drawn, read
from tests.support import status_page

from antiphon.bus import reference as bus_reference
from antiphon.config import reference as config_reference
from antiphon.config.fields import groups
from antiphon.gateway.http import reference as http_reference
from antiphon.model_worker.model import reference as model_reference
from antiphon.wire.base import Role
from antiphon.wire.routes import CLIENT, NAME, ROUTES, Spread

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {role: "model_worker" if role is Role.WORKER else str(role) for role in Role}


@pytest.mark.parametrize("role", Role)
def test_a_services_readme_names_what_it_answers_and_says_how_it_fails(role: Role):
    readme = ROOT / "services/antiphon" / FOLDERS[role] / "README.md"
    text = " ".join(readme.read_text().split())  # a line may break between any two words
    for route in ROUTES:
        if route.listeners == (role,):
            subject = route.subject.replace("{", "<").replace("}", ">")
            words = [subject, subject.replace(f"<{role}>", "<instance>")]
            assert any(word in text for word in words), route.name
    assert "**When it dies**" in text


@pytest.mark.parametrize("role", Role)
def test_a_service_is_a_process(role: Role):
    folder = ROOT / "services/antiphon" / FOLDERS[role]
    assert (folder / "__main__.py").exists()
    assert (folder / "service.py").exists()


def test_a_call_has_one_kind_of_callee():
    for route in ROUTES:
        assert route.carries, route.name
        if route.spread is not Spread.ALL and route is not NAME:  # every process has a name
            assert len(route.listeners) == 1 or CLIENT in route.listeners, route.name


def test_every_setting_has_help():
    for group in groups():
        for field in group.fields:
            assert field.help, field.path


@pytest.mark.timeout(180)  # the page of models declares every family once for each method
def test_generated_pages_are_current():
    assert (ROOT / config_reference.PAGE).read_text() == config_reference.page()
    assert (ROOT / bus_reference.PAGE).read_text() == bus_reference.page()
    assert http_reference.PAGE.read_text() == http_reference.page()
    assert (ROOT / model_reference.PAGE).read_text() == model_reference.page()


def test_the_page_of_benchmarks_says_what_the_committed_results_say():
    again = "run python -m tests.bench.peers --page-only"
    assert benchmarks.PAGE.read_text() == benchmarks.page(benchmarks.RESULTS), again
    plot = drawn(read(benchmarks.RESULTS / "open-load.json"))
    assert benchmarks.PAGE.with_name(PLOT).read_text() == plot, again


def test_the_status_page_is_current():
    current = status_page.PAGE.read_text() == status_page.page()
    assert current, "run python -m tests.support.status_page"
