"""Routes, settings, services and generated pages agree with each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.bench.page import write as benchmarks
from tests.bench.page.engine import PLOT
from tests.bench.serving.report import drawn
from tests.bench.summary import RESULTS, read
from tests.support import bus_page, config_page, status_page
from tests.support.pages import PAGES

from antiphon.config.fields import fields, groups
from antiphon.config.sglang_arguments import rows
from antiphon.wire.base import Role
from antiphon.wire.routes import CLIENT, NAME, ROUTES, DeliveryMode, RequestRoute

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
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


def test_readme_lists_every_subject_with_its_kind():
    rows = [line.split("|")[1:4] for line in README.splitlines() if line.startswith("| `")]
    listed: dict[str, str] = {}
    for names, kind, _ in rows:
        subject = ""
        for name in re.findall(r"`([^`]+)`", names):
            subject = subject.rpartition(".")[0] + name if name.startswith(".") else name
            listed[subject] = re.findall(r"\w+", kind)[0]
    routes = {re.sub(r"\{(\w+)\}", r"<\1>", route.subject): route for route in ROUTES}
    assert listed == {
        subject: "call" if isinstance(route, RequestRoute) else "feed"
        for subject, route in routes.items()
    }


def test_readme_says_of_every_service_whether_it_has_a_caller():
    callers = status_page.senders()
    for role in Role:
        (line,) = re.findall(rf"^\| \[{FOLDERS[role]}\].*$", README, re.MULTILINE)
        assert ("no service calls it yet" in line) == (not callers[role]), role
    picture = next(block for block in README.split("```") if "-- HTTP, NATS --" in block)
    for role in Role:
        assert FOLDERS[role] in picture
    assert ("no service calls it yet" in picture) == (not all(callers.values()))


@pytest.mark.parametrize("role", Role)
def test_a_service_is_a_process(role: Role):
    folder = ROOT / "services/antiphon" / FOLDERS[role]
    assert (folder / "__main__.py").exists()
    assert (folder / "service.py").exists()


def test_a_call_has_one_kind_of_callee():
    for route in ROUTES:
        assert route.carries, route.name
        if route.delivery is not DeliveryMode.ALL and route is not NAME:  # every process has a name
            assert len(route.listeners) == 1 or CLIENT in route.listeners, route.name


def test_every_setting_has_help():
    for group in groups():
        for field in group.fields:
            assert field.help, field.path


def test_pages_list_every_setting_flag_subject_and_message():
    page = config_page.page()
    for field in fields().values():
        assert f"| `{field.path}` |" in page
    for row in rows():
        assert f"| `{row.flags[0]}`" in page
    page = bus_page.page()
    for route in ROUTES:
        assert f"| `{route.subject}` |" in page
    for message in bus_page.every_message():
        assert f"### {message.__name__}\n" in page


@pytest.mark.timeout(180)  # the page of models declares every family once for each method
def test_generated_pages_are_current():
    for module in PAGES:
        assert module.PAGE.read_text() == module.page(), f"{module.PAGE.name}: run make docs"


def test_the_page_of_benchmarks_says_what_the_committed_results_say():
    again = "run python -m tests.bench.peers --page-only"
    assert benchmarks.PAGE.read_text() == benchmarks.page(RESULTS), again
    plot = drawn(read(RESULTS / "open-load.json"))
    assert benchmarks.PAGE.with_name(PLOT).read_text() == plot, again
