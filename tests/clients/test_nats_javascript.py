"""The NATS client in JavaScript that docs/nats-client.md shows, against a real stack."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from tests.clients.programs import javascript_program, running_on_loopback
from tests.support.nats_link import Action, LinkMessage, linked
from tests.support.wait import until
from tests.system.stack import Stack, module_stack, pages_in_use, second_gateway, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

TOKENS = 400
TOKENS_MAX = 1900
"""About as many as the model's context has."""
END_S = 120.0
SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "two seeded choices": {"temperature": 1, "seed": 7, "n": 2},
    "logprobs": {"temperature": 0.5, "seed": 3},
}

stack = module_stack("--enable-deterministic-inference")


@pytest.fixture(scope="module")
def other(stack: Stack) -> Iterator[str]:
    with second_gateway(stack) as url:
        yield url


class Output:
    """What one request of the program has received."""

    def __init__(self) -> None:
        self.texts: defaultdict[int, str] = defaultdict(str)
        self.logprobs: list[float] = []
        self.written = b""  # what the tokens contribute to the text
        self.chunks = 0
        self.end: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None
        self.ended = False

    def add(self, line: dict[str, Any]) -> None:
        if (whole := line.get("whole")) is not None:
            for choice in whole["choices"]:
                self.texts[choice["choice"]] = choice["text"]
                for details in choice["details"]:
                    self._add_details(details)
        if (chunk := line.get("chunk")) is not None:
            self.chunks += 1
            self.texts[chunk["choice"]] += chunk["text"]
            if chunk["details"] is not None:
                self._add_details(chunk["details"])
        self.end = line.get("whole") or line.get("end")
        self.error = line.get("error")
        self.ended = chunk is None

    def _add_details(self, details: dict[str, Any]) -> None:
        assert details["offset"] == len(self.logprobs)
        assert details["count"] == len(details["logprobs"]) == len(details["top_ids"]) / 2
        self.logprobs += details["logprobs"]
        for token in map(str, details["token_ids"]):
            written = details["written"].get(token)
            text = details["texts"][token].encode() if written is None else bytes.fromhex(written)
            self.written += text

    @property
    def content(self) -> tuple[object, ...]:
        return dict(self.texts), self.logprobs


class Program:
    """The running client."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def outputs(self) -> dict[str, Output]:
        outputs: defaultdict[str, Output] = defaultdict(Output)
        for line in self._log.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                assert line.startswith("{"), line
                read = json.loads(line)
                outputs[read["name"]].add(read)
        return outputs

    async def received(self, count: int, chunks: int) -> None:
        """Wait until each of so many requests has more than `chunks` pieces of its output."""
        await until(
            lambda: sum(each.chunks > chunks for each in self.outputs().values()) == count, END_S
        )

    async def ended(self, count: int) -> dict[str, Output]:
        await until(lambda: sum(each.ended for each in self.outputs().values()) == count, END_S)
        return self.outputs()


@contextmanager
def running(
    folder: Path, nats_url: str, requests: list[dict[str, Any]], form: str = "msgpack"
) -> Iterator[Program]:
    """Run the client with these requests, all at once."""
    (folder / "requests.jsonl").write_text("".join(json.dumps(each) + "\n" for each in requests))
    options = json.dumps({"servers": nats_url, "format": form})
    command = [*javascript_program("run.mjs"), options, "requests.jsonl"]
    with running_on_loopback(command, folder=folder, environment={}):
        yield Program(folder / "client.log")


def messages() -> list[dict[str, str]]:
    return [{"role": "user", "content": "Add all numbers from 1 to 40."}]


def request(stack: Stack, kind: str, tokens: int = TOKENS, **fields: Any) -> dict[str, Any]:
    details = {"details": {"logprobs": True, "top": 2}, "token_texts": True}
    return {
        "model": stack.model,
        "messages": messages(),
        "max_tokens": tokens,
        "ignore_eos": True,
        "resume_s": 30,
        **SAMPLED[kind],
        **(details if kind == "logprobs" else {}),
        **fields,
    }


def over_http(stack: Stack, tokens: int = TOKENS) -> dict[str, tuple[object, ...]]:
    """The content of the same requests over HTTP, by kind."""

    def content(kind: str) -> tuple[object, ...]:
        body = {"messages": messages(), "max_tokens": tokens, "ignore_eos": True} | SAMPLED[kind]
        if kind == "logprobs":
            body |= {"logprobs": True, "top_logprobs": 2}
        answer = stack.post("/v1/chat/completions", body)
        texts = {choice["index"]: choice["message"]["content"] for choice in answer["choices"]}
        logprobs = [
            token["logprob"]
            for choice in answer["choices"]
            for token in (choice["logprobs"] or {"content": []})["content"]
        ]
        return texts, pytest.approx(logprobs, abs=1e-6)

    with ThreadPoolExecutor(len(SAMPLED)) as asking:
        return dict(zip(SAMPLED, asking.map(content, SAMPLED), strict=True))


@pytest.fixture(scope="module")
def expected(stack: Stack) -> dict[str, tuple[object, ...]]:
    return over_http(stack)


@pytest.mark.parametrize("form", ["msgpack", "json"])
def test_output_is_that_of_http(
    stack: Stack, other: str, expected: dict[str, tuple[object, ...]], tmp_path: Path, form: str
) -> None:
    requests = [
        {"name": f"{kind}{'!' * complete}", "request": request(stack, kind), "complete": complete}
        for kind in SAMPLED
        for complete in (False, True)
    ]
    with running(tmp_path, stack.nats_url, requests, form) as program:
        outputs = asyncio.run(program.ended(len(requests)))
    for name, output in outputs.items():
        kind = name.rstrip("!")
        assert output.error is None
        assert output.end is not None
        assert output.content == expected[kind], name
        assert {choice["finish_reason"] for choice in output.end["choices"]} == {"length"}
        count = SAMPLED[kind].get("n", 1)
        assert output.end["usage"]["completion_tokens"] == count * TOKENS
        assert kind != "logprobs" or output.written.decode() == output.texts[0]


def test_errors_have_their_code(stack: Stack, other: str, tmp_path: Path) -> None:
    position = {"request_id": "0" * 32, "places": [{"choice": 0, "text_offset": 1}]}
    cases: dict[str, dict[str, Any]] = {
        "unavailable": {"model": "another/one"},
        "invalid_request": {"temperature": -1},
        "prompt_too_long": {"prompt": "word " * 4000, "messages": None},
        "stream_not_found": {"resume_from": position},
        "deadline": {"timeout_s": 0.2, "max_tokens": TOKENS_MAX},
    }
    requests = [
        {"name": code, "request": request(stack, "greedy", **fields)}
        for code, fields in cases.items()
    ]
    with running(tmp_path, stack.nats_url, requests) as program:
        outputs = asyncio.run(program.ended(len(requests)))
    codes = {name: output.error and output.error["code"] for name, output in outputs.items()}
    assert codes == {code: code for code in cases}


def test_leaving_the_loop_cancels_the_request(stack: Stack, other: str, tmp_path: Path) -> None:
    def cancelled() -> float:
        lines = stack.get("/metrics").splitlines()
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith("antiphon_num_requests_total{") and "cancelled" in line
        )

    before = cancelled()
    requests = [
        {"name": str(n), "request": request(stack, "greedy", TOKENS_MAX), "leave_after": 3}
        for n in range(3)
    ]
    with running(tmp_path, stack.nats_url, requests) as program:
        outputs = asyncio.run(program.ended(3))
    assert all(output.end is None and output.chunks == 3 for output in outputs.values())
    wait_until(lambda: cancelled() == before + 3, 30, "three cancelled requests")


@pytest.mark.parametrize("form", ["msgpack", pytest.param("json", marks=pytest.mark.long)])
async def test_lost_messages_are_healed(
    stack: Stack, other: str, expected: dict[str, tuple[object, ...]], tmp_path: Path, form: str
) -> None:
    """Each third message of the output, and the first ends and acceptances, are lost."""
    seen: defaultdict[bytes, int] = defaultdict(int)

    def loses(message: LinkMessage) -> Action:
        kinds = (b"GenerateAccepted", b"GenerateText", b"GenerateEnd")
        kind = next((kind for kind in kinds if kind in message.payload), b"")
        if message.sent or not kind:
            return Action.PASS
        seen[kind] += 1
        lost = seen[kind] % 3 == 0 if kind == kinds[1] else seen[kind] <= 2
        return Action.DROP if lost else Action.PASS

    requests = [{"name": kind, "request": request(stack, kind)} for kind in SAMPLED]
    async with linked(stack.nats_url) as link:
        link.rule = loses
        with running(tmp_path, link.url, requests, form) as program:
            outputs = await program.ended(len(requests))
    for kind, output in outputs.items():
        assert output.error is None
        assert output.content == expected[kind], kind


@pytest.mark.long  # the gateway's part of it is tested with the client in Python, too
async def test_responses_survive_a_lost_connection(
    stack: Stack, other: str, tmp_path: Path
) -> None:
    def gone() -> int:
        logs = [stack.log("gateway-0"), stack.log("gateway-1")]
        return sum(log.count("client is gone") for log in logs)

    expected = await asyncio.to_thread(over_http, stack, TOKENS_MAX)
    requests = [
        {"name": f"{kind}{'!' * n}", "request": request(stack, kind, TOKENS_MAX)}
        for kind in SAMPLED
        for n in range(2)
    ]
    before = gone()
    async with linked(stack.nats_url) as link:
        with running(tmp_path, link.url, requests) as program:
            await program.received(len(requests), 3)
            link.cut()
            await until(lambda: gone() > before, END_S)
            link.up = True
            outputs = await program.ended(len(requests))
    for name, output in outputs.items():
        assert output.error is None
        assert output.content == expected[name.rstrip("!")], name
    await asyncio.to_thread(wait_until, lambda: pages_in_use(stack) == 0, 30, "no pages in use")


async def test_responses_survive_the_death_of_their_gateway(
    stack: Stack, other: str, expected: dict[str, tuple[object, ...]], tmp_path: Path
) -> None:
    requests = [
        {"name": f"{kind}{'!' * n}", "request": request(stack, kind)}
        for kind in SAMPLED
        for n in range(4)
    ]
    adopted = stack.log("scheduler-0").count("request adopted")
    with running(tmp_path, stack.nats_url, requests, "json") as program:
        await program.received(len(requests), 3)
        gateway = stack.pid("gateway-0")
        assert gateway is not None
        os.kill(gateway, signal.SIGKILL)
        outputs = await program.ended(len(requests))
    for name, output in outputs.items():
        assert output.error is None
        assert output.content == expected[name.rstrip("!")], name
    assert stack.log("scheduler-0").count("request adopted") > adopted
    await asyncio.to_thread(wait_until, lambda: pages_in_use(stack) == 0, 30, "no pages in use")
