"""An encoder returns with other weights under the same path, and no page of before is found."""

from __future__ import annotations

import os
import re
import shutil
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import transformers
from openai import AsyncOpenAI
from safetensors.torch import load_file, save_file
from tests.support.llava import picture, write_llava
from tests.system.seeing import Seeing, answer, message
from tests.system.stack import serving, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

ENCODER = "encoder-0"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    """The folder is that of the encoder, which has the weights of the worker at first."""
    folder = write_llava(tmp_path_factory.mktemp("llava"))
    tower = tmp_path_factory.mktemp("encoder") / "llava"
    shutil.copytree(folder, tower)
    with serving(
        *("--model-path", str(folder), "--served-model-name", "tiny", "--dtype", "float32"),
        *("--encoder-model-path", str(tower), "--page-size", "16"),
    ) as stack:
        yield Seeing(stack, tower, transformers.LlavaForConditionalGeneration)


@pytest.fixture
async def client(seeing: Seeing) -> Any:
    async with AsyncOpenAI(base_url=f"{seeing.stack.url}/v1", api_key="none") as made:
        yield made


def towers(seeing: Seeing) -> list[str]:
    """The digests that the worker has asked encoders of, in order."""
    lines = seeing.stack.log("worker-0").splitlines()
    found = (re.search(r"\b[0-9a-f]{64}\b", line) for line in lines if "tower" in line)
    return [each[0] for each in found if each is not None]


async def test_an_image_is_embedded_again_by_an_encoder_with_other_weights(
    seeing: Seeing, client: AsyncOpenAI
) -> None:
    # So long that a page ends behind the image.
    image, question = picture(1), "Which of the two is larger, and what is the colour of the sky?"
    prompt, output = await answer(client, message(image, question))
    seeing.check(prompt, output, [image])
    worked = seeing.worked()
    assert await answer(client, message(image, question)) == (prompt, output)
    assert seeing.worked() == worked, "its pages are found"
    assert len(towers(seeing)) == 1

    file = seeing.folder / "model.safetensors"
    weights = load_file(file)
    (name,) = (name for name in weights if name.endswith("patch_embedding.weight"))
    save_file(weights | {name: -weights[name]}, file, metadata={"format": "pt"})
    pid = seeing.stack.pid(ENCODER)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(towers(seeing)) == 2, 60, "the encoder has returned")
    changed = replace(seeing)  # with a reference of its own, of the other weights
    again = await answer(client, message(image, question))
    assert again[0] == prompt
    assert again[1] != output
    changed.check(*again, [image])
    assert changed.worked() == (1, 1)
