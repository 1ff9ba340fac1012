"""Cached prefixes outlive their worker in kv_storage: the text is equal, and less is computed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest
from tests.system.stack import Stack, module_stack, pages_in_use, read, serving, wait_until

from antiphon.kv_storage.disk import DiskTier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

BLOCK = 64
PREFIX = [5 + number * 7 % 200 for number in range(12 * BLOCK)]

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

stack = module_stack(
    "--enable-hierarchical-cache",
    "--hicache-storage-backend",
    "kv_storage",
    "--enable-deterministic-inference",
)
small = module_stack(
    "--enable-hierarchical-cache",
    "--hicache-storage-backend",
    "kv_storage",
    "--max-total-tokens",
    "1024",
)


def answer(stack: Stack, ids: Sequence[int]) -> tuple[list[int], int]:
    """The output ids of a greedy request, and how many of its prompt tokens were cached."""
    sampling = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    reply: Any = stack.post("/generate", {"input_ids": list(ids), "sampling_params": sampling})
    return reply["output_ids"], reply["meta_info"]["cached_tokens"]


def saved_blocks(stack: Stack) -> int:
    lines = read(f"{stack.url}/metrics").splitlines()
    name = 'antiphon_saved_blocks_total{result="stored"}'
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(name))


def restart_worker(stack: Stack) -> None:
    pid = stack.pid("worker-0")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: stack.pid("worker-0") not in {None, pid}, 30, "worker again")
    wait_until(stack.healthy, 60, "healthy")


def forget(stack: Stack) -> None:
    """Empty the worker's own cache, as if it had just begun."""
    stack.get("/flush_cache?timeout=10")


def test_restarted_worker_computes_only_what_follows_the_stored_prefix(stack: Stack) -> None:
    prompts = [[*PREFIX, *range(9, 49)], [*PREFIX, *range(60, 90)]]
    before = [answer(stack, prompt) for prompt in prompts]
    assert before[0][1] == 0
    wait_until(lambda: saved_blocks(stack) >= 12, 30, "blocks stored")
    restart_worker(stack)
    after = [answer(stack, prompt) for prompt in prompts]
    assert [ids for ids, _ in after] == [ids for ids, _ in before]
    assert [cached for _, cached in after] == [len(PREFIX)] * 2
    wait_until(lambda: pages_in_use(stack) == 0, 30, "no pages in use")


def test_prefixes_that_were_evicted_come_back_from_storage(small: Stack) -> None:
    prompts = [[10 + number, *PREFIX[: 10 * BLOCK], number + 30] for number in range(4)]
    before = [answer(small, prompt) for prompt in prompts]
    assert [cached for _, cached in before] == [0] * 4
    wait_until(lambda: saved_blocks(small) >= 40, 30, "blocks stored")
    for _ in range(2):
        again = [answer(small, prompt) for prompt in prompts]
        assert [ids for ids, _ in again] == [ids for ids, _ in before]
        assert min(cached for _, cached in again) >= 10 * BLOCK
    wait_until(lambda: pages_in_use(small) == 0, 30, "no pages in use")


@pytest.mark.parametrize(
    "fate", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)]
)
def test_lost_or_stopped_storage_is_a_miss(stack: Stack, fate: signal.Signals) -> None:
    prompt = [*PREFIX[: 8 * BLOCK], 11 + fate]
    ids, _ = answer(stack, prompt)
    node = stack.pid("kv_storage-0")
    assert node is not None
    os.kill(node, fate)
    try:
        restart_worker(stack)
        assert answer(stack, prompt) == (ids, 0)
    finally:
        if fate == signal.SIGSTOP:
            os.kill(node, signal.SIGCONT)


def test_request_that_waits_for_a_stopped_node_is_passed_by_others(stack: Stack) -> None:
    long, short = [*PREFIX[: 8 * BLOCK], 13], [21, 22, 23]
    expected = [answer(stack, prompt)[0] for prompt in (long, short)]
    before, others = saved_blocks(stack), prompts(10, seed=3)
    for prompt in others:
        answer(stack, prompt)
    wait_until(lambda: saved_blocks(stack) >= before + 6 * len(others), 30, "blocks stored")
    forget(stack)
    assert any(answer(stack, prompt)[1] for prompt in others), "the worker sees the node"
    node = stack.pid("kv_storage-0")
    assert node is not None
    os.kill(node, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(answer, stack, long)
            assert answer(stack, short)[0] == expected[1]
            assert not waiting.done()
            assert waiting.result(30) == (expected[0], 0)
    finally:
        os.kill(node, signal.SIGCONT)


@contextmanager
def node(stack: Stack, instance: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run one more node, with a disk."""
    named = ("--instance", instance, "--parent-pid", str(os.getpid()))
    disk = ("--kv-storage-disk-path", str(folder), "--health-port", "0")
    command = [sys.executable, "-m", "antiphon.kv_storage", *named, *disk]
    with (stack.logs / f"{instance}.log").open("wb") as output:
        process = subprocess.Popen(
            [*command, "--bus-url", stack.nats_url], stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Path]]:
    """A stack whose node has a disk."""
    folder = tmp_path_factory.mktemp("pages")
    with serving(
        "--enable-hierarchical-cache",
        *("--hicache-storage-backend", "kv_storage", "--kv-storage-disk-path", str(folder)),
        "--enable-deterministic-inference",
    ) as running:
        yield running, folder


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts of six blocks and some tokens, which begin differently."""
    return [[5 + seed, 6 + number, *PREFIX[: 6 * BLOCK]] for number in range(count)]


def files(folder: Path) -> int:
    return len(list(folder.glob("*.page")))


def test_two_nodes_share_chains_and_one_of_them_may_die(
    on_disk: tuple[Stack, Path], tmp_path: Path
) -> None:
    stack, first = on_disk
    with node(stack, "kv_storage-1", tmp_path) as other:
        wait_until(lambda: "ready" in stack.log("kv_storage-1"), 30, "a second node")
        restart_worker(stack)  # which sees both from the first request on
        asked = prompts(10, seed=1)
        before = [answer(stack, prompt)[0] for prompt in asked]
        stored = 6 * len(asked)
        wait_until(lambda: files(first) + files(tmp_path) >= stored, 30, "blocks stored")
        assert files(first) % 6 == 0 == files(tmp_path) % 6, "chains are whole on one node"
        on_other = files(tmp_path) // 6
        assert 0 < on_other < len(asked)
        forget(stack)
        after = [answer(stack, prompt) for prompt in asked]
        assert after == [(ids, 6 * BLOCK) for ids in before]
        other.kill()
        forget(stack)
        found = [answer(stack, prompt) for prompt in asked]
        assert [ids for ids, _ in found] == before
        assert sorted(cached for _, cached in found) == (
            [0] * on_other + [6 * BLOCK] * (len(asked) - on_other)
        )


def kill_while_it_stores(stack: Stack, prompt: Sequence[int], blocks: Callable[[], bool]) -> None:
    """Ask for a prompt until its node has so many blocks, and kill it then."""
    pid = stack.pid("kv_storage-0")
    assert pid is not None
    killed = Event()

    def ask() -> None:
        while not killed.is_set():  # a node that has just begun is not seen by the first request
            answer(stack, prompt)

    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(ask)
        try:
            while not blocks() and not asking.done():
                pass  # the blocks of a prompt are written within milliseconds
            os.kill(pid, signal.SIGKILL)
        finally:
            killed.set()
        asking.result(30)
    wait_until(lambda: stack.pid("kv_storage-0") not in {None, pid}, 30, "node again")


def test_node_that_is_killed_while_it_stores_keeps_what_it_has_stored(
    on_disk: tuple[Stack, Path], tmp_path: Path
) -> None:
    stack, folder = on_disk
    asked, had_first = prompts(5, seed=2), files(folder)
    for number, prompt in enumerate(asked):
        had = files(folder)
        kill_while_it_stores(stack, prompt, lambda had=had, more=number: files(folder) > had + more)
        copy = tmp_path / str(number)
        shutil.copytree(folder, copy)
        disk = DiskTier(copy, 2**30)
        found = [disk.get(name) for name in list(disk.index)]
        assert len(found) > had
        assert all(page is not None for page in found)
        assert {page.parent for page in found if page} <= {None, *disk.index}
    before = [answer(stack, prompt)[0] for prompt in asked]

    def stored_again() -> bool:
        """Ask again, which offers what the node has not stored, until it has all of it."""
        assert [answer(stack, prompt)[0] for prompt in asked] == before
        return files(folder) >= had_first + 6 * len(asked)

    wait_until(stored_again, 30, "what was lost stored again")
    forget(stack)
    after = [answer(stack, prompt) for prompt in asked]
    assert [ids for ids, _ in after] == before
    assert after[-1][1] == 6 * BLOCK


@pytest.fixture(
    scope="module", params=["--tp-size", pytest.param("--pp-size", marks=pytest.mark.long)]
)
def ranked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Stack, Path]]:
    """A stack whose worker has two ranks, or two stages, and whose node has a disk."""
    folder = tmp_path_factory.mktemp("shards")
    with serving(
        *(request.param, "2"),
        "--enable-hierarchical-cache",
        *("--hicache-storage-backend", "kv_storage", "--kv-storage-disk-path", str(folder)),
        "--enable-deterministic-inference",
    ) as running:
        yield running, folder


def restart_node(stack: Stack) -> None:
    pid = stack.pid("kv_storage-0")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: stack.pid("kv_storage-0") not in {None, pid}, 30, "node again")


def test_ranks_compute_only_what_follows_the_stored_prefix(ranked: tuple[Stack, Path]) -> None:
    stack, folder = ranked
    asked = [[*PREFIX, *range(9, 49)], [*PREFIX, *range(60, 90)]]
    before = [answer(stack, prompt) for prompt in asked]
    wait_until(lambda: files(folder) >= 2 * 12, 30, "both shards of all blocks stored")
    restart_worker(stack)
    after = [answer(stack, prompt) for prompt in asked]
    assert [ids for ids, _ in after] == [ids for ids, _ in before]
    assert [cached for _, cached in after] == [len(PREFIX)] * 2
    wait_until(lambda: pages_in_use(stack) == 0, 30, "no pages in use")


def test_shard_that_is_lost_on_one_rank_is_computed_by_all(ranked: tuple[Stack, Path]) -> None:
    stack, folder = ranked
    prompt = prompts(1, seed=4)[0]
    had = set(folder.glob("*.page"))
    ids, _ = answer(stack, prompt)
    wait_until(lambda: files(folder) == len(had) + 2 * 6, 30, "both shards of all blocks stored")
    lost = min(set(folder.glob("*.page")) - had)
    damaged = bytearray(lost.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    lost.write_bytes(damaged)
    restart_node(stack)
    restart_worker(stack)
    again, cached = answer(stack, prompt)
    assert again == ids
    assert cached in range(0, 6 * BLOCK, BLOCK)
