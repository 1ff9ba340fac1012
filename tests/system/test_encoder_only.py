"""Encoders of their own `antiphon serve`, for a server without any on the same bus."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import transformers
from openai import AsyncOpenAI
from tests.support.llava import picture, write_llava
from tests.system.seeing import Seeing, answer, message
from tests.system.stack import PROGRAM, serving, stop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


@contextmanager
def encoders_alone(*arguments: str) -> Iterator[str]:
    """Run encoders until left, then stop them as Ctrl-C does; yield the line that says ready.

    Raises:
        AssertionError: They did not start, or did not stop by themselves.
    """
    process = subprocess.Popen(
        [sys.executable, "-um", PROGRAM, "serve", "--encoder-only", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        lines = list[str]()
        for line in process.stdout:
            lines.append(line)
            if line.startswith("ready"):
                break
        else:
            raise AssertionError(f"encoders did not start: {''.join(lines)}")
        yield line
        assert stop(process) == 0
    finally:
        stop(process)


async def test_images_are_embedded_by_encoders_that_were_started_alone(tmp_path: Path) -> None:
    folder = write_llava(tmp_path)
    model = ("--model-path", str(folder), "--served-model-name", "tiny", "--dtype", "float32")
    host = re.sub(r"\W", "-", platform.node())
    with serving(*model, "--language-only") as stack:
        ports = ("--supervisor-metrics-port-base", "0")
        with encoders_alone(*model, *ports, "--bus-url", stack.nats_url) as ready:
            assert "encoders · model tiny" in ready
            assert re.search(rf"metrics \(encoder-{host}-0 \d+\)$", ready.strip()), ready
            seeing = Seeing(stack, folder, transformers.LlavaForConditionalGeneration)
            async with AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as client:
                prompt, output = await answer(client, message("What is this?", picture(1)))
        seeing.check(prompt, output, [picture(1)])
