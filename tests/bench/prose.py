"""Perplexity of a real model over our own documentation: Antiphon and others, same GGUF file.

    python -m tests.bench.prose
    python -m tests.bench.prose --ids               print the windows, for any other reader

transformers reads it in float32 with the numbers that the blocks stand for. llama.cpp, installed
as by `make bench-peers`, multiplies the blocks with activations that it rounds to eight bits, and
keeps keys and values in float16.

The text is a copy of docs/ that stays as it is. Its first 4,096 tokens, without special ones, are
four windows of 1,024, each read by itself; all tokens of a window but its first are scored.
"""

from __future__ import annotations

import gc
import math
import os
import subprocess
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.nn.functional as F  # noqa: N812
from tests.bench.models import CACHE, fetched
from tests.bench.peers.peer import NotHere
from tests.bench.peers.servers import LLAMA_VERSION, LlamaCpp
from tests.bench.summary import RESULTS, Measurement, Summary, arguments, here, report, single
from tests.models.stepper import spy_on_logits, stepper
from tests.support.models import open_model

from antiphon.model_card.packaged import packaged
from antiphon.model_card.served_model import model_files, tokenizer_folder
from antiphon.model_card.tokenizer_file import open_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from antiphon.model_card.files import ModelFiles

PROSE = Path(__file__).parent / "prose.txt"
FILE = RESULTS / "prose.json"
MODEL = "smollm2"
WINDOW, WINDOWS = 1024, 4
PAGE_TOKENS, CHUNK = 16, 256


def windows(ids: Sequence[int]) -> list[Sequence[int]]:
    assert len(ids) >= WINDOW * WINDOWS, f"the text has {len(ids)} tokens"
    return [ids[start : start + WINDOW] for start in range(0, WINDOW * WINDOWS, WINDOW)]


def perplexity(logits: Callable[[Sequence[int]], Tensor], texts: Sequence[Sequence[int]]) -> float:
    losses = [
        F.cross_entropy(logits(ids)[:-1].double(), torch.tensor(ids[1:]), reduction="none")
        for ids in texts
    ]
    return math.exp(float(torch.cat(losses).mean()))


def perplexity_of(losses: Sequence[Sequence[float]]) -> float:
    """Return the perplexity of losses in nats that another engine computed, a list for each window.

    Raises:
        ValueError: It has scored other tokens.
    """
    scored = [len(each) for each in losses]
    if scored != [WINDOW - 1] * WINDOWS:
        raise ValueError(f"scored {scored} tokens of {WINDOWS} windows")
    return math.exp(fmean(loss for each in losses for loss in each))


def llama_cpp(peer: LlamaCpp, files: ModelFiles, texts: Sequence[Sequence[int]]) -> float:
    """llama.cpp's, of the file as it is; each window from an empty cache.

    Raises:
        NotHere: It cannot be installed, or does not read the file.
    """
    command = [*peer.reader(), str(files.weights[0]), str(peer.cores)]
    asked = msgspec.json.encode(texts)
    done = subprocess.run(command, input=asked, capture_output=True, check=False)
    if done.returncode:
        raise NotHere(f"llama.cpp: {done.stderr.decode(errors='replace').strip()[-300:]}")
    return perplexity_of(msgspec.json.decode(done.stdout, type=list[list[float]]))


def ours(files: ModelFiles, dtype: str) -> Callable[[Sequence[int]], Tensor]:
    """Our own runner, chunk by chunk over pages; opened anew for each text."""

    def logits(ids: Sequence[int]) -> Tensor:
        pages = WINDOW // PAGE_TOKENS + 2
        model = open_model(files, page_tokens=PAGE_TOKENS, pages=pages, dtype=dtype)
        seen = spy_on_logits(model.runner)
        one = stepper(model, [list(ids)])
        for _ in range(0, len(ids), CHUNK):
            one.step({0: CHUNK}, all_logits=True)
        return torch.cat(seen)

    return logits


def theirs(files: ModelFiles) -> Callable[[Sequence[int]], Tensor]:
    """transformers' model in float32, with the numbers that the file's blocks stand for."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint  # noqa: PLC0415

    config = AutoConfig.from_pretrained(files.folder)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    read: Any = load_gguf_checkpoint(files.weights[0], return_tensors=True, model_to_load=model)
    missing, unexpected = model.load_state_dict(read["tensors"], strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}, missing  # tied
    model.tie_weights()

    def logits(ids: Sequence[int]) -> Tensor:
        return model(torch.tensor([list(ids)])).logits[0]

    return logits


def measure(files: ModelFiles, texts: Sequence[Sequence[int]], peer: LlamaCpp | None) -> Summary:
    """Score the texts with every reader; `change` is against the first one, as a share.

    Raises:
        NotHere: The peer cannot.
    """
    readers: dict[str, Callable[[], float]] = {
        "transformers, float32": lambda: perplexity(theirs(files), texts),
        "antiphon, float32": lambda: perplexity(ours(files, "float32"), texts),
        "antiphon, bfloat16": lambda: perplexity(ours(files, "bfloat16"), texts),
    }
    if peer is not None:
        readers[f"llama.cpp, {LLAMA_VERSION}"] = partial(llama_cpp, peer, files, texts)
    rows: list[Measurement] = []
    for name, reader in readers.items():
        found = round(reader(), 5)
        change = round(found / (rows[0].middle if rows else found) - 1, 6) + 0.0
        rows += [single("perplexity", found, arm=name), single("change", change, arm=name)]
        gc.collect()
    wheel = packaged(MODEL)
    assert wheel is not None
    setup = {"model": MODEL, "file_sha256": wheel.member_sha256, "tokens": WINDOW * WINDOWS}
    return here("prose", setup, rows)


def main() -> None:
    parser = arguments(description=__doc__, file=FILE.name)
    parser.add_argument("--ids", action="store_true")
    parser.add_argument("--cache", type=Path, default=CACHE, help="where peer and model live")
    parser.add_argument("--without-peer", action="store_true", help="leave llama.cpp out")
    given = parser.parse_args()
    # The ids alone go to the other end of a pipe.
    settings = fetched(MODEL, given.cache, stderr=given.ids)
    tokenizer = open_tokenizer(tokenizer_folder(settings))
    texts = windows(tokenizer.encode(PROSE.read_text(), add_special_tokens=False).ids)
    if given.ids:
        print(msgspec.json.encode(texts).decode())
        return
    peer = None if given.without_peer else LlamaCpp(given.cache, os.cpu_count() or 1)
    try:
        with torch.inference_mode():
            summary = measure(model_files(settings), texts, peer)
    except NotHere as error:
        parser.error(f"{error}; --without-peer leaves it out")
    report(summary, given.json)


if __name__ == "__main__":
    main()
