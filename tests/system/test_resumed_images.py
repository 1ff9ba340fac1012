"""Images of streams whose gateway dies: they are embedded from the gateway that follows it."""

from __future__ import annotations

import os
import re
import signal
from contextlib import contextmanager
from dataclasses import replace
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.llava import picture, write_llava
from tests.system.seeing import message
from tests.system.stack import Stack, pages_in_use, second_gateway, serving, wait_until
from tests.system.test_resume import Output, read, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.system, pytest.mark.long, pytest.mark.timeout(300)]

PATH = "/v1/chat/completions"
FIELDS = {"model": "tiny", "temperature": 0, "max_tokens": 900, "stream": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = write_llava(tmp_path_factory.mktemp("llava"))
    with serving(
        *("--model-path", str(folder), "--served-model-name", "tiny", "--dtype", "float32"),
        "--enable-deterministic-inference",
    ) as made:
        yield made


@pytest.fixture(scope="module")
def other(stack: Stack) -> Iterator[Stack]:
    """The stack as a second gateway shows it."""
    with second_gateway(stack) as url:
        yield replace(stack, url=url)


def body_of(image: bytes) -> dict[str, Any]:
    return FIELDS | {"messages": message(image, "What is this?")}


def media_bytes(stack: Stack) -> int:
    """Those of all gateways that live."""
    return total(stack, "media_bytes")


def embedded(stack: Stack) -> int:
    """Images that encoders have embedded, dead ones included."""
    return total(stack, "encoder_request_e2e_latency_seconds_count")


def total(stack: Stack, metric: str) -> int:
    pattern = rf"^antiphon_{metric}(?:{{[^}}]*}})? (\S+)$"
    found = re.findall(pattern, stack.get("/metrics"), re.MULTILINE)
    return int(sum(map(float, found)))


def kill(stack: Stack, *instances: str) -> None:
    for instance in instances:
        pid = stack.pid(instance)
        assert pid is not None, instance
        os.kill(pid, signal.SIGKILL)


@contextmanager
def reading(
    output: Output,
    stack: Stack,
    body: dict[str, Any],
    stop: Callable[[Output], bool] = lambda _: False,
) -> Iterator[None]:
    """Read a stream, or its rest, until it ends, or its gateway dies in the block."""
    reader = Thread(target=read, args=(output, stack.url, PATH, body, stop))
    reader.start()
    yield
    reader.join(120)
    assert not reader.is_alive()


def resume(output: Output, stack: Stack, body: dict[str, Any], image: bytes, *dying: str) -> None:
    """Read the rest of a stream at a gateway; these processes die once it has the image."""
    wait_until(lambda: not media_bytes(stack), 30, "the dead gateway's image is not counted")
    with reading(output, stack, body):
        wait_until(lambda: media_bytes(stack) == len(image), 30, "the image is here")
        kill(stack, *dying)
    assert output.done
    wait_until(lambda: not media_bytes(stack), 30, "no media are held")
    wait_until(lambda: pages_in_use(stack) == 0, 30, "no pages are in use")


def test_image_is_embedded_again_for_the_worker_that_follows_the_dead_one(
    stack: Stack, other: Stack
) -> None:
    """Neither its gateway is left by then, nor an encoder that has its embedding."""
    image = picture(81, 300, 200)
    body, output = body_of(image), Output()
    expected, paused = whole(other.url, PATH, body), Event()
    wait_until(lambda: embedded(other) == 1, 10, "it is embedded")

    def pause(at: Output) -> bool:
        if at.events == 4:
            other.post("/pause_generation", {"mode": "in_place"})
            paused.set()
        return False

    with reading(output, stack, body, pause):
        assert paused.wait(60)
        kill(stack, "gateway-0")
    assert not output.done, "it ended before the kill"
    resume(output, other, body, image, "encoder-0", "worker-0")
    assert output.content == expected.content
    wait_until(lambda: embedded(other) == 2, 10, "it is embedded again")


def test_image_that_no_encoder_had_had_when_its_gateway_died_is_embedded(
    stack: Stack, other: Stack
) -> None:
    wait_until(stack.healthy, 60, "the first gateway is back")
    image = picture(82, 300, 200)
    body, output = body_of(image), Output()
    encoder = stack.pid("encoder-0")
    assert encoder is not None
    os.kill(encoder, signal.SIGSTOP)
    with reading(output, stack, body):
        wait_until(lambda: bool(output.request_id), 60, "the headers")
        kill(stack, "gateway-0")
    assert output.events <= 1, "it has the role, and no text"
    resume(output, other, body, image, "encoder-0")
    assert output.content == whole(other.url, PATH, body).content
