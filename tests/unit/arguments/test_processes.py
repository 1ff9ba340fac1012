"""How many processes of a service start, and what each has of the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from rich.console import Console
from tests.arguments import compare, settings_of, shows
from tests.unit.config.test_resolve import CARD, DEVICE, GIB

from antiphon.config.load import load, write_yaml
from antiphon.resolve.resolved_config import ResolvedConfig, resolve
from antiphon.supervisor.stack import ServiceStack
from antiphon.wire.base import Role

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.config.settings import Settings
    from antiphon.supervisor.child import Child

MACHINE = msgspec.structs.replace(DEVICE, memory_bytes=12 * GIB)
"""Six cores; the model takes 1 GiB."""


def children(settings: Settings, role: Role, folder: Path) -> list[Child]:
    """The processes of a service that `serve` starts on the machine."""
    stack = ServiceStack(settings, folder, Console(quiet=True), MACHINE)
    return [child for child in stack.children("nats://127.0.0.1:1") if child.role is role]


def settings_in(child: Child) -> Settings:
    """What a process reads that is started so."""
    write_yaml(child.settings, child.config)
    own = {name: text for name, text in child.environment.items() if name.startswith("ANTIPHON_")}
    return load(child.config, environ=own).settings


def plan_of(settings: Settings, folder: Path) -> ResolvedConfig:
    """What the last worker decides."""
    worker = children(settings, Role.WORKER, folder)[-1]
    return resolve(settings_in(worker), CARD, MACHINE)


@pytest.mark.parametrize(
    ("flag", "role"),
    [
        shows("--dp-size", Role.WORKER),
        shows("--data-parallel-size", Role.WORKER),
        shows("--tokenizer-worker-num", Role.TOKENIZER),
        shows("--detokenizer-worker-num", Role.DETOKENIZER),
    ],
)
def test_argument_is_the_number_of_processes_of_a_service(
    flag: str, role: Role, tmp_path: Path
) -> None:
    def names(settings: Settings) -> list[str]:
        return [child.instance for child in children(settings, role, tmp_path)]

    given, without = compare(flag, "3", observe=names)
    assert given == [f"{role}-0", f"{role}-1", f"{role}-2"]
    assert without == [f"{role}-0"]


def test_workers_share_cores_and_running_requests(tmp_path: Path) -> None:
    def held(settings: Settings) -> tuple[int, int, int]:
        plan = plan_of(settings, tmp_path)
        return plan.threads.value, plan.running_max.value, plan.cache_pages.value

    given, without = compare("--dp-size", "3", observe=held)
    assert without == (6, 64, 64 * 512 // 16)
    assert given == (2, 64 // 3, 64 // 3 * 512 // 16)


@pytest.mark.parametrize(
    "pool",
    [
        ("--cache-memory-ratio", "0.5", "--cache-bytes-max", str(90 * GIB)),
        ("--cache-memory-ratio", "1", "--cache-bytes-max", str(GIB)),
        ("--mem-fraction-static", "0.5"),
    ],
)
def test_workers_share_the_memory_of_pages(pool: tuple[str, ...], tmp_path: Path) -> None:
    """The weights of each come off its own share."""

    def bytes_of_pages(settings: Settings) -> int:
        return plan_of(settings, tmp_path).cache_bytes.value

    base = ("--max-running-requests", "1000000000", *pool)
    given, without = compare("--dp-size", "3", observe=bytes_of_pages, base=base)
    weights, ratio = GIB, 1.0 if pool[0] == "--mem-fraction-static" else 0.5
    lost = 0 if str(GIB) in pool else ratio * (weights - weights / 3)
    assert given == pytest.approx(without / 3 - lost, rel=0.02)


@pytest.mark.parametrize("argument", ["--max-total-tokens", "--model-threads"])
def test_worker_has_what_is_given_for_each(argument: str, tmp_path: Path) -> None:
    plan = plan_of(settings_of("--dp-size", "3", argument, "1600"), tmp_path)
    if argument == "--max-total-tokens":
        assert plan.cache_tokens == 1600
    else:
        assert plan.threads.value == 1600


def test_tokenizers_encode_on_all_cores_together(tmp_path: Path) -> None:
    settings = settings_of("--tokenizer-worker-num", "3", "--tokenizer-threads", "5")
    threads = [
        settings_in(child).tokenizer.threads
        for child in children(settings, Role.TOKENIZER, tmp_path)
    ]
    assert threads == [2, 2, 2]


def test_a_single_process_of_a_service_has_the_whole_machine(tmp_path: Path) -> None:
    settings = settings_of("--tokenizer-threads", "5")
    for role in Role:
        (child,) = children(settings, role, tmp_path)
        assert settings_in(child) == msgspec.structs.replace(
            settings, bus=msgspec.structs.replace(settings.bus, url="nats://127.0.0.1:1")
        )
