"""Settings of every test: one thread a process, since the tests run in two; rare collections."""

from __future__ import annotations

import gc
import os
import sys

import hypothesis
import pytest
from tests.support import worlds
from tests.support.skips import kernels_expected, unexpected

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Threads of services and encoders that wait for each other leave the cores to their neighbours.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Operations of bitsandbytes would compile themselves, for longer than a test may take.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# No deadline for an example: beside a neighbour it is the machine's speed that would be tested.
hypothesis.settings.register_profile("antiphon", deadline=None)
hypothesis.settings.load_profile("antiphon")

# As in a service: Python's own threshold spends a sixth of the fast tests' time on collections of
# what importing has created.
YOUNG_MAX = 10_000


def pytest_addoption(parser: pytest.Parser) -> None:
    worlds.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.world_seed is None:  # here, so that all processes of a run have the same seed
        config.option.world_seed = worlds.commit_seed()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_MAX)


def one_thread() -> None:
    """Opening a model sets torch's threads to the cores that all tests share."""
    if (torch := sys.modules.get("torch")) is not None and torch.get_num_threads() > 1:
        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    one_thread()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    one_thread()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run in which more tests were skipped than this machine explains."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or session.config.getoption("collectonly"):
        return
    reports = reporter.stats.get("skipped", [])
    reasons = [
        report.longrepr[2] for report in reports if isinstance(report.longrepr, tuple | list)
    ]
    for line in unexpected(reasons, kernels=kernels_expected()):
        reporter.write_line(line, red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    worlds.write_summary(terminalreporter)
