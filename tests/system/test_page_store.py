"""Cached prefixes outlive their worker in kv_storage: the text is equal, and less is computed."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import pytest
from tests.system.stack import Stack, module_stack, pages_in_use, read, wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK = 64
PREFIX = [5 + number * 7 % 200 for number in range(12 * BLOCK)]

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


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
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
