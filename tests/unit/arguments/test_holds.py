"""Arguments that describe what holds anyway: the product is started with each and without it.

Both starts do the same, and what the argument states is read from what was started.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import aiohttp
import msgspec
import pytest
import torch
import transformers
from tests.arguments import compare_equal, compare_equal_async, settings_of, shows
from tests.bus.worlds import bus_config
from tests.models.families_moe import GROUPED, LATENT
from tests.support.llava import PLACEHOLDER, write_llava
from tests.support.memory_bus import MemoryBroker, MemoryTransport
from tests.support.nats import NatsServer
from tests.support.reports import new_ids
from tests.support.services import QUICK, client_bus, running
from tests.support.wait import until
from tests.unit.config.test_resolve import CARD, DEVICE
from tests.unit.detokenizer.test_machine import HERE, batch, row, texts
from tests.unit.gateway.calls import CHAT, HI, post
from tests.unit.gateway.cluster import house
from tests.unit.model_worker.test_opening import answers, loop_of, progress_of

from antiphon import embedded
from antiphon.bus.nats import NatsTransport
from antiphon.config.cluster import ClusterConfig
from antiphon.config.errors import ConfigError
from antiphon.detokenizer.machine import Detokenizer
from antiphon.kernels.latent import LatentMetadata, LatentPart
from antiphon.model_card.served_model import model_files, tokenizer_folder
from antiphon.model_card.vision.vision_card import read_vision
from antiphon.model_worker.batching.flights import InTurn
from antiphon.model_worker.batching.loop import BatchingLoop, StepReport
from antiphon.model_worker.batching.mailbox import Mail, Mailbox
from antiphon.model_worker.batching.state import ChoiceKey, RequestState
from antiphon.model_worker.grammar.source import GrammarSource
from antiphon.model_worker.startup.engine import Engine, open_engine
from antiphon.resolve.resolved_config import resolve
from antiphon.service.startup import CannotStart
from antiphon.tokenizer.encoding import EncodedPrompt, TextEncoder
from antiphon.tokenizer.model_tokenizer import read_model_tokenizer
from antiphon.tokenizer.service import TokenizerService
from antiphon.wire.base import Role
from antiphon.wire.codec import pack_ids
from antiphon.wire.ids import ModelName, RequestId
from antiphon.wire.routes import TOKENIZE
from antiphon.wire.sampling import GrammarKind, SamplingParams, ThinkingBudget
from antiphon.wire.tokenize import EncodeRequest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from antiphon.config.settings import Settings

PROMPTS = [[5, 6, 7], [9] * 40]
TIMEOUT_S = 20.0
FOREIGN = frozenset({"aiter", "flashinfer", "outlines", "outlines_core", "sgl_kernel"})
"""Packages whose parts the arguments turn off."""


@dataclass(frozen=True)
class Worker:
    """What a worker of the embedded model did, and with what.

    Attributes:
        outputs: Greedy answers of the prompts.
        kernels: The backend of each operation.
        cuda: Whether anything was asked of a GPU, as a captured graph would.
        ranks: That share a layer, and whether they have a process group.
        foreign: The packages of others that were imported.
    """

    outputs: list[list[int]]
    kernels: dict[str, str]
    cuda: bool
    ranks: tuple[int, bool]
    foreign: frozenset[str]


def worker(settings: Settings) -> Worker:
    """Run a worker's engine as the settings say."""
    engine = open_engine(settings)
    runner = cast("Any", engine.runner)
    return Worker(
        outputs=answers(engine, PROMPTS),
        kernels={choice.op: choice.backend for choice in runner.choices},
        cuda=torch.cuda.is_initialized(),
        ranks=(runner._model.build.tp.ranks, torch.distributed.is_initialized()),
        foreign=FOREIGN & sys.modules.keys(),
    )


@pytest.mark.parametrize(
    "flag",
    [
        shows("--disable-aiter-allreduce-fusion-in-decode"),
        shows("--disable-aiter-allreduce-fusion-in-prefill"),
        shows("--disable-custom-all-reduce"),
        shows("--disable-flashinfer-autotune"),
        shows("--disable-flashinfer-cutlass-moe-fp4-allgather"),
        shows("--enforce-disable-flashinfer-allreduce-fusion"),
    ],
)
def test_worker_runs_without_what_is_off_anyway(flag: str) -> None:
    seen = compare_equal(flag, observe=worker)
    assert [len(ids) for ids in seen.outputs] == [12, 12]
    assert {"decoder.stack", "attention.paged"} <= seen.kernels.keys()
    assert set(seen.kernels.values()) <= {"cpu", "torch"}
    assert (seen.cuda, seen.ranks, seen.foreign) == (False, (1, False), frozenset())


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with shared experts and latent attention, without weights."""
    folder = tmp_path_factory.mktemp("mixture")
    sizes = {
        "vocab_size": json.loads((embedded.path() / "config.json").read_text())["vocab_size"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "architectures": ["DeepseekV3ForCausalLM"],
    }
    config = transformers.DeepseekV3Config.from_dict({**sizes, **GROUPED, **LATENT})
    config.save_pretrained(folder)
    return folder


def base_of(mixture: Path) -> tuple[str, ...]:
    tokenizer = ("--tokenizer-path", str(embedded.path()))
    return ("--model-path", str(mixture), "--load-format", "dummy", *tokenizer)


@pytest.mark.argument("--disable-shared-experts-fusion")
def test_shared_experts_are_a_block_of_their_own(mixture: Path) -> None:
    def experts(settings: Settings) -> list[tuple[int, bool]]:
        """Experts that a router chooses from, and whether a block is beside them, by layer."""
        engine = open_engine(settings)
        layers = cast("Any", engine.runner)._model.spec.layers
        blocks = [layer.feed_forward for layer in layers]
        return [
            (block.experts.count, block.shared is not None)
            for block in blocks
            if hasattr(block, "experts")
        ]

    found = compare_equal("--disable-shared-experts-fusion", observe=experts, base=base_of(mixture))
    assert found == [(GROUPED["n_routed_experts"], True)]


@pytest.mark.argument("--disable-chunked-prefix-cache")
def test_cached_latents_are_read_in_one_piece(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = cast("Any", LatentMetadata.parts).func
    passes: list[tuple[list[int], list[int]]] = []

    def noted(rows: LatentMetadata) -> tuple[LatentPart, ...]:
        made = parts(rows)
        read = sorted(int(keys) for part in made for keys in part.rows.kv_len)
        passes.append((sorted(map(int, rows.rows.kv_len)), read))
        return made

    monkeypatch.setattr(LatentMetadata, "parts", property(noted))

    def keys_read(settings: Settings) -> list[tuple[list[int], list[int]]]:
        """The keys of each row of a pass, and those that attention reads at once for a row."""
        engine = open_engine(settings)
        loop = loop_of(engine)
        answers(engine, [[9] * 64], loop)
        passes.clear()
        answers(engine, [[9] * 64 + [5] * 8], loop)
        return list(passes)

    found = compare_equal(
        "--disable-chunked-prefix-cache", observe=keys_read, base=base_of(mixture)
    )
    assert any(rows == [72] for rows, _ in found), "no prompt went on from a cached prefix"
    assert all(rows == read for rows, read in found)


@pytest.mark.argument("--disable-outlines-disk-cache")
def test_compiled_grammars_are_not_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "TMPDIR", "XDG_CACHE_HOME", "OUTLINES_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    schema = '{"type": "object", "properties": {"n": {"type": "integer"}}}'

    def files(settings: Settings) -> list[str]:
        compiler = open_engine(settings).open_compiler()
        assert compiler.compile(GrammarSource(GrammarKind.JSON_SCHEMA, schema)) is not None
        return [str(file) for file in tmp_path.rglob("*")]

    assert compare_equal("--disable-outlines-disk-cache", observe=files) == []


@pytest.mark.argument("--disable-fast-image-processor")
async def test_image_in_a_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}

    async def reply(settings: Settings) -> tuple[int, object]:
        async with house(base=settings) as at:
            body = {"messages": [{"role": "user", "content": [image]}]}
            status, said, _ = await post(at, CHAT, body)
            return status, said

    status, said = await compare_equal_async("--disable-fast-image-processor", observe=reply)
    assert status == 400
    assert "image" in str(said)


@pytest.mark.argument("--enable-multimodal")
def test_a_model_that_takes_images_is_opened_with_its_placeholder(tmp_path: Path) -> None:
    write_llava(tmp_path)

    def placeholder(settings: Settings) -> str:
        vision = read_vision(model_files(settings, weights=False).folder)
        return read_model_tokenizer(tokenizer_folder(settings), vision=vision).placeholder

    base = ("--model-path", str(tmp_path))
    assert compare_equal("--enable-multimodal", observe=placeholder, base=base) == PLACEHOLDER


@pytest.mark.argument("--disable-hicache-numa-detect")
def test_pages_have_no_tier_in_host_memory_to_bind() -> None:
    def cores(settings: Settings) -> tuple[set[int], int]:
        """Where the process may run after a start, and the pools of KV pages."""
        engine = open_engine(settings)
        return os.sched_getaffinity(0), len(cast("Any", engine.runner).pools)

    before = os.sched_getaffinity(0)
    after, pools = compare_equal("--disable-hicache-numa-detect", observe=cores)
    assert (after, pools) == (before, 1)
    with pytest.raises(ConfigError, match=r"refused: .* KV pages live in the worker's memory"):
        settings_of("--hicache-size", "1")


@pytest.mark.argument("--disable-tokenizer-batch-decode")
def test_detokenizer_decodes_each_choice_by_itself() -> None:
    def decoded(settings: Settings) -> tuple[list[bytes], list[str]]:
        """The ids of each call that decodes, and the texts, of a step with two requests."""
        calls: list[bytes] = []

        def decode(ids: Sequence[int], _: bool) -> str:
            calls.append(bytes(ids))
            return bytes(ids).decode()

        detokenizer = Detokenizer(HERE, decode, settings.detokenizer.requests_max)
        step = batch(1, row("ab"), row("xy", request_id=RequestId("other")))
        return calls, [text.text for text in texts(detokenizer.on_tokens(step, 0.0))]

    calls, shown = compare_equal("--disable-tokenizer-batch-decode", observe=decoded)
    assert shown == ["ab", "xy"]
    assert all(set(ids) <= set(b"ab") or set(ids) <= set(b"xy") for ids in calls)


@pytest.mark.argument("--prefill-round-robin-balance")
def test_argument_without_effect_changes_nothing() -> None:
    flag = "--prefill-round-robin-balance"
    settings = compare_equal(flag, observe=lambda settings: settings)
    assert settings.scheduler == settings_of().scheduler
    compare_equal(flag, observe=lambda settings: resolve(settings, CARD, DEVICE))


@pytest.mark.argument("--enable-nan-detection")
def test_request_whose_numbers_are_not_finite_ends_with_an_error(mixture: Path) -> None:
    poison = 11

    def ends(settings: Settings) -> list[tuple[int, str]]:
        """The ends of two requests, one of which has a token without a finite embedding."""
        engine = open_engine(settings)
        table = cast("Any", engine.runner)._model.own_decoder.embedding.table
        table[poison] = torch.nan
        return finishes(engine, [[5, poison, 7], [9] * 40])

    (bad, why), (good, ended) = compare_equal(
        "--enable-nan-detection", observe=ends, base=base_of(mixture)
    )
    assert (bad, good) == (0, 12)
    assert (why, ended) == ("internal", "length")


def finishes(engine: Engine, prompts: list[list[int]]) -> list[tuple[int, str]]:
    """Tokens of each request, and why it ended: a reason, or the code of an error."""
    tokens, ends = [0] * len(prompts), [""] * len(prompts)
    for progress in progress_of(engine, *(request(prompt, n) for n, prompt in enumerate(prompts))):
        tokens[progress.key] += len(new_ids(progress))
        if progress.finish is not None:
            error = progress.finish.error
            ends[progress.key] = str(progress.finish.reason) if error is None else error.code
    return list(zip(tokens, ends, strict=True))


def request(prompt: list[int], number: int = 0, **sampling: object) -> RequestState:
    asked = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True} | sampling
    return RequestState(
        request_id=RequestId(f"r{number}"),
        choice=0,
        prompt_ids=pack_ids(prompt),
        sampling=SamplingParams(**asked),  # pyright: ignore[reportArgumentType]
        deadline_unix_ms=0,
    )


@pytest.mark.argument("--enable-strict-thinking")
async def test_max_thinking_tokens_is_enforced() -> None:
    begin, close = 7, 8

    async def budgets(settings: Settings) -> tuple[object, list[int]]:
        """What the gateway asks of the worker, and what the worker makes of it."""
        async with house(base=settings, reasoning_parser="qwen3") as at:
            at.cluster.words = {"<think>": begin, "</think>": close}
            body = {"messages": HI, "max_thinking_tokens": 3}
            status, said, _ = await post(at, CHAT, body)
            assert status == 200, said
            (budget,) = at.cluster.submits[0].sampling.processors
        run = progress_of(open_engine(settings), request([5, 6, begin], processors=(budget,)))
        return budget, [id_ for progress in run for id_ in new_ids(progress)]

    budget, ids = await compare_equal_async("--enable-strict-thinking", observe=budgets)
    assert budget == ThinkingBudget(tokens_max=3, begin_id=begin, closing_ids=(close,))
    assert ids.index(close) == 3


@pytest.mark.argument("--sleep-on-idle")
def test_idle_worker_sleeps_until_a_command_arrives() -> None:
    def takes(settings: Settings) -> list[tuple[bool, float | None]]:
        """How the loop looks for commands from the end of a request to the next command."""
        engine = open_engine(settings)
        mailbox, idle = NotedMailbox(1), threading.Event()

        def deliver(_: StepReport) -> None:
            if engine.core.idle:
                mailbox.noted.clear()
                idle.set()

        thread = threading.Thread(
            target=BatchingLoop(engine.core, InTurn(engine.runner), mailbox, deliver).run
        )
        thread.start()
        mailbox.run(ChoiceKey(0), request([5, 6, 7]))
        assert idle.wait(TIMEOUT_S)
        assert mailbox.waits.wait(TIMEOUT_S)
        mailbox.close()
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
        return mailbox.noted

    assert compare_equal("--sleep-on-idle", observe=takes) == [(True, None)]


class NotedMailbox(Mailbox):
    """Notes how it is looked into."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.noted: list[tuple[bool, float | None]] = []
        self.waits = threading.Event()

    def take(self, *, wait: bool, timeout_s: float | None = None) -> Mail | None:
        self.noted.append((wait, timeout_s))
        if len(self.noted) == 1:
            self.waits.set()
        return super().take(wait=wait, timeout_s=timeout_s)


@pytest.mark.argument("--trust-remote-code")
def test_python_code_of_a_model_folder_is_never_run(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((embedded.path() / "config.json").read_text())
    config |= {
        "architectures": ["GrandForCausalLM"],
        "model_type": "grand",
        "auto_map": {"AutoModelForCausalLM": "modeling_grand.GrandForCausalLM"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_grand.py").write_text(f"open({str(ran)!r}, 'w').close()\n")

    def refusal(settings: Settings) -> str:
        with pytest.raises(CannotStart) as caught:
            open_engine(settings)
        return str(caught.value)

    tokenizer = ("--tokenizer-path", str(embedded.path()), "--load-format", "dummy")
    base = ("--model-path", str(folder), *tokenizer)
    said = compare_equal("--trust-remote-code", observe=refusal, base=base)
    assert said.endswith("(modeling_grand.py:GrandForCausalLM) is never run")
    assert not ran.exists()


@pytest.mark.parametrize(
    "flag",
    [shows("--enable-dynamic-batch-tokenizer"), shows("--enable-tokenizer-batch-encode")],
)
async def test_tokenizer_encodes_the_requests_that_wait_as_one_batch(
    flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, model = TextEncoder.encode, ModelName("toy")
    sizes: list[int] = []

    def noted(
        encoder: TextEncoder, texts: Sequence[EncodeRequest]
    ) -> Sequence[EncodedPrompt | Exception]:
        sizes.append(len(texts))
        if len(sizes) == 1:
            assert first.wait(TIMEOUT_S)
        return encode(encoder, texts)

    monkeypatch.setattr(TextEncoder, "encode", noted)
    first = threading.Event()

    async def batches(settings: Settings) -> list[int]:
        """How many texts are encoded at once: five that came while a first one was."""
        sizes.clear()
        first.clear()
        broker = MemoryBroker()
        settings = msgspec.structs.replace(
            settings, service=QUICK.service, cluster=ClusterConfig(name="test", model=model)
        )

        async def call(number: int) -> None:
            text = EncodeRequest(
                request_id=RequestId(f"r-{number}"),
                model=model,
                prompt="hello",
                deadline_unix_ms=2**42,
            )
            await bus.call(TOKENIZE, text, timeout_s=TIMEOUT_S, model=model)

        async with (
            running(TokenizerService, MemoryTransport(broker), settings=settings) as tokenizer,
            client_bus(MemoryTransport(broker), "gateway-0", party=Role.GATEWAY) as bus,
            asyncio.TaskGroup() as group,
        ):
            group.create_task(call(0))
            await until(lambda: len(sizes) == 1)
            for number in range(1, 6):
                group.create_task(call(number))
            await until(lambda: len(tokenizer.service._batcher._jobs) == 5)
            first.set()
        return list(sizes)

    assert await compare_equal_async(flag, observe=batches) == [1, 5]


@pytest.mark.argument("--enable-metrics")
async def test_gateway_serves_metrics_with_the_names_of_sglang() -> None:
    async def names(settings: Settings) -> set[str]:
        async with house(base=settings) as at, aiohttp.ClientSession() as session:
            status, said, _ = await post(at, CHAT, {"messages": HI})
            assert status == 200, said
            async with session.get(f"{at.url}/metrics") as reply:
                assert reply.status == 200
                lines = (await reply.text()).splitlines()
        return {line.split()[2] for line in lines if line.startswith("# TYPE sglang:")}

    found = await compare_equal_async("--enable-metrics", observe=names)
    assert {"sglang:num_requests_total", "sglang:time_to_first_token_seconds"} <= found


@pytest.mark.argument("--skip-server-warmup")
async def test_server_is_ready_without_a_warmup_request() -> None:
    async def submitted(settings: Settings) -> tuple[int, int]:
        """The requests that were encoded and submitted by the time that the server is ready."""
        async with house(base=settings) as at, aiohttp.ClientSession() as session:
            async with session.get(f"{at.url}/health") as reply:
                assert reply.status == 200
            return len(at.cluster.encodes), len(at.cluster.submits)

    assert (await compare_equal_async("--skip-server-warmup", observe=submitted))[1] == 0


@pytest.mark.argument("--enable-response-store")
async def test_response_is_stored_unless_the_request_says_otherwise() -> None:
    async with NatsServer(durable=True) as server:

        def joining() -> NatsTransport:
            return NatsTransport(bus_config(server.url), name="test")

        async def found(settings: Settings) -> list[int]:
            """Whether a response is found afterwards: by default, and with `store: false`."""
            statuses: list[int] = []
            async with house(joining, base=settings) as at, aiohttp.ClientSession() as session:
                for body in ({"input": "hi"}, {"input": "hi", "store": False}):
                    status, said, _ = await post(at, "/v1/responses", body)
                    assert status == 200, said
                    async with session.get(f"{at.url}/v1/responses/{said['id']}") as reply:
                        statuses.append(reply.status)
            return statuses

        assert await compare_equal_async("--enable-response-store", observe=found) == [200, 404]
