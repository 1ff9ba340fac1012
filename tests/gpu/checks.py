"""The stages that check a worker on a GPU: `python -m tests.gpu.checks NAME`.

Each prints what it has found as JSON, and fails by an exception.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import product, starmap
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from tests.gpu.models import (
    LOGPROBS,
    greedy_requests,
    open_sized,
    runner_of,
    uncaptured,
    watching,
)
from tests.kernels.dry_run import SAMPLED, Launch, every_launch, loop_of, request
from tests.kernels.interpreted.checks import (
    LONG,
    RAGGED,
    a_shape,
    check_attention,
    check_planned_latents,
)
from tests.kernels.on_device import OnDevice
from tests.kernels.published import MODELS
from tests.models.model_loop import LINEAR, ModelLoop, compare_outputs
from tests.models.rank import Ranks
from tests.support.models import open_model
from tests.support.worker import state
from tokenizers import Tokenizer

from antiphon import embedded
from antiphon.kernels.attention import paged_attention
from antiphon.kernels.flashinfer import attention, latents
from antiphon.kernels.op import AttentionFeatures, DeviceCapability
from antiphon.kernels.triton.backend import SMS
from antiphon.model_card.card import read_card

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tests.kernels.published import Sizes
    from tests.models.model_loop import Output

    from antiphon.model_worker.ranks.protocol import LeadRank
    from antiphon.model_worker.runner.opening import OpenModel

DEVICE = "cuda"
TRITON, FLASHINFER = "attention.paged:triton", "attention.paged:flashinfer"
LATENT = 512, 64
"""Numbers of a latent, and rotated ones beside it, of DeepSeek V2 and V3."""
TORCH = (2, 11), (2, 13)
"""The first and the last release of torch that the kernels are meant to run with on a GPU."""
NEAR_TIES = {"float32": 1e-3, "bfloat16": 0.25}
"""By the dtype of the GPU: how far its logprobs may be from those of the CPU in float32."""
PROMPTS = 64
NEW_TOKENS = 3
"""Of each request whose launches are seen."""
Facts = dict[str, Any]


def versions() -> Facts:
    """Fails where torch is not supported, no kernel is compiled for the GPU, or it cannot add."""
    check_torch(torch.__version__)
    properties = torch.cuda.get_device_properties(DEVICE)
    sm = 10 * properties.major + properties.minor
    one = torch.ones(1024, device=DEVICE)
    assert (one + one).sum().item() == 2048, "a sum on the GPU"
    assert sm in SMS, f"the kernels are not compiled for sm_{sm}"
    return {
        "gpu": properties.name,
        "sm": sm,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version("triton"),
        "python": sys.version.partition(" ")[0],
    }


def check_torch(installed: str) -> None:
    """A torch that is not supported on a GPU ends the stage with one line.

    Raises:
        SystemExit: It is older, or newer.
    """
    first, last = TORCH
    major, minor, *_ = installed.split(".")
    if not first <= (int(major), int(minor)) <= last:
        wanted = " to ".join(f"{major}.{minor}" for major, minor in TORCH)
        raise SystemExit(f"torch {installed} is installed; torch {wanted} is wanted")


def flashinfer(
    device: str = DEVICE,
    *,
    dtype: str = "bfloat16",
    rows: int = 4,
    prompt_tokens: int = 600,
    new_tokens: int = 24,
) -> Facts:
    """FlashInfer's attention equals the reference; left out where its modules are not built.

    A worker that replays steps with it has the tokens that it has with Triton's, but for near ties.
    """
    (row,) = (each for each in paged_attention.backends if each.name == "flashinfer")
    on, sm, compared = torch.device("cpu"), None, 0
    if device == DEVICE:
        major, minor = torch.cuda.get_device_capability(device)
        on, sm = torch.device(device), 10 * major + minor
    for kind, size in product((torch.bfloat16, torch.float16), (64, 128)):
        features = starmap(partial(AttentionFeatures, size), product((False, True), repeat=2))
        every = *features, AttentionFeatures(sum(LATENT), latent=LATENT[0], heads=16)
        lacks = row.needs(DeviceCapability(device, kind, sm, None, every))
        if lacks is not None:
            return {"left out": lacks}
        for window, softcap, sinks in product((None, 200), (None, 30.0), (False, True)):
            shape = a_shape(size=size, page_tokens=16, window=window, dtype=kind)
            for lengths in (RAGGED, LONG):
                check_attention(OnDevice(attention, on), shape, lengths, softcap, sinks=sinks)
                compared += 1
    for kind, heads in product((torch.bfloat16, torch.float16), (16, 128)):
        for lengths in (RAGGED, LONG):
            check_planned_latents(OnDevice(latents, on), heads, LATENT, lengths, kind, 64)
            compared += 1
    triton, found = (
        _attended_by(backend, device, dtype, rows, prompt_tokens, new_tokens)
        for backend in (TRITON, FLASHINFER)
    )
    equal = compare_outputs(found, triton, NEAR_TIES[dtype])
    return {"cases": compared, "tokens": rows * new_tokens, "equal": equal}


def _attended_by(
    backend: str, device: str, dtype: str, rows: int, prompt_tokens: int, new_tokens: int
) -> list[Output]:
    """What a small model generates, with heads for which modules are built ahead of time."""
    heads, tokens = (8, 2, 64), prompt_tokens + new_tokens
    sizes = replace(MODELS["Llama-3.1-8B"], hidden=256, width=256, heads=heads, vocabulary=1000)
    model = open_sized(sizes, 2, device, rows=rows, tokens=tokens, dtype=dtype, backends=(backend,))
    assert runner_of(model).capture((rows,)).sizes == (rows,)
    loop = ModelLoop(
        model,
        overlap=True,
        running_max=rows,
        step_tokens_max=rows * prompt_tokens,
        chunk_tokens=rows * prompt_tokens,
        context_tokens=tokens,
    )
    return loop.run(
        greedy_requests(sizes.vocabulary, rows, prompt_tokens, new_tokens, logprobs=True)
    )


def launches(
    sizes: Sizes = MODELS["Llama-3.1-8B"],
    device: str = DEVICE,
    table: Sequence[Launch] | None = None,
    *,
    dtype: str = "bfloat16",
    prompts: Sequence[int] = (3, 500, 1300, 40, 900),
) -> Facts:
    """A worker with two layers of a model launches nothing that is not in the compile table.

    Its requests sample in different ways and have logprobs; it has some graphs, and copies pages.
    It attends by Triton, also where FlashInfer is installed.
    """
    seen, rows, tokens = set[Launch](), len(prompts), max(prompts) + NEW_TOKENS
    with watching(seen.add):
        model = open_sized(
            sizes, 2, device, rows=rows, tokens=tokens, dtype=dtype, backends=(TRITON,)
        )
    captured = runner_of(model).capture((1, 2)).sizes
    pieces = runner_of(model).capture_prefills((48, 512)).sizes
    runner_of(model).page_memories()
    asked = [
        request(length, {**SAMPLED[place % len(SAMPLED)], "details": LOGPROBS}, NEW_TOKENS)
        for place, length in enumerate(prompts)
    ]
    loop = loop_of(model, running_max=rows, context_tokens=tokens)
    assert all(len(ran.ids) == NEW_TOKENS for ran in loop.run(asked, one_a_turn=True))
    unknown = seen - set(every_launch() if table is None else table)
    assert not unknown, f"{len(unknown)} launches are not in the compile table: {unknown}"
    return {"launches": len(seen), "graphs": captured, "prefills": pieces}


def graphs(
    folder: Path | None = None,
    device: str = DEVICE,
    *,
    dtype: str = "bfloat16",
    rows: int = 8,
    rows_padded: int = 5,
    new_tokens: int = 24,
) -> Facts:
    """Tokens and logprobs have the same bits with graphs and without: of rows that are prefilled
    together, and of their decode steps.

    So have fewer rows that are padded to that size, with graphs and launched kernel by kernel: as
    they are, products of another size may add in another order.
    """
    folder = folder or embedded.path()
    captured = (rows,), (10 * rows,)
    run = partial(_graphs_outputs, folder, device, dtype, new_tokens)
    assert run(rows, ((), ())) == run(rows, captured)
    with uncaptured():
        launched = run(rows_padded, captured)
    assert launched == run(rows_padded, captured)
    return {"rows": rows, "rows_padded": rows_padded, "tokens": (rows + rows_padded) * new_tokens}


def _graphs_outputs(
    folder: Path,
    device: str,
    dtype: str,
    new_tokens: int,
    rows: int,
    captured: tuple[tuple[int, ...], tuple[int, ...]],
) -> list[tuple[list[int], list[float | None]]]:
    """The tokens and logprobs of so many rows, by graphs of these sizes of decodes and prefills."""
    model = open_model(folder, device=device, dtype=dtype, pages=rows * 20)
    sizes, tokens = captured
    assert runner_of(model).capture(sizes).sizes == sizes
    assert runner_of(model).capture_prefills(tokens).sizes == tokens
    loop = ModelLoop(
        model,
        overlap=True,
        step_tokens_max=16 * rows,
        chunk_tokens=16 * rows,
        running_max=rows,
    )
    asked = greedy_requests(model.spec.vocabulary, rows, 10, new_tokens, logprobs=True)
    ran = loop.run(asked)
    plans = [record.plan for record in loop.loop.recorder.records()]
    steps = sum(len(plan.slot) == len(plan.tokens) == rows for plan in plans)
    assert steps >= new_tokens - 2, "all rows are decoded together"
    assert len(plans[0].tokens) == 10 * rows, "and all are prefilled together"
    return [(each.ids, [token.logprob for token in each.tokens]) for each in ran]


def determinism(
    folder: Path | None = None, device: str = DEVICE, *, dtype: str = "bfloat16", rows: int = 16
) -> Facts:
    """Tokens and logprobs of deterministic inference have the same bits alone and together."""
    folder = folder or embedded.path()
    found: list[list[tuple[list[int], list[float | None]]]] = []
    for running, chunk_tokens in ((rows, 64), (1, 24)):
        model = open_model(
            folder,
            device=device,
            dtype=dtype,
            linear="tiled",
            deterministic=True,
            pages=rows * 20,
        )
        runner_of(model).capture((running,))
        loop = ModelLoop(
            model,
            overlap=True,
            step_tokens_max=chunk_tokens,
            chunk_tokens=chunk_tokens,
            running_max=running,
        )
        ran = loop.run(greedy_requests(model.spec.vocabulary, rows, 30, 16, logprobs=True))
        found.append([(each.ids, [token.logprob for token in each.tokens]) for each in ran])
    assert found[0] == found[1]
    return {"rows": rows, "tokens": rows * 16}


def ranks(
    folder: Path | None = None,
    device: str = DEVICE,
    *,
    dtype: str = "bfloat16",
    rows: int = 8,
    new_tokens: int = 24,
) -> Facts:
    """Two ranks, with a GPU each, have the tokens of one, but for near ties."""
    if device == DEVICE and torch.cuda.device_count() < 2:
        return {"gpus": torch.cuda.device_count(), "needed": 2}
    folder = folder or embedded.path()
    values: dict[str, Any] = {"dtype": dtype, "pages": rows * 20}

    def outputs(model: OpenModel, lead: LeadRank | None = None) -> list[Output]:
        loop = ModelLoop(
            model,
            lead=lead,
            overlap=True,
            step_tokens_max=16 * rows,
            chunk_tokens=16 * rows,
            running_max=rows,
        )
        asked = greedy_requests(model.spec.vocabulary, rows, 10, new_tokens, logprobs=True)
        return loop.run(asked)

    expected = outputs(open_model(folder, device=device, **values))
    pair = Ranks(tp=2, device=device)
    with pair.opened(folder, captured=(rows,), **values) as (model, lead):
        found = outputs(model, lead)
    pair.close()
    equal = compare_outputs(found, expected, NEAR_TIES[dtype])
    return {"rows": rows, "tokens": rows * new_tokens, "equal": equal}


def prompts(
    folder: Path | None = None,
    device: str = DEVICE,
    asked: Sequence[Sequence[int]] | None = None,
    new_tokens: int = 32,
) -> Facts:
    """Greedy tokens of the GPU, in float32 and bfloat16, are those of the CPU in float32."""
    folder = folder or embedded.path()
    asked = asked or _sums(folder)
    ends = frozenset(read_card(folder).eos_ids)

    def outputs(device: str, dtype: str, linear: str) -> Any:
        model = open_model(
            folder,
            device=device,
            dtype=dtype,
            linear=linear,
            pages=1024,
            page_tokens=16,
            running_max=16,
        )
        loop = ModelLoop(
            model,
            overlap=device != "cpu",
            step_tokens_max=256,
            chunk_tokens=64,
            running_max=16,
            end_ids=ends,
        )
        requests = [
            state(list(ids), temperature=0.0, max_new_tokens=new_tokens, details=LOGPROBS)
            for ids in asked
        ]
        return loop.run(requests)

    expected = outputs("cpu", "float32", LINEAR)
    tokens = sum(len(each.ids) for each in expected)
    facts: Facts = {"prompts": len(expected), "tokens": tokens}
    for dtype, near_tie in NEAR_TIES.items():
        equal = compare_outputs(outputs(device, dtype, "plain"), expected, near_tie)
        facts[f"equal_{dtype}"] = equal
        assert equal > tokens / 2, f"near ties everywhere: {facts}"
    return facts


def _sums(folder: Path) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [f"What is {3 * n + 7} + {5 * n % 83}?" for n in range(PROMPTS)]
    return [tokenizer.encode(text).ids for text in texts]


STAGES: Mapping[str, Callable[[], Facts]] = {
    "versions": versions,
    "flashinfer": flashinfer,
    "launches": launches,
    "graphs": graphs,
    "determinism": determinism,
    "ranks": ranks,
    "prompts": prompts,
}


def main() -> None:
    print(msgspec.json.encode(STAGES[sys.argv[1]]()).decode())


if __name__ == "__main__":
    main()
