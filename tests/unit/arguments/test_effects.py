"""What each SGLang argument changes in the code that runs, beside a start without it."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from socket import create_connection
from typing import TYPE_CHECKING, cast

import aiohttp
import msgspec
import pytest
from tests.arguments import compare, compare_async, refusal, settings_of, shows
from tests.support.llava import picture
from tests.unit.config.test_resolve import CARD, DEVICE, GIB
from tests.unit.gateway.calls import CHAT, post, stream
from tests.unit.gateway.cluster import house
from tests.unit.model_worker.steps import pools

from antiphon import embedded
from antiphon.config.errors import ConfigError
from antiphon.config.settings import EncoderConfig
from antiphon.config.tenants import Tenants
from antiphon.encoder import decode_process
from antiphon.encoder.preprocess import PreprocessorConfig
from antiphon.gateway.access.access import Access
from antiphon.gateway.media.fetch import MediaFetcher
from antiphon.gateway.media.intake import MediaIntake
from antiphon.gateway.media.room import RequestRoom
from antiphon.gateway.parsing.formats import formats_of
from antiphon.gateway.requests.generation_request import MediumSource, SamplingOptions, Seeds
from antiphon.model_card.card import RecurrentStates, read_card
from antiphon.model_card.pooling import read_pooling
from antiphon.model_card.served_model import (
    draft_files,
    draft_settings,
    model_files,
    served_name,
    tokenizer_path,
)
from antiphon.model_card.vocabulary import read_vocabulary
from antiphon.model_worker.cache.eviction import STRATEGIES
from antiphon.model_worker.grammar.source import GrammarSource
from antiphon.model_worker.grammar.xgrammar_backend import XgrammarCompiler
from antiphon.model_worker.ranks.processes import RankProcesses
from antiphon.model_worker.speculation.request_texts import RequestTexts
from antiphon.model_worker.startup import checksums
from antiphon.model_worker.startup.core import drafts_max, open_engine_core
from antiphon.model_worker.startup.engine import open_engine
from antiphon.resolve.draft import DraftCard, ResolvedDraft
from antiphon.resolve.resolved_config import ResolvedConfig, resolve
from antiphon.resolve.resolved_value import ResolvedValue
from antiphon.scheduler.leader_config import LeaderConfig
from antiphon.service.clock import SystemClock
from antiphon.service.startup import CannotStart
from antiphon.supervisor.ports import free_port
from antiphon.telemetry import log as logs
from antiphon.tokenizer import model_tokenizer as vocabulary
from antiphon.transfer.blobs import BlobStore
from antiphon.wire.claim import PixelLimits
from antiphon.wire.codec import id_count, pack_ids
from antiphon.wire.errors import Forbidden, InvalidRequest, Unauthorized
from antiphon.wire.ids import InstanceId, RequestId
from antiphon.wire.sampling import GrammarKind
from antiphon.wire.tokenize import ChatMessage, EncodeReply

if TYPE_CHECKING:
    from pathlib import Path

    from antiphon.config.settings import Settings
    from antiphon.model_worker.batching.engine_core import EngineCore
    from antiphon.model_worker.speculation.ngram import NgramDrafter

HI = [{"role": "user", "content": "hi"}]
STATES = RecurrentStates(
    layers=2, attending=2, convolved=10, matrices=1000, channels=10, parameters=10
)
RECURRENT = msgspec.structs.replace(CARD, states=STATES)


def plan(settings: Settings) -> ResolvedConfig:
    return resolve(settings, CARD, DEVICE)


def batching(settings: Settings) -> EngineCore:
    return open_engine_core(settings, plan(settings), pools(999), vocab_size=100)


Observe = Callable[["Settings"], object]


def entry(name: str) -> Observe:
    return lambda settings: getattr(plan(settings), name).value


def limit(name: str) -> Observe:
    return lambda settings: getattr(batching(settings).limits, name)


def rule(name: str) -> Observe:
    return lambda settings: getattr(batching(settings).rules, name)


def of_leader(name: str) -> Observe:
    return lambda settings: getattr(LeaderConfig.of(settings), name)


def graph_sizes(settings: Settings) -> tuple[int, ...]:
    """The batch sizes that a GPU captures."""
    device = msgspec.structs.replace(DEVICE, kind="cuda")
    return resolve(settings, CARD, device).graph_sizes.value


def prefill_graph_sizes(settings: Settings) -> tuple[int, ...]:
    """The numbers of tokens of the prefills that a GPU captures."""
    device = msgspec.structs.replace(DEVICE, kind="cuda")
    return resolve(settings, CARD, device).prefill_graph_sizes.value


def listed_prefill_graphs(settings: Settings) -> tuple[int, ...]:
    """The same, where a list is set."""
    listed = msgspec.structs.replace(settings.batching, prefill_graph_sizes="4 8")
    return prefill_graph_sizes(msgspec.structs.replace(settings, batching=listed))


def forced(settings: Settings) -> dict[str, str]:
    """Backends of operations."""
    return plan(settings).forced


def weight_files(settings: Settings) -> int:
    return len(model_files(settings).weights)


def context_tokens(settings: Settings) -> int:
    return read_card(model_files(settings)).context_tokens


@pytest.mark.parametrize(
    ("flag", "value", "observe", "expected"),
    [
        shows("--dtype", "float", entry("dtype"), "float32"),
        shows("--kv-cache-dtype", "fp8_e4m3", entry("cache_dtype"), "fp8_e4m3"),
        shows("--attention-backend", "torch_native", forced, {"attention.paged": "torch"}),
        shows(
            "--prefill-attention-backend", "flashinfer", forced, {"attention.paged": "flashinfer"}
        ),
        shows("--decode-attention-backend", "intel_amx", forced, {"attention.paged": "cpu"}),
        shows("--sampling-backend", "pytorch", forced, {"sampling.draw": "torch"}),
        shows("--moe-runner-backend", "triton", forced, {"moe.experts": "triton"}),
        shows("--fp8-gemm-runner-backend", "triton", forced, {"linear.fp8": "triton"}),
        shows("--max-total-tokens", "4096", entry("cache_pages"), 64),
        shows("--chunked-prefill-size", "128", entry("chunk_tokens"), 128),
        shows("--max-prefill-tokens", "1024", entry("fill_tokens"), 1024),
        shows("--max-running-requests", "3", entry("running_max"), 3),
        shows("--cuda-graph-bs", "4 1", graph_sizes, (1, 4)),
        shows("--cuda-graph-bs-decode", "4 1", graph_sizes, (1, 4)),
        shows("--cuda-graph-max-bs", "10", graph_sizes, (1, 2, 4, 8, 10)),
        shows("--cuda-graph-max-bs-decode", "10", graph_sizes, (1, 2, 4, 8, 10)),
        shows("--cuda-graph-bs-prefill", "16 4", prefill_graph_sizes, (4, 16)),
        shows("--piecewise-cuda-graph-tokens", "[16, 4]", prefill_graph_sizes, (4, 16)),
        shows("--cuda-graph-max-bs-prefill", "18", prefill_graph_sizes, (4, 8, 12, 16, 18)),
        shows("--piecewise-cuda-graph-max-tokens", "9", prefill_graph_sizes, (4, 8, 9)),
        shows("--disable-prefill-cuda-graph", None, listed_prefill_graphs, ()),
        shows("--disable-cuda-graph", None, graph_sizes, ()),
        shows("--disable-decode-cuda-graph", None, graph_sizes, ()),
        shows("--disable-cuda-graph-padding", None, graph_sizes, tuple(range(1, 65))),
        shows("--page-size", "32", entry("page_tokens"), 32),
        shows("--context-length", "128", entry("context_tokens"), 128),
        shows("--model-impl", "transformers", entry("implementation"), "transformers"),
        shows("--enable-deterministic-inference", None, entry("deterministic"), True),
        shows("--disable-radix-cache", None, entry("prefix"), False),
        shows("--grammar-backend", "none", entry("grammar"), "none"),
        shows("--quantization", "fp8", entry("quantization"), "fp8"),
        shows("--prefill-max-requests", "2", limit("prefill_max"), 2),
        shows("--stream-interval", "4", limit("stream_interval"), 4),
        shows("--schedule-conservativeness", "0.3", limit("conservativeness"), 0.3),
        shows("--mamba-track-interval", "64", limit("checkpoint_tokens"), 64),
        shows("--enable-return-hidden-states", None, limit("hidden_states"), True),
        shows("--return-hidden-states-mode", "full", limit("hidden_states"), True),
        shows("--weight-version", "v7", limit("weight_version"), "v7"),
        shows("--schedule-policy", "lpm", rule("policy"), "lpm"),
        shows("--enable-priority-scheduling", None, rule("priority"), True),
        shows("--schedule-low-priority-values-first", None, rule("low_first"), True),
        shows("--priority-scheduling-preemption-threshold", "3", rule("preempt_threshold"), 3),
        shows("--abort-on-priority-when-disabled", None, rule("refuse_priority"), True),
        shows("--max-queued-requests", "5", of_leader("queue_max"), 5),
        shows("--soft-watchdog-timeout", "3", of_leader("stall_s"), 3.0),
        shows("--load-format", "dummy", weight_files, 0),
        shows(
            "--json-model-override-args", '{"max_position_embeddings": 777}', context_tokens, 777
        ),
    ],
)
def test_argument_decides(flag: str, value: str | None, observe: Observe, expected: object) -> None:
    given, without = compare(flag, value, observe=observe)
    assert given == expected != without


def device_and_reason(settings: Settings) -> tuple[str, str]:
    device = plan(settings).device
    return device.value, device.reason


def preempts(settings: Settings) -> bool:
    """Whether the highest priority preempts the lowest."""
    precedence = LeaderConfig.of(settings).precedence
    return precedence.preempts(precedence.rank(2**63 - 1), precedence.rank(-(2**63)))


def asks_for_a_key(settings: Settings) -> bool:
    access = Access(settings.access, Tenants(), lambda: 0.0)
    try:
        access.authenticate(None, admin=True)
    except (Unauthorized, Forbidden):
        return True
    return False


def pools_texts(settings: Settings) -> bool:
    files = model_files(settings)
    card = read_card(files)
    return read_pooling(files, card, embedding=settings.model.embedding) is not None


def draws_the_same_seeds(settings: Settings) -> bool:
    """Whether two starts draw the same seeds, and requests of one start different ones."""
    first, second = (Seeds.of(settings, InstanceId("gateway-0")) for _ in range(2))
    one, two = ([seeds.fill(SamplingOptions()).seed for _ in range(3)] for seeds in (first, second))
    assert len(set(one)) == 3
    return one == two


def log_level(settings: Settings) -> int:
    before = logging.getLogger().level
    try:
        logs.set_up(level=settings.telemetry.log_level, form="text", instance="test")
        return logging.getLogger().level
    finally:
        logging.getLogger().setLevel(before)


FP8_CACHE, PRIORITIES = ("--kv-cache-dtype", "fp8_e4m3"), ("--enable-priority-scheduling",)


@pytest.mark.parametrize(
    ("flag", "value", "observe", "pair", "base"),
    [
        shows(
            "--device",
            "cpu",
            device_and_reason,
            (("cpu", "model.device"), ("cpu", "the device of this machine")),
            (),
        ),
        shows(
            "--quantization-param-path",
            "/scales.json",
            entry("cache_scales"),
            ("/scales.json", ""),
            FP8_CACHE,
        ),
        shows(
            "--enable-mixed-chunk", None, limit("mixed"), (True, False), ("--no-batching-mixed",)
        ),
        shows("--disable-priority-preemption", None, preempts, (False, True), PRIORITIES),
        shows(
            "--radix-eviction-policy",
            "lfu",
            lambda settings: STRATEGIES[settings.cache.eviction],
            (STRATEGIES["lfu"], STRATEGIES["lru"]),
            (),
        ),
        shows("--api-key", "swordfish", asks_for_a_key, (True, False), ()),
        shows("--admin-api-key", "swordfish", asks_for_a_key, (True, False), ()),
        shows("--served-model-name", "gpt-x", served_name, ("gpt-x", embedded.SERVED_NAME), ()),
        shows(
            "--weight-loader-disable-mmap",
            None,
            lambda settings: model_files(settings).mapped,
            (False, True),
            (),
        ),
        shows("--is-embedding", None, pools_texts, (True, False), ()),
        shows("--random-seed", "7", draws_the_same_seeds, (True, False), ()),
        shows("--log-level", "ERROR", log_level, (logging.ERROR, logging.INFO), ()),
    ],
)
def test_argument_changes_what_holds_without_it(
    flag: str, value: str | None, observe: Observe, pair: object, base: tuple[str, ...]
) -> None:
    assert compare(flag, value, observe=observe, base=base) == pair


Texts = tuple[list[int], ...]
COUNTED: Texts = (list(range(20)),)
BRANCHED: Texts = (*(5 * [[1, *range(10, 20)]]), [1, 20, 21], [1, 30, 31], [1, 40, 41])
AFTER_LONG: Texts = (*(5 * [[*range(12), 90]]), *([*range(12), last] for last in (91, 92, 93)))
NGRAM = ("--speculative-algorithm", "NGRAM")


def ngrams_of(settings: Settings) -> NgramDrafter | None:
    """The drafter of a worker with these settings; None: it drafts nothing."""
    if (speculation := batching(settings).speculation) is None:
        return None
    assert isinstance(speculation.drafter, RequestTexts)
    return speculation.drafter.ngrams


def drafted(settings: Settings, texts: Texts, context: list[int]) -> list[int] | None:
    """What a drafter that has read the texts proposes after the context."""
    if (drafter := ngrams_of(settings)) is None:
        return None
    for ids in texts:
        text = drafter.texts.begin(b"")
        drafter.texts.extend(text, pack_ids(ids))
        drafter.texts.end(text)
    return drafter.propose(b"", pack_ids(context), 100)


@pytest.mark.parametrize(
    ("flag", "value", "texts", "context", "pair", "base"),
    [
        shows("--speculative-algorithm", "NGRAM", COUNTED, [5], (list(range(6, 13)), None), ()),
        shows(
            "--speculative-num-draft-tokens", "3", COUNTED, [5], ([6, 7], list(range(6, 13))), NGRAM
        ),
        shows(
            "--speculative-ngram-max-trie-depth",
            "4",
            COUNTED,
            [5],
            ([6, 7, 8], list(range(6, 13))),
            NGRAM,
        ),
        shows(
            "--speculative-ngram-branch-length",
            "4",
            COUNTED,
            [5],
            ([6, 7, 8], list(range(6, 13))),
            NGRAM,
        ),
        shows("--speculative-ngram-capacity", "5", COUNTED, [14], ([], list(range(15, 20))), NGRAM),
        shows(
            "--speculative-ngram-min-match-window-size",
            "2",
            COUNTED,
            [99, 14],
            ([], list(range(15, 20))),
            NGRAM,
        ),
        shows(
            "--speculative-ngram-max-match-window-size",
            "1",
            ([7, 1, 30], [8, 1, 40]),
            [7, 1],
            ([40], [30]),
            NGRAM,
        ),
        shows(
            "--speculative-ngram-match-type",
            "PROB",
            BRANCHED,
            [1],
            (list(range(10, 17)), [10]),
            NGRAM,
        ),
        shows("--speculative-ngram-max-bfs-breadth", "1", BRANCHED, [1], ([40, 41], [10]), NGRAM),
        shows(
            "--speculative-ngram-min-bfs-breadth",
            "10",
            AFTER_LONG,
            list(range(12)),
            ([90], [93]),
            NGRAM,
        ),
    ],
)
def test_argument_changes_a_draft(
    flag: str,
    value: str,
    texts: Texts,
    context: list[int],
    pair: tuple[list[int], list[int] | None],
    base: tuple[str, ...],
) -> None:
    observe = partial(drafted, texts=texts, context=context)
    assert compare(flag, value, observe=observe, base=base) == pair


STANDALONE = (
    *("--speculative-algorithm", "STANDALONE"),
    *("--speculative-draft-model-path", str(embedded.path())),
)


def drafting(settings: Settings) -> ResolvedDraft:
    card = DraftCard(CARD, ResolvedValue("antiphon", "a test"))
    draft = resolve(settings, CARD, DEVICE, draft=card).draft.value
    assert draft is not None
    return draft


def draft_format(settings: Settings) -> object:
    files = draft_files(settings)
    return None if files is None else files.format


@pytest.mark.parametrize(
    ("flag", "value", "observe", "pair"),
    [
        shows(
            "--speculative-draft-model-path",
            "elsewhere",
            lambda settings: drafting(settings).model.value,
            ("elsewhere", str(embedded.path())),
        ),
        shows("--speculative-draft-load-format", "dummy", draft_format, ("dummy", "safetensors")),
        shows("--load-format", "dummy", draft_format, ("dummy", "safetensors")),
        shows(
            "--speculative-draft-model-quantization",
            "fp8",
            lambda settings: drafting(settings).quantization.value,
            ("fp8", "none"),
        ),
        shows(
            "--speculative-num-steps",
            "3",
            lambda settings: drafts_max(settings.speculation),
            (3, 7),
        ),
        shows(
            "--speculative-num-draft-tokens",
            "3",
            lambda settings: drafts_max(settings.speculation),
            (2, 7),
        ),
    ],
)
def test_argument_changes_the_draft_model(
    flag: str, value: str, observe: Observe, pair: tuple[object, object]
) -> None:
    assert compare(flag, value, observe=observe, base=STANDALONE) == pair


@pytest.mark.argument("--speculative-draft-model-revision")
def test_revision_of_the_draft_model_is_its_own() -> None:
    def revisions(settings: Settings) -> tuple[str, str]:
        draft = draft_settings(settings)
        assert draft is not None
        return settings.load.revision, draft.load.revision

    base = (*STANDALONE, "--revision", "v1")
    flag = "--speculative-draft-model-revision"
    assert compare(flag, "v2", observe=revisions, base=base) == (("v1", "v2"), ("v1", ""))


CORPORA = (*NGRAM, "--speculative-ngram-external-sam-budget", "2")


@pytest.mark.parametrize(
    ("flag", "value", "pair", "base"),
    [
        shows("--speculative-ngram-external-sam-budget", "2", ([6, 7], "disabled"), NGRAM),
        shows(
            "--speculative-ngram-external-corpus-max-tokens", "9", ("more than 9", [6, 7]), CORPORA
        ),
    ],
)
def test_argument_limits_external_corpora(
    flag: str, value: str, pair: tuple[list[int] | str, ...], base: tuple[str, ...]
) -> None:
    def observe(settings: Settings) -> list[int] | str:
        drafter = ngrams_of(settings)
        assert drafter is not None
        try:
            drafter.add_corpus("counted", [pack_ids(range(20))])
        except InvalidRequest as error:
            return next(text for text in pair if isinstance(text, str) and text in error.message)
        return drafter.propose(b"", pack_ids([5]), 100)

    assert compare(flag, value, observe=observe, base=base) == pair


@pytest.mark.parametrize(
    ("flag", "value"),
    [shows("--max-mamba-cache-size", "700"), shows("--mamba-full-memory-ratio", "2.5")],
)
def test_argument_sizes_the_pool_of_states(flag: str, value: str) -> None:
    given, _ = compare(
        flag,
        value,
        observe=lambda settings: resolve(settings, RECURRENT, DEVICE).cache_states.value,
    )
    assert given >= 700


@pytest.mark.parametrize(
    ("flag", "observe"),
    [
        shows("--model-path", lambda settings: model_files(settings).folder),
        shows("--tokenizer-path", tokenizer_path),
    ],
)
def test_path_is_where_the_files_are(flag: str, observe: Observe, tmp_path: Path) -> None:
    for file in embedded.path().iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert compare(flag, str(tmp_path), observe=observe) == (tmp_path, embedded.path())


@pytest.mark.argument("--model-checksum")
def test_model_checksum_refuses_other_files(tmp_path: Path) -> None:
    sums = tmp_path / "sums.json"
    sums.write_text('{"checksums": {"config.json": "00"}}')

    def complaint(settings: Settings) -> str:
        try:
            checksums.verify(model_files(settings), settings.load, settings.model.path)
        except ConfigError as error:
            return str(error)
        return ""

    given, without = compare("--model-checksum", str(sums), observe=complaint)
    assert "config.json" in given
    assert without == ""


@pytest.mark.argument("--chat-template")
def test_chat_template_replaces_that_of_the_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")

    def rendered(settings: Settings) -> str:
        read = vocabulary.read_model_tokenizer(
            tokenizer_path(settings), settings.model.chat_template
        )
        assert read.template is not None
        turn = ChatMessage(role="user", content="hi")
        return read.template.render((turn,), continue_final=False)

    given, without = compare("--chat-template", str(file), observe=rendered)
    assert given == "[hi]" != without


@pytest.mark.parametrize(
    ("flag", "value"), [shows("--mem-fraction-static", "0.4"), shows("--torchao-config", "int8wo")]
)
def test_argument_changes_the_memory_of_the_plan(flag: str, value: str) -> None:
    def sizes(settings: Settings) -> tuple[int, int]:
        resolved = plan(settings)
        return resolved.weight_bytes.value, resolved.cache_pages.value

    base = ("--model-path", str(embedded.path()))
    given, without = compare(flag, value, observe=sizes, base=base)
    if flag == "--mem-fraction-static":
        # 0.4 of 5 GiB is for weights and pool together.
        page_bytes = 64 * CARD.kv_bytes(CARD.dtype)
        assert given[1] == (int(5 * GIB * 0.4) - given[0]) // page_bytes
    else:
        assert given[0] < without[0]


@pytest.mark.argument("--tp-size")
def test_tp_size_divides_a_model_over_ranks() -> None:
    def share(settings: Settings) -> tuple[int, int, int, int]:
        resolved = plan(settings)
        one = resolved.weight_bytes.value, resolved.threads.value
        return resolved.ranks.value, *one, resolved.memory_bytes.value

    (given, without) = compare("--tp-size", "2", observe=share)
    assert given == (2, without[1] // 2, DEVICE.cores // 2, without[3] // 2)


@pytest.mark.argument("--pp-size")
def test_pp_size_divides_the_layers_into_stages() -> None:
    def share(settings: Settings) -> tuple[int, int, int]:
        resolved = plan(settings)
        return resolved.stages.value, resolved.weight_bytes.value, resolved.threads.value

    given, without = compare("--pp-size", "2", observe=share)
    assert given == (2, without[1] // 2, DEVICE.cores // 2)


@pytest.mark.argument("--ep-size")
def test_ep_size_spreads_experts_over_ranks() -> None:
    base = ("--tp-size", "4")
    given, without = compare(
        "--ep-size", "2", observe=lambda settings: plan(settings).ep_ranks.value, base=base
    )
    assert (given, without) == (2, 1)


@pytest.mark.argument("--attn-dp-size")
def test_attn_dp_size_divides_the_ranks_into_attention_groups() -> None:
    def share(settings: Settings) -> tuple[int, int, int]:
        resolved = plan(settings)
        page = resolved.cache_bytes.value // resolved.cache_pages.value
        limits = batching(settings).limits
        assert limits.running_max * resolved.attention_groups.value == resolved.running_max.value
        return resolved.attention_groups.value, page, limits.running_max

    base = ("--tp-size", "2")
    given, without = compare("--attn-dp-size", "2", observe=share, base=base)
    assert given == (2, 2 * without[1], without[2] // 2)


@pytest.mark.parametrize(
    ("flag", "value", "expected", "base"),
    [
        shows("--nnodes", "2", [0], ()),
        shows("--node-rank", "1", [1], ("--nnodes", "2")),
    ],
)
def test_argument_says_which_ranks_a_machine_has(
    flag: str, value: str, expected: list[int], base: tuple[str, ...]
) -> None:
    base = ("--tp-size", "2", *base)
    given, _ = compare(
        flag, value, observe=lambda settings: [*settings.parallel.local_ranks], base=base
    )
    assert given == expected


@pytest.mark.argument("--dist-init-addr")
def test_dist_init_addr_is_where_ranks_meet() -> None:
    port = free_port("127.0.0.1")

    def listens(settings: Settings) -> bool:
        ranks = RankProcesses(settings.parallel, "worker", lambda _: None)
        try:
            with suppress(ConnectionRefusedError):
                create_connection(("127.0.0.1", port)).close()
                return True
            return False
        finally:
            ranks.close()

    compare("--dist-init-addr", f"127.0.0.1:{port}", observe=listens)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--tp 3 --nnodes 2 --dist-init-addr a:1", "pp_size = 3: must be divisible by parallel"),
        ("--tp 3 --ep 2", "ep_size = 2: must divide parallel.tp_size = 3"),
        ("--tp 3 --attn-dp-size 2", "attn_dp_size = 2: must divide parallel.tp_size = 3"),
        (
            "--tp 2 --pp-size 2 --attn-dp-size 2",
            "parallel.attn_dp_size = 2: parallel.pp_size = 2: stages pass on the tokens of one",
        ),
        (
            "--tp 2 --attn-dp-size 2 --max-running-requests 1",
            "batching.running_max = 1: must be at least parallel.attn_dp_size = 2",
        ),
        ("--tp 2 --nnodes 2", "(--dist-init-addr): must be set if there are several nodes"),
        ("--tp 2 --dist-init-addr one", "init_address = 'one': must be host:port"),
        ("--node-rank 1", "node_rank = 1: must be less than parallel.nodes = 1"),
        (
            "--pp-size 2 --speculative-algorithm STANDALONE --speculative-draft-model-path m",
            "speculation.draft_model: parallel.pp_size = 2: a model with a draft model has one",
        ),
        (
            "--pp-size 2 --speculative-algorithm EAGLE3 --speculative-draft-model-path m",
            "speculation.draft_model: parallel.pp_size = 2: a model with a draft model has one",
        ),
    ],
)
def test_ranks_that_cannot_be_are_refused_by_name(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan(settings_of(*line.split()))


@pytest.mark.parametrize(
    ("flag", "value", "most"),
    [
        shows("--constrained-json-whitespace-pattern", r"[ \n\r\t]{0,2}", 2),
        shows("--constrained-json-max-whitespace-cnt", "3", 3),
        shows("--constrained-json-disable-any-whitespace", None, 1),
    ],
)
def test_argument_bounds_white_space_of_json(flag: str, value: str | None, most: int) -> None:
    card = read_card(embedded.path())
    words = read_vocabulary(embedded.path(), card.vocabulary_size)
    schema = GrammarSource(GrammarKind.JSON_SCHEMA, '{"type": "object", "required": ["n"]}')

    def accepted(settings: Settings) -> int:
        """The most spaces that an object may begin with."""
        state = (
            XgrammarCompiler(words, frozenset(card.eos_ids), settings.grammar)
            .compile(schema)
            .start(())
        )
        space = words.tokens.index(b" ")
        begin = next(id_ for id_, token in enumerate(words.tokens) if token == b"{")
        assert state.accept(begin)
        return next(count for count in range(99) if not state.accept(space))

    given, without = compare(flag, value, observe=accepted)
    assert given <= most < without


@pytest.mark.argument("--completion-template")
def test_completion_template_needs_its_marks() -> None:
    def read(settings: Settings) -> str:
        folder = tokenizer_path(settings)
        try:
            return str(
                vocabulary.read_model_tokenizer(
                    folder, "", settings.model.completion_template
                ).completion
            )
        except ConfigError as error:
            return str(error)

    given, without = compare("--completion-template", "star_coder", observe=read)
    assert "the tokenizer has no token" in given
    assert without == "None"


@pytest.mark.parametrize(
    ("flag", "value"),
    [shows("--tool-call-parser", "pythonic"), shows("--reasoning-parser", "kimi")],
)
async def test_parser_is_the_named_one(flag: str, value: str) -> None:
    async def card(_: float) -> EncodeReply:
        return EncodeReply(
            request_id=RequestId("r"), token_ids=b"", vocabulary_size=8, context_tokens=8
        )

    async def writes(_: str) -> bool:
        return True

    async def names(settings: Settings) -> list[str]:
        found = await formats_of(settings.gateway, card, writes)
        return [name for format_ in found if format_ is not None for name in format_.names]

    given, without = await compare_async(flag, value, observe=names)
    assert value in given
    assert without == []


@pytest.mark.argument("--enable-cache-report")
async def test_enable_cache_report_counts_cached_tokens() -> None:
    async def details(settings: Settings) -> object:
        async with house(cache_report=settings.gateway.cache_report) as at:
            _, reply, _ = await post(at, CHAT, {"messages": [{"role": "user", "content": "hi"}]})
        return cast("dict[str, object]", reply["usage"]).get("prompt_tokens_details")

    given, without = await compare_async("--enable-cache-report", observe=details)
    assert (given, without) == ({"cached_tokens": 1}, None)


@pytest.mark.argument("--allow-auto-truncate")
async def test_allow_auto_truncate_shortens_a_prompt_and_lowers_a_limit() -> None:
    async def sent(settings: Settings) -> list[tuple[int, ...]]:
        """Status, prompt tokens and limit: of a long prompt, and of one with a high limit."""
        found: list[tuple[int, ...]] = []
        async with house(allow_auto_truncate=settings.gateway.allow_auto_truncate) as at:
            for body in ({"prompt": "x" * 200}, {"prompt": "x" * 60, "max_tokens": 50}):
                at.cluster.submits.clear()
                status, _, _ = await post(at, "/v1/completions", body)
                submits = at.cluster.submits
                tokens = [id_count(submit.prompt_ids) for submit in submits] or [0]
                limits = [submit.sampling.max_new_tokens for submit in submits] or [0]
                found.append((status, *tokens, *limits))
        return found

    given, without = await compare_async("--allow-auto-truncate", observe=sent)
    assert given == [(200, 58, 6), (200, 60, 4)]
    assert without == [(400, 0, 0), (400, 0, 0)]


@pytest.mark.argument("--sampling-defaults")
@pytest.mark.argument("--preferred-sampling-params")
async def test_defaults_of_sampling_are_those_of_the_operator() -> None:
    async def temperatures(settings: Settings) -> tuple[float, float]:
        """Of a request that names none, and of one that does."""
        gateway = settings.gateway
        async with house(
            sampling_defaults=gateway.sampling_defaults,
            preferred_sampling=gateway.preferred_sampling,
        ) as at:
            for said in ({}, {"temperature": 0.75}):
                await post(at, CHAT, {"messages": HI, **said})
            first, second = (submit.sampling.temperature for submit in at.cluster.submits)
        return first, second

    given, without = await compare_async("--sampling-defaults", "openai", observe=temperatures)
    assert (given, without) == ((1.0, 0.75), (0.25, 0.75))
    given, without = await compare_async(
        "--preferred-sampling-params", '{"temperature": 0.5}', observe=temperatures
    )
    assert (given, without) == ((0.5, 0.75), (0.25, 0.75))


@pytest.mark.argument("--default-chat-template-kwargs")
async def test_default_chat_template_kwargs_are_variables_of_the_template() -> None:
    async def variables(settings: Settings) -> list[object]:
        """Of a request that sets none, and of one that does."""
        async with house(chat_template_kwargs=settings.gateway.chat_template_kwargs) as at:
            for said in ({}, {"chat_template_kwargs": {"style": "long"}}):
                await post(at, CHAT, {"messages": HI, **said})
            return [json.loads(encode.template.options or "{}") for encode in at.cluster.encodes]

    given, without = await compare_async(
        "--default-chat-template-kwargs", '{"style": "short", "a": 1}', observe=variables
    )
    assert given == [{"style": "short", "a": 1}, {"style": "long", "a": 1}]
    assert without == [{}, {"style": "long"}]


@pytest.mark.argument("--preferred-sampling-params")
async def test_preferred_max_new_tokens_bounds_answers_without_a_limit() -> None:
    async def limits(settings: Settings) -> list[int]:
        """Of requests without a limit, of one with its own, and of one without over /generate."""
        async with house(preferred_sampling=settings.gateway.preferred_sampling) as at:
            for said in ({}, {"max_tokens": 9}):
                await post(at, CHAT, {"messages": HI, **said})
            await post(at, "/generate", {"text": "hi"})
        return [submit.sampling.max_new_tokens for submit in at.cluster.submits]

    given, without = await compare_async(
        "--preferred-sampling-params", '{"max_new_tokens": 7}', observe=limits
    )
    assert given == [7, 9, 7]
    assert without[1] == 9
    assert min(without[0], without[2]) > 9  # what the context leaves


@pytest.mark.parametrize(
    "value", ["[]", '{"max_new_tokens": 0}', '{"n": 2}', '{"temperature": -1}', "x"]
)
def test_preferred_sampling_params_that_cannot_hold_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="preferred_sampling"):
        settings_of("--preferred-sampling-params", value)


@pytest.mark.argument("--stream-response-default-include-usage")
async def test_stream_response_default_include_usage_ends_streams_with_usage() -> None:
    async def has_usage(settings: Settings) -> list[bool]:
        """Of streams whose request is silent, says no, and says yes."""
        found: list[bool] = []
        async with house(stream_usage=settings.gateway.stream_usage) as at:
            for options in (
                {},
                {"stream_options": {"include_usage": False}},
                {"stream_options": {"include_usage": True}},
            ):
                events = await stream(at, CHAT, {"messages": HI, **options})
                found.append(json.loads(events[-2]).get("usage") is not None)
        return found

    given, without = await compare_async(
        "--stream-response-default-include-usage", observe=has_usage
    )
    assert (given, without) == ([True, False, True], [False, False, True])


@pytest.mark.argument("--incremental-streaming-output")
async def test_incremental_streaming_output_sends_deltas() -> None:
    async def texts(settings: Settings) -> list[str]:
        read: list[str] = []
        async with (
            house(stream_output=settings.gateway.stream_output) as at,
            aiohttp.ClientSession() as session,
        ):
            at.cluster.hold_at = 2
            body = {"text": "ab", "stream": True}
            async with session.post(f"{at.url}/generate", json=body) as reply:
                async for line in reply.content:
                    if line.startswith(b"data: {"):
                        read.append(json.loads(line[6:])["text"])
                        at.cluster.go.set()
        return read

    given, without = await compare_async("--incremental-streaming-output", observe=texts)
    assert len(given) > 1
    assert "".join(given) == without[-1]


def test_settings_of_reads_no_environment() -> None:
    assert settings_of("--port", "1").gateway.port == 1


@pytest.mark.argument("--disable-overlap-schedule")
def test_disable_overlap_schedule_plans_each_step_after_the_one_before() -> None:
    """Without it the warm-up decides: see `test_overlap_is_chosen_where_it_is_faster`."""
    given, without = compare(
        "--disable-overlap-schedule", observe=lambda settings: plan(settings).overlap.value
    )
    assert (given, without) == (False, True)


@pytest.mark.argument("--hicache-storage-backend")
@pytest.mark.argument("--enable-hierarchical-cache")
def test_pages_are_copied_to_storage_outside_the_worker() -> None:
    def stores(settings: Settings) -> bool:
        """Whether the engine copies blocks of pages."""
        return open_engine(settings).shards is not None

    both = ("--enable-hierarchical-cache", "--hicache-storage-backend", "kv_storage")
    assert compare(*both, observe=stores) == (True, False)
    for half in (both[:1], both[1:]):
        with pytest.raises(CannotStart, match="must be set together"):
            open_engine(settings_of(*half))
    assert "use kv_storage" in refusal(both[0], both[1], "mooncake")


def media_refusal(settings: Settings, *sources: str) -> str:
    """Return what is said against images that a gateway is to fetch."""

    async def refuse() -> str:
        store = BlobStore("a:1", 10**9, SystemClock())
        intake = MediaIntake(settings.media, store, EncoderConfig(pixels_max=10**6))
        try:
            with pytest.raises(InvalidRequest) as refused:
                await intake.open([MediumSource(each, "") for each in sources], 1.0)
        finally:
            await intake.close()
        return refused.value.message

    return asyncio.run(refuse())


RECIPE = PreprocessorConfig(
    size=28, short_edge=None, resample=3, scale=1.0, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)
)
MEBIBYTE_AND_MORE = "A" * (2 * 1024**2)
"""Base64."""


@pytest.mark.parametrize(
    ("flag", "value", "sources", "expected"),
    [
        shows(
            "--allowed-media-domains",
            "a.example",
            ["http://b.localhost:1/a.png"],
            "b.localhost is not one of the allowed domains",
        ),
        shows(
            "--media-url-max-file-size-mb",
            "1",
            [MEBIBYTE_AND_MORE],
            "the image has 1572864 bytes; the limit is 1048576 bytes",
        ),
        shows(
            "--limit-mm-data-per-request",
            '{"image": 1, "video": 2}',
            ["AAAA", "AAAA"],
            "the request has 2 images; the limit is 1",
        ),
        shows(
            "--mm-per-request-timeout",
            "1e-9",
            ["http://b.localhost:1/a.png"],
            "http://b.localhost:1/a.png was not fetched within 1e-09 s",
        ),
    ],
)
def test_argument_decides_which_images_are_taken(
    flag: str, value: str, sources: list[str], expected: str
) -> None:
    given, _ = compare(flag, value, observe=lambda settings: media_refusal(settings, *sources))
    assert given == expected


def test_limits_of_media_are_named_by_kind() -> None:
    assert settings_of("--limit-mm-data-per-request", '{"image": 0}').media.images_max == 0
    assert settings_of("--limit-mm-data-per-request", '{"video": 3}').media.videos_max == 3
    assert settings_of("--limit-mm-data-per-request", '{"audio": 0}').media.audios_max == 0
    for value in ('{"pictures": 1}', '{"image": "1"}', "4", "{"):
        assert "must be a JSON object such as" in refusal("--limit-mm-data-per-request", value)
    settings = settings_of("--media-url-max-file-size-mb", "48")
    media, encoder = settings.media, settings.encoder
    assert encoder.image_bytes_max == media.file_bytes_max == 48 * 1024**2
    assert encoder.video_bytes_max == media.video_bytes_max == 48 * 1024**2
    media = settings_of("--mm-per-request-timeout", "3").media
    assert media.fetch_timeout_s == media.video_fetch_timeout_s == 3


@pytest.mark.argument("--mm-max-concurrent-calls")
def test_mm_max_concurrent_calls_is_how_many_images_are_fetched_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def most(settings: Settings) -> int:
        running, seen = 0, list[int]()

        async def follow(_fetcher: MediaFetcher, _source: str, *_: object) -> bytes:
            nonlocal running
            running += 1
            seen.append(running)
            await asyncio.sleep(0)
            running -= 1
            return b""

        monkeypatch.setattr(MediaFetcher, "_follow", follow)

        async def fetch() -> None:
            fetcher = MediaFetcher(settings.media)
            request = RequestRoom(BlobStore("a:1", 10**9, SystemClock()))
            with request.medium(1) as room:
                urls = [f"http://a.example/{n}" for n in range(40)]
                await asyncio.gather(*(fetcher.fetch(url, room) for url in urls))

        asyncio.run(fetch())
        return max(seen)

    assert compare("--mm-max-concurrent-calls", "2", observe=most) == (2, 32)


@pytest.mark.argument("--mm-processor-worker-num")
def test_mm_processor_worker_num_is_the_number_of_decoding_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def processes(settings: Settings) -> int:
        started = list[int]()

        def pool(_arguments: object, *, processes: int, **_: object) -> None:
            started.append(processes)

        monkeypatch.setattr(decode_process, "ProcessPool", pool)
        decode_process.DecodeProcesses(
            decode_process.DecodeSettings(RECIPE, settings.encoder.pixels_max), settings.encoder
        )
        return started[0]

    assert compare("--mm-processor-worker-num", "5", observe=processes) == (5, 2)
    assert settings_of("--mm-processor-worker-num", "0") == settings_of()


@pytest.mark.argument("--mm-process-config")
def test_mm_process_config_limits_the_pixels_of_requests_without_limits() -> None:
    async def limits(settings: Settings, of_request: PixelLimits | None) -> PixelLimits | None:
        intake = MediaIntake(
            settings.media, BlobStore("a:1", 10**9, SystemClock()), EncoderConfig()
        )
        source = MediumSource(base64.b64encode(picture(1)).decode(), "")
        return (await intake.open([source], 1.0, of_request)).headers[0].limits

    def found(settings: Settings) -> list[PixelLimits | None]:
        return [asyncio.run(limits(settings, each)) for each in (None, PixelLimits(most=900))]

    value = '{"image": {"min_pixels": 800, "max_pixels": 1000}}'
    given, without = compare("--mm-process-config", value, observe=found)
    assert given == [PixelLimits(least=800, most=1000), PixelLimits(least=800, most=900)]
    assert without == [None, PixelLimits(most=900)]
    for bad in ('{"video": {"fps": 1}}', '{"image": {"do_resize": false}}', "[]"):
        assert "must be a JSON object with image" in refusal("--mm-process-config", bad)


def test_sizes_of_captured_prefills_are_numbers() -> None:
    for bad in ("64", "[0.5]", '["a"]'):
        assert "must be a JSON array" in refusal("--piecewise-cuda-graph-tokens", bad)
    assert "must be positive integers" in refusal("--cuda-graph-bs-prefill", "0")
