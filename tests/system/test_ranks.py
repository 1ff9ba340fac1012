"""A worker of two rank processes, or two stages, serves like one, and its ranks end together."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import TYPE_CHECKING
from urllib.request import Request, urlopen

import pytest
from tests.system.stack import Stack, processes, serving, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

TWO_RANKS = "--tp-size 2"
LAYOUTS = {
    TWO_RANKS: "parallel.tp_size; layers run one by one",
    "--pp-size 2": "batching.overlap; stages wait for each other",
    "--tp-size 2 --dp-size 2 --enable-dp-attention": "2 attention groups: batching.running_max",
}
"""What the log says of a worker with two ranks, two stages, or two attention groups."""
LOST = [
    pytest.param(layout, marks=() if layout == TWO_RANKS else pytest.mark.long)
    for layout in LAYOUTS
]
"""Layouts whose rank is lost: two ranks in every run, the others in a long one."""
VERDICTS_S = {signal.SIGKILL: 0.5, signal.SIGSTOP: 4.0}
"""How long it takes to notice: the end of a connection, or twelve missed beats of a quarter second
and the one under way."""
VERDICTS_STARTING_S = {signal.SIGKILL: 0.5, signal.SIGSTOP: 61.0}
"""The same at the start: a rank that stops before it has joined is waited for, for a minute."""
END_S = 2.0
RESTART_S = 60.0


@pytest.fixture(scope="module", params=LAYOUTS)
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    with serving(*request.param.split()) as running:
        yield running


def ranks_of(worker: int) -> list[int]:
    """The other ranks of a worker that live."""
    return [
        pid
        for pid, command in processes()
        if "antiphon.model_worker.ranks" in command and f"--parent-pid {worker} " in f"{command} "
    ]


def worker_of(stack: Stack) -> int:
    pid = stack.pid("worker-0")
    assert pid is not None
    return pid


def test_two_ranks_serve_text_and_grammars(stack: Stack, request: pytest.FixtureRequest) -> None:
    assert len(ranks_of(worker_of(stack))) == 1
    question = [{"role": "user", "content": "What is 17 + 25?"}]
    answer = stack.post(
        "/v1/chat/completions", {"model": stack.model, "messages": question, "temperature": 0}
    )
    assert "42" in answer["choices"][0]["message"]["content"]
    schema = {
        "type": "object",
        "properties": {"n": {"type": "boolean"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    guided = stack.post(
        "/v1/chat/completions",
        {
            "model": stack.model,
            "messages": question,
            "max_tokens": 60,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": schema},
            },
        },
    )
    assert isinstance(json.loads(guided["choices"][0]["message"]["content"])["n"], bool)
    assert LAYOUTS[request.node.callspec.params["stack"]] in stack.log("worker-0")


@pytest.fixture
def generation(stack: Stack) -> Iterator[list[str]]:
    """A long generation that runs meanwhile, and how it ends."""
    outcomes: list[str] = []

    def generate() -> None:
        body = {"prompt": "one two", "max_tokens": 300, "ignore_eos": True, "stream": True}
        request = Request(
            f"{stack.url}/v1/completions",
            json.dumps({**body, "model": stack.model}).encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(request, timeout=60) as answer:
            outcomes.append(answer.read(100).decode())
            outcomes.append(answer.read().decode()[-300:])

    thread = threading.Thread(target=generate)
    thread.start()
    yield outcomes
    thread.join()


@pytest.mark.parametrize("stack", LOST, indirect=True)
def test_a_rank_that_is_killed_in_load_ends_the_worker(stack: Stack, generation: list[str]) -> None:
    lose_a_rank(stack, generation, signal.SIGKILL)


@pytest.mark.parametrize("stack", LOST, indirect=True)
def test_a_rank_that_stands_still_in_load_ends_the_worker(
    stack: Stack, generation: list[str]
) -> None:
    lose_a_rank(stack, generation, signal.SIGSTOP)


def lose_a_rank(stack: Stack, generation: list[str], number: signal.Signals) -> None:
    worker = worker_of(stack)
    (rank,) = ranks_of(worker)
    wait_until(lambda: bool(generation), 30, "the first tokens")
    os.kill(rank, number)
    wait_until(lambda: stack.pid("worker-0") != worker, VERDICTS_S[number] + END_S, "the end")
    assert ranks_of(worker) == [], "a rank has outlived its worker"
    wait_until(lambda: len(generation) > 1, RESTART_S + 30, "the end of the request")
    assert "error" not in generation[1], "it was not continued on the next worker"
    assert generation[1].endswith("data: [DONE]\n\n")
    wait_until(stack.healthy, RESTART_S, "another worker")
    assert len(ranks_of(worker_of(stack))) == 1
    answer = stack.post(
        "/v1/completions", {"model": stack.model, "prompt": "one two", "max_tokens": 4}
    )
    assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stopped", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("stack", LOST, indirect=True)
def test_a_rank_that_is_lost_at_the_start_ends_the_worker(
    stack: Stack, number: signal.Signals
) -> None:
    within_s = VERDICTS_STARTING_S[number] + END_S
    worker = worker_of(stack)
    os.kill(ranks_of(worker)[0], signal.SIGKILL)
    wait_until(lambda: stack.pid("worker-0") not in (worker, None), RESTART_S, "a start")
    starting = worker_of(stack)
    wait_until(lambda: bool(ranks_of(starting)), RESTART_S, "its rank")
    began = time.monotonic()
    os.kill(ranks_of(starting)[0], number)
    wait_until(lambda: stack.pid("worker-0") != starting, within_s, "the end")
    assert time.monotonic() - began < within_s
    assert ranks_of(starting) == []
    wait_until(stack.healthy, RESTART_S, "another worker")
