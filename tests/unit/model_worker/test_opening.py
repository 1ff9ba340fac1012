"""From settings to an engine, on the embedded model; files that are not those published."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from tests.kernels.rows import ISAS, using
from tests.support import worker
from tests.support.reports import ProgressReader, new_ids
from tests.support.worker import plain_runs
from tests.unit.config.test_resolve import CARD, DEVICE
from tests.unit.config.test_sglang import serve
from tests.unit.model_worker.steps import Steps, pools

from antiphon import embedded
from antiphon.config.cluster import ClusterConfig, differing
from antiphon.config.errors import ConfigError
from antiphon.config.model import CacheDtype, LinearFormat, LoadConfig
from antiphon.config.settings import Settings
from antiphon.config.speculation import SpeculationConfig
from antiphon.config.worker import CacheConfig, Policy
from antiphon.model_card.files import find_files
from antiphon.model_card.hub import PublishedFile
from antiphon.model_worker.batching.flights import ForwardThread
from antiphon.model_worker.batching.loop import BatchingLoop
from antiphon.model_worker.batching.mailbox import Mail, Mailbox
from antiphon.model_worker.batching.state import ChoiceKey, Progress, RequestState
from antiphon.model_worker.batching.waiting_queue import QueueRules
from antiphon.model_worker.cache.radix import RadixIndex
from antiphon.model_worker.speculation.request_texts import RequestTexts
from antiphon.model_worker.startup import checksums, warm_up
from antiphon.model_worker.startup.checksums import HUB, content_digest, verify
from antiphon.model_worker.startup.core import open_engine_core
from antiphon.model_worker.startup.engine import Engine, open_engine
from antiphon.resolve.resolved_config import resolve, table
from antiphon.resolve.resolved_value import ResolvedValue
from antiphon.service.startup import CannotStart
from antiphon.wire.base import FinishReason
from antiphon.wire.ids import RequestId

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from antiphon.model_worker.batching.engine_core import EngineCore
    from antiphon.model_worker.speculation.text_index import IndexedText

SMALL = Settings(cache=CacheConfig(tokens_max=512), cluster=ClusterConfig(page_tokens=16))


def loop_of(engine: Engine) -> BatchingLoop[Any]:
    launcher = engine.in_turn()
    return BatchingLoop(engine.step_core, launcher, Mailbox(1), lambda _: None, clock=lambda: 7.0)


def greedy(prompt: list[int], number: int, max_new_tokens: int) -> RequestState:
    sampling = {"max_new_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True}
    return worker.state(prompt, request_id=RequestId(f"r{number}"), **sampling)


def answers(
    engine: Engine, prompts: list[list[int]], loop: BatchingLoop[Any] | None = None
) -> list[list[int]]:
    """12 greedy tokens to each prompt, all at once."""
    found: list[list[int]] = [[] for _ in prompts]
    requests = [greedy(p, n, 12) for n, p in enumerate(prompts)]
    for news in progress_of(engine, *requests, loop=loop):
        found[news.key] += new_ids(news)
    return found


def progress_of(
    engine: Engine, *requests: RequestState, loop: BatchingLoop[Any] | None = None
) -> list[Progress]:
    """Run requests, whose keys are their numbers, until the engine is idle."""
    loop, reader = loop or loop_of(engine), ProgressReader()
    mail = Mail(runs=plain_runs({ChoiceKey(n): state for n, state in enumerate(requests)}))
    found: list[Progress] = []
    while mail.runs or not engine.step_core.idle:
        report, mail = loop.turn(mail), Mail()
        found += reader.read(report.progress)
    return found


def test_the_embedded_model_answers_the_same_beside_others_as_alone() -> None:
    prompts = [[5, 6, 7], [9] * 40, [3, 1, 4, 1, 5, 9, 2, 6]]
    together = answers(open_engine(SMALL), prompts)
    assert [len(ids) for ids in together] == [12, 12, 12]
    assert together == [answers(open_engine(SMALL), [prompt])[0] for prompt in prompts]


def test_report_of_a_started_request_counts_its_pages() -> None:
    engine = open_engine(SMALL)
    loop, free = loop_of(engine), []
    for number in range(3):
        run = greedy([5 + number] * 40, number, 20)
        report = loop.turn(Mail(runs=plain_runs({ChoiceKey(number): run})))
        assert report.prefill_rows == 1
        free.append(report.capacity.pages_free + report.capacity.pages_evictable)
    # 40 tokens and the next one are in three pages of 16.
    assert [free[0] - later for later in free] == [0, 3, 6]


def test_a_model_that_embeds_warms_up_and_draws_nothing() -> None:
    model = msgspec.structs.replace(SMALL.model, embedding=True)
    engine = open_engine(msgspec.structs.replace(SMALL, model=model))
    assert warm_up.warm_up(loop_of(engine), engine).step == 1
    limits = engine.core.limits
    assert engine.resolved is not None
    assert engine.resolved.pooling.value is not None
    assert limits.pool_width == engine.resolved.pooling.value.card.width


@pytest.mark.skipif(not ISAS, reason="the CPU's own kernels are not built")
def test_the_plan_says_whether_a_step_is_one_call_and_if_not_why() -> None:
    def decoder(linear: str) -> ResolvedValue[str]:
        model = msgspec.structs.replace(SMALL.model, linear=linear)
        engine = open_engine(msgspec.structs.replace(SMALL, model=model))
        assert engine.resolved is not None
        assert engine.resolved.decoder.reason in table(engine.resolved)
        return engine.resolved.decoder

    assert decoder("packed") == ResolvedValue("fused", "all layers in one call of the kernels")
    assert decoder("plain") == ResolvedValue(
        "by layer", "the linears are not packed on a single rank"
    )


def test_the_pool_is_as_large_as_its_setting_and_bounds_the_context() -> None:
    limits = open_engine(SMALL).core.limits
    assert limits.context_tokens == 512
    assert limits.end_ids


@pytest.mark.skipif(not ISAS, reason="the CPU's own kernels are not built")
def test_pages_of_another_instruction_set_or_of_rounded_weights_are_others() -> None:
    digests: dict[str, str] = {}
    names: set[bytes] = set()
    for isa in ISAS:
        with using(isa):
            engine = open_engine(SMALL)
        assert engine.resolved is not None
        digests[isa] = engine.resolved.bits.value
        names.add(page_space(engine))
        assert engine.numerics_digest == "", "nothing was promised"
    model = msgspec.structs.replace(SMALL.model, linear=LinearFormat.INT8, deterministic=True)
    rounded = open_engine(msgspec.structs.replace(SMALL, model=model))
    names.add(page_space(rounded))
    assert len(names) == len(ISAS) + 1
    assert differing(digests[ISAS[0]], rounded.numerics_digest) == ("linear",)
    for isa in ISAS[1:]:
        assert differing(digests[ISAS[0]], digests[isa]) == ("isa",)


def page_space(engine: Engine) -> bytes:
    """The name under which the pages of a first request are kept."""
    engine.core.add(ChoiceKey(1), worker.state([1, 2], max_new_tokens=1), 0.0)
    engine.core.next_rows(0.0)
    (request,) = engine.core.running.values()
    return request.namespace


@pytest.mark.skipif(not ISAS, reason="the CPU's own kernels are not built")
def test_pages_in_eight_bits_are_others_and_twice_as_many() -> None:
    engines = {
        dtype: open_engine(Settings(cache=CacheConfig(dtype=dtype, bytes_max=1 << 20)))
        for dtype in (CacheDtype.AUTO, CacheDtype.FP8_E4M3, CacheDtype.FP8_E5M2)
    }
    plans = [engine.resolved for engine in engines.values() if engine.resolved is not None]
    wide, *narrow = [plan.cache_pages.value for plan in plans]
    # What is left of the megabyte may hold one page more that is half as large.
    assert {pages // 2 for pages in narrow} == {wide}
    for engine in engines.values():
        (said,) = answers(engine, [[5, 6, 7]])
        assert len(said) == 12
    assert len({page_space(engine) for engine in engines.values()}) == 3


def test_a_warmed_up_engine_is_empty_again() -> None:
    engine = open_engine(SMALL)
    report = warm_up.warm_up(loop_of(engine), engine)
    assert (report.step, report.progress) == (2, ())
    assert engine.core.pools.used() == [0]


def drafting(**batching: int) -> Settings:
    """Drafts from n-grams, with these limits of batches."""
    limited = msgspec.structs.replace(SMALL.batching, **batching)
    return msgspec.structs.replace(
        SMALL, batching=limited, speculation=SpeculationConfig(algorithm="ngram")
    )


def test_sizes_that_never_decode_together_are_left_out_of_the_costs() -> None:
    engine = open_engine(drafting(running_max=32, prefill_max=1))
    warm_up.warm_up(loop_of(engine), engine)
    speculation = engine.core.speculation
    assert speculation is not None
    assert speculation.costs is not None
    assert speculation.costs.tokens == tuple(range(1, speculation.drafts_max + 2))


def test_steps_that_are_interpreted_are_not_measured() -> None:
    engine = open_engine(drafting())
    assert engine.resolved is not None
    device = ResolvedValue("interpreter", "a test")
    engine.resolved = msgspec.structs.replace(engine.resolved, device=device)
    assert warm_up.warm_up(loop_of(engine), engine).step == 2
    assert engine.core.speculation is not None
    assert engine.core.speculation.costs is None


def test_a_text_that_cannot_be_indexed_ends_its_request_alone() -> None:
    engine = open_engine(drafting())
    loop, speculation = loop_of(engine), engine.core.speculation
    assert speculation is not None
    assert isinstance(speculation.drafter, RequestTexts)
    texts, broken = speculation.drafter.ngrams.texts, list[object]()
    extend = texts.extend

    def extend_others(text: IndexedText, ids: bytes) -> None:
        if text in broken:
            raise ValueError("the index of this text is broken")
        if not broken:
            broken.append(text)
        extend(text, ids)

    texts.extend = extend_others
    mail = Mail(runs=plain_runs({ChoiceKey(n): greedy([5 + n] * 4, n, 12) for n in range(2)}))
    ends: dict[int, FinishReason] = {}
    while not engine.core.idle or mail.runs:
        for progress in loop.turn(mail).progress:
            if isinstance(progress, Progress) and progress.finish is not None:
                ends[progress.key] = progress.finish.reason
        mail = Mail()
    assert sorted(ends.values()) == [FinishReason.ERROR, FinishReason.LENGTH]
    assert engine.core.pools.used()[0] == engine.core.pools.loose()[0]


@pytest.mark.parametrize(
    ("in_turn", "ahead", "shared", "reason"),
    [
        (1.0, 1.5, 1.6, "0.67 with 1 rows, 0.67 with 16 rows; {} with a core that the loop shares"),
        (1.5, 1.0, 1.6, "1.50 with 1 rows, 1.50 with 16 rows; {} with a core that the loop shares"),
        (1.5, 1.2, 1.0, "{} with a core that the loop shares; 1.25 with 1 rows, 1.25 with 16 rows"),
    ],
)
def test_overlap_is_chosen_where_it_is_faster(
    in_turn: float, ahead: float, shared: float, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, runs = warm_up._decode_seconds, Counter[float]()
    threads: dict[float, int] = {}

    def seconds(loop: BatchingLoop[Any], rows: int) -> float:
        assert real(loop, rows) > 0
        launcher = loop._launcher
        took = in_turn
        if isinstance(launcher, ForwardThread):
            assert isinstance(launcher._begin, partial)
            (count,) = launcher._begin.args
            took = ahead if count == 2 else shared
            threads[took] = count
        runs[took] += 1
        return took

    monkeypatch.setattr(warm_up, "_decode_seconds", seconds)
    monkeypatch.setattr(warm_up, "STEP_S_MAX", 60.0)  # however busy the machine is
    engine = open_engine(SMALL)
    loop = loop_of(engine)
    assert engine.resolved is not None
    two = msgspec.structs.replace(engine.resolved.threads, value=2)
    engine.resolved = msgspec.structs.replace(engine.resolved, threads=two)
    chosen = warm_up.choose_overlap(loop, engine)
    sharing = f"{in_turn / shared:.2f}"
    reason = reason.format(f"{sharing} with 1 rows, {sharing} with 16 rows")
    faster = in_turn > min(ahead, shared)
    assert (chosen.value, chosen.reason) == (faster, f"its measured speed: {reason}")
    assert (loop._ahead, len(loop.native_threads)) == (int(faster), int(faster))
    assert threads == {ahead: 2, shared: 1}
    # Each way has run as often as steps in turn, but one that is far behind once with as many rows.
    slow = {took: 2 for took in (ahead, shared) if in_turn < 0.9 * took}
    assert runs == {in_turn: 10, ahead: 10, shared: 10} | slow
    expected = answers(open_engine(SMALL), [[5, 6, 7]])
    assert answers(engine, [[5, 6, 7]], loop) == expected


def test_long_steps_are_run_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "STEP_S_MAX", 0.0)
    engine = open_engine(SMALL)
    loop = loop_of(engine)
    chosen = warm_up.choose_overlap(loop, engine)
    assert not chosen.value
    assert re.fullmatch(r"a step takes \d+ ms", chosen.reason)
    assert (loop._ahead, loop._step) == (0, 4)


def test_a_model_of_another_digest_is_not_opened() -> None:
    cluster = msgspec.structs.replace(SMALL.cluster, model_digest="0" * 64)
    with pytest.raises(CannotStart, match=content_digest(embedded.path())):
        open_engine(msgspec.structs.replace(SMALL, cluster=cluster))


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    model = msgspec.structs.replace(SMALL.model, path=str(tmp_path))
    with pytest.raises(CannotStart, match=str(tmp_path)):
        open_engine(msgspec.structs.replace(SMALL, model=model))


def opened(line: str = "") -> EngineCore:
    settings = serve(line).settings
    resolved = resolve(settings, CARD, DEVICE)
    return open_engine_core(settings, resolved, pools(999), vocab_size=100)


def test_by_default_prefixes_are_cached_and_requests_run_in_order_of_arrival() -> None:
    batching = opened()
    assert isinstance(batching.index, RadixIndex)
    assert batching.rules == QueueRules()
    limits = batching.limits
    assert (limits.step_tokens_max, limits.chunk_tokens, limits.fill_tokens) == (2048, 512, 256)
    assert (limits.mixed, limits.prefill_max, limits.conservativeness) == (True, None, 1.0)


@pytest.mark.parametrize(("groups", "tokens"), [(1, 2048), (2, None)])
def test_one_of_several_attention_groups_does_not_know_whether_a_prompt_is_alone(
    groups: int, tokens: int | None
) -> None:
    settings, device = (
        serve("").settings,
        msgspec.structs.replace(DEVICE, arithmetic={"isa": "amx"}),
    )
    resolved = resolve(settings, CARD, device)
    several = ResolvedValue(groups, "a test")
    resolved = msgspec.structs.replace(resolved, attention_groups=several)
    core = open_engine_core(settings, resolved, pools(999), vocab_size=100)
    assert core.limits.alone_tokens == tokens


def test_the_prefix_cache_can_be_switched_off() -> None:
    assert not opened("--disable-radix-cache").index.enabled


@pytest.mark.parametrize(
    ("line", "rules"),
    [
        ("--schedule-policy lpm", QueueRules(policy=Policy.LPM)),
        ("--schedule-policy priority", QueueRules(priority=True)),
        (
            "--schedule-policy lof --enable-priority-scheduling"
            " --schedule-low-priority-values-first --priority-scheduling-preemption-threshold 3",
            QueueRules(policy=Policy.LOF, priority=True, low_first=True, preempt_threshold=3),
        ),
        ("--abort-on-priority-when-disabled", QueueRules(refuse_priority=True)),
        ("--queue-max-overtake-s 2", QueueRules(max_overtake_s=2.0)),
    ],
)
def test_flags_set_the_queue_rules(line: str, rules: QueueRules) -> None:
    assert opened(line).rules == rules


def test_flags_set_what_a_step_takes() -> None:
    limits = opened(
        "--chunked-prefill-size -1 --prefill-max-requests 2 --schedule-conservativeness 0.3"
        " --stream-interval 4 --max-running-requests 7 --batching-fill-tokens 100"
        " --no-batching-mixed --queue-timeout-s 5 --batching-running-timeout-s 60"
    ).limits
    assert limits.chunk_tokens is None
    assert (limits.prefill_max, limits.fill_tokens, limits.mixed) == (2, 100, False)
    assert (limits.conservativeness, limits.stream_interval) == (0.3, 4)
    assert (limits.running_max, limits.queue_timeout_s, limits.running_timeout_s) == (7, 5.0, 60.0)


def test_max_prefill_tokens_leaves_the_number_of_running_requests_alone() -> None:
    limits = opened("--max-prefill-tokens 16 --max-running-requests 32").limits
    assert (limits.fill_tokens, limits.running_max) == (16, 32)


def test_max_prefill_tokens_counts_new_prompt_tokens_and_no_decodes() -> None:
    given = opened("--max-prefill-tokens 8 --chunked-prefill-size 12").limits
    steps = Steps(
        pages=2000,
        running_max=40,
        fill_tokens=given.fill_tokens,
        chunk_tokens=given.chunk_tokens,
        step_tokens_max=given.step_tokens_max,
        context_tokens=64,
    )
    for key in range(20):
        steps.add(key, 4, max_new_tokens=50, ignore_eos=True)
    assert [steps.go()[2 * turn :] for turn in range(10)] == [
        [(2 * turn, 4), (2 * turn + 1, 4)] for turn in range(10)
    ]
    # Twenty decodes take nothing from the prompts, and the first chunk may be longer than that.
    steps.add(30, 20)
    steps.add(31, 4)
    steps.add(32, 4)
    steps.add(33, 4)
    assert steps.go()[20:] == [(30, 12)]
    assert steps.go()[20:] == [(30, 8)]
    assert steps.go()[21:] == [(31, 4), (32, 4)]


def test_a_request_of_higher_priority_takes_the_last_place_of_a_full_queue() -> None:
    steps = Steps(running_max=1, queue_max=1, rules=QueueRules(priority=True))
    steps.add(1, priority=1)
    steps.go()
    steps.add(2, priority=1)
    steps.add(3, priority=1)
    steps.add(4, priority=2)
    refused = [p.key for p in steps.progress() if p.finish is not None]
    assert refused == [3, 2]


CONTENT = {"config.json": b"{}", "a.safetensors": b"weights", "README.md": b"words"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in CONTENT.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def newer(sums: dict[str, str]) -> dict[str, object]:
    return {"files": {name: {"sha256": digest, "size": 1} for name, digest in sums.items()}}


def older(sums: dict[str, str]) -> dict[str, object]:
    return {"checksums": sums}


def check(folder: Path, listed: object) -> None:
    file = folder / "sums.json"
    file.write_text(json.dumps(listed))
    verify(find_files(folder), LoadConfig(checksum=str(file)), str(folder))


@pytest.mark.parametrize("form", [newer, older])
def test_listed_files_must_be_there_and_the_same(
    folder: Path, form: Callable[[dict[str, str]], dict[str, object]]
) -> None:
    sums = {name: sha256(content) for name, content in CONTENT.items()}
    check(folder, form(sums))
    wrong = sums | {"a.safetensors": sha256(b"others"), "gone.json": "0" * 64}
    with pytest.raises(ConfigError) as caught:
        check(folder, form(wrong))
    said = str(caught.value)
    assert f"a.safetensors is {sha256(b'weights')[:16]}…, not {sha256(b'others')[:16]}…" in said
    assert "gone.json: No such file or directory" in said


@pytest.mark.parametrize("listed", [{}, [], {"files": {"a": 1}}])
def test_a_list_that_lists_nothing_is_refused(folder: Path, listed: object) -> None:
    with pytest.raises(ConfigError, match=r"sums\.json"):
        check(folder, listed)


def known_to_the_hub() -> dict[str, PublishedFile]:
    blob = hashlib.sha1(b"blob 2\0{}").hexdigest()
    return {
        "config.json": PublishedFile(2, None, blob),
        "a.safetensors": PublishedFile(7, sha256(b"weights"), ""),
        "README.md": PublishedFile(9, None, "0" * 40),
        "b.bin": PublishedFile(9, "0" * 64, ""),
    }


def check_with_hub(
    monkeypatch: pytest.MonkeyPatch, folder: Path, known: dict[str, PublishedFile]
) -> list[str]:
    asked: list[str] = []

    def published(repo: str, _: LoadConfig) -> dict[str, PublishedFile]:
        asked.append(repo)
        return known

    monkeypatch.setattr(checksums, "list_published_files", published)
    verify(find_files(folder), LoadConfig(checksum=HUB), "somebody/small")
    return asked


def test_files_are_compared_with_those_of_the_hub(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not fetched is not missed, and words about a model are not the model."""
    assert check_with_hub(monkeypatch, folder, known_to_the_hub()) == ["somebody/small"]
    (folder / "config.json").write_bytes(b"[]")
    with pytest.raises(ConfigError, match=r"config\.json is .*, not "):
        check_with_hub(monkeypatch, folder, known_to_the_hub())


def test_weights_that_the_hub_does_not_know_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = known_to_the_hub()
    del known["a.safetensors"]
    with pytest.raises(ConfigError, match=r"on the hub has no a\.safetensors"):
        check_with_hub(monkeypatch, folder, known)


def test_a_worker_compares_before_it_loads(tmp_path: Path) -> None:
    file = tmp_path / "sums.json"
    file.write_text(json.dumps(older({"config.json": "0" * 64})))
    settings = Settings(load=LoadConfig(checksum=str(file)))
    with pytest.raises(CannotStart, match=r"load\.checksum = .*: config\.json is "):
        open_engine(settings)


def test_another_pooling_is_another_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(embedded.path(), folder)
    digests = [content_digest(folder)]
    assert digests == [content_digest(embedded.path())]
    kinds = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense", "Normalize": "3_N"}
    listed = [
        {"type": f"sentence_transformers.models.{kind}", "path": part}
        for kind, part in kinds.items()
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    for kind in ("Pooling", "Dense"):
        (folder / kinds[kind]).mkdir()
    written = {
        "1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}',
        "2_Dense/config.json": b"{}",
        "2_Dense/model.safetensors": b"weights",
        "README.md": b"",
    }
    for name, content in written.items():
        digests.append(content_digest(folder))
        (folder / name).write_bytes(content)
    assert content_digest(folder) == digests[-1], "README.md is no part of it"
    (folder / "2_Dense/model.safetensors").write_bytes(b"other weights")
    digests.append(content_digest(folder))
    assert len(set(digests)) == len(digests)
    (folder / "modules.json").write_text("[")
    with pytest.raises(ConfigError, match=r"modules\.json"):
        content_digest(folder)


def test_a_config_that_is_overridden_is_another_model() -> None:
    plain = find_files(embedded.path())
    other = msgspec.structs.replace(plain, overrides='{"rope_theta": 1.0}')
    assert content_digest(plain) == content_digest(embedded.path())
    assert content_digest(other) != content_digest(plain)
