"""Whole models on the device `interpreter`, by their batching loop, against the CPU."""

from __future__ import annotations

import importlib
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from tests.kernels.edits import Edit, edited
from tests.kernels.interpreted.drawn import SLOTS, DrawnDevice, DrawnStream
from tests.models import families
from tests.models.eagle3 import write_head
from tests.models.model_loop import ModelLoop, PoolingEngine
from tests.models.parity import save
from tests.models.quantization.rows import BY_NAME as QUANTIZED
from tests.models.quantization.rows import SHAPE, write
from tests.models.quantization.test_gguf import MADE
from tests.models.seeing_loop import SeeingLoop, medium
from tests.models.specs import BY_NAME
from tests.models.test_draft_model import with_nan
from tests.models.test_experts import MXFP4, in_mxfp4, in_nvfp4, rewrite
from tests.models.test_load_formats import Kind, write_gguf
from tests.models.test_pooling import sentence
from tests.models.test_speculation import compare, often_wrong, texts_of
from tests.models.test_steering import bias
from tests.models.tiny import VOCABULARY, write_llama
from tests.support.models import change_tensors, load, open_model
from tests.support.worker import decode_plan, state

from antiphon.config.load import load as settings_of
from antiphon.kernels.flashinfer import attention, latents, plans
from antiphon.kernels.linear_grouped import GroupedMatrix
from antiphon.kernels.linear_int8 import linear_int8
from antiphon.kernels.op import KernelUnavailable
from antiphon.kernels.stream import InterpretedStream
from antiphon.kernels.triton import linear_int8 as int8_kernels
from antiphon.kernels.upload import upload_to
from antiphon.layers.methods import GroupedCodeWeights
from antiphon.layers.moe import MixtureOfExperts, MoeSpec
from antiphon.model_card.card import read_card
from antiphon.model_card.files import find_files
from antiphon.model_worker.batching.plan import DeviceLost, StepPlan
from antiphon.model_worker.cache.groups import HOLE
from antiphon.model_worker.runner import prefill_graphs
from antiphon.model_worker.runner.device_pages import DevicePages, PageStream
from antiphon.model_worker.runner.device_runner import DeviceRunner
from antiphon.model_worker.runner.draft_model import DraftHeadModel, DraftModel
from antiphon.model_worker.runner.opening import OpenModel
from antiphon.model_worker.runner.pools import cache_groups
from antiphon.model_worker.startup.host_device import host_device
from antiphon.model_worker.startup.loading import load_resolved
from antiphon.resolve.resolved_config import resolve
from antiphon.wire.sampling import SamplingParams, TokenOutputParams

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from types import ModuleType

    from antiphon.model_worker.batching.plan import PlanRunner
    from antiphon.model_worker.batching.state import CoreTotals, RequestState
    from antiphon.model_worker.model.load import LoadedModel
    from antiphon.wire.media import Medium

OUTPUTS = (5, 3, 5, 3)
"""Tokens of each request: steps get shorter."""
CAPTURED = (2, 3, 5)
PREFILLS = (6, 24)
CPU = torch.device("cpu")
STAND_IN = Path(__file__).parents[1] / "stand_in"
BAD = 0
"""A token that no prompt has."""


@pytest.fixture(autouse=True)
def _nan_in_padding() -> Iterator[None]:
    """Of which numpy warns, and a GPU does not."""
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def opened(
    folder: Path,
    device: str,
    dtype: str = "float32",
    cache_dtype: str = "auto",
    *,
    attention: str | None = None,
) -> OpenModel:
    backends = () if attention is None else (f"attention.paged:{attention}",)
    given: dict[str, Any] = {"dtype": dtype, "cache_dtype": cache_dtype, "backends": backends}
    return open_model(folder, pages=100, device=device, **given)


def requests(vocabulary: int, count: int) -> list[RequestState]:
    """Greedy, drawn at random with all filters, penalised and biased, with logprobs."""
    random = np.random.default_rng(5)
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.01, "seed": 3},
        {"temperature": 1.2, "seed": 4},
        {
            "temperature": 0.0,
            "frequency_penalty": 0.7,
            "repetition_penalty": 1.3,
            "presence_penalty": 0.2,
            "logit_bias": bias({7: 3.0, 11: -2.0}),
            "details": TokenOutputParams(logprobs=True, top=2, named_ids=(5,), prompt_start=2),
        },
    ]
    return [
        state(
            random.integers(1, vocabulary, 3 + 9 * number).tolist(),
            sampling=SamplingParams(max_new_tokens=OUTPUTS[number], **way),
        )
        for number, way in enumerate(ways[:count])
    ]


def outputs_of(
    model: OpenModel, runner: PlanRunner | None = None, *, overlap: bool, count: int
) -> list[Any]:
    asked = requests(model.spec.vocabulary, count)
    loop = ModelLoop(model, runner, overlap=overlap, chunk_tokens=20)
    ran = loop.run(asked)
    assert bool(loop.futures) == overlap
    assert [len(output.ids) for output in ran] == list(OUTPUTS[:count])
    return [(output.ids, [token.logprob for token in output.tokens]) for output in ran]


def replaying(
    folder: Path,
    model: OpenModel,
    captured: tuple[int, ...] = CAPTURED,
    attention: str | None = None,
    cache_dtype: str = "auto",
) -> DeviceRunner:
    """A runner that replays decode steps, on a device that computes as late as it may."""
    loaded = load(folder, dtype="float32", device="interpreter", cache_dtype=cache_dtype)
    forced = {} if attention is None else {"attention.paged": attention}
    runner = DeviceRunner(loaded, model.groups, DrawnStream(), forced=forced, slots=SLOTS)
    for pool in runner.pools:
        for layer in range(len(pool.group.layers)):
            for pages in pool.layer(layer):
                pages[-1] = torch.nan  # which only rows of padding read
    assert runner.capture((*CAPTURED, 999)).sizes == captured
    assert runner.capture_prefills(PREFILLS).sizes == PREFILLS
    return runner


@contextmanager
def padded_absurdly(model: OpenModel) -> Generator[None]:
    """Tokens of padding of a captured prefill are what they never are, and change nothing."""
    routed = any(isinstance(layer.feed_forward, MoeSpec) for layer in model.spec.layers)
    value = "7" if routed else "torch.nan if values.is_floating_point() else 700"
    absurd = Edit(
        "padding is absurd",
        prefill_graphs,
        "values[tokens:].zero_()",
        f"values[tokens:].fill_({value})",
    )
    with absurd.applied():
        yield


def check_device(
    folder: Path,
    overlaps: Sequence[bool] = (True,),
    count: int = 2,
    captured: tuple[int, ...] = CAPTURED,
    attention: str | None = None,
    cache_dtype: str = "auto",
    rounding: float = 1e-4,
) -> None:
    """Ids are those of the CPU, and so are logprobs within `rounding`."""
    kept = {"dtype": "float32", "cache_dtype": cache_dtype}
    expected = outputs_of(opened(folder, "cpu", **kept), overlap=False, count=count)
    for overlap in overlaps:
        model, runner = opened(folder, "interpreter", **kept, attention=attention), None
        chosen = {choice.op: choice.backend for choice in model.runner.choices}
        assert (chosen["attention.paged"], chosen["norm.rmsnorm"]) == (
            attention or "triton",
            "triton",
        )
        if overlap:
            runner = replaying(folder, model, captured, attention, cache_dtype)
        with padded_absurdly(model):
            got = outputs_of(model, runner, overlap=overlap, count=count)
        for (ids, logprobs), (expected_ids, expected_logprobs) in zip(got, expected, strict=True):
            assert ids == expected_ids
            assert logprobs == pytest.approx(expected_logprobs, abs=rounding)


def test_llama_generates_what_it_does_on_the_cpu(tmp_path: Path) -> None:
    check_device(write_llama(tmp_path, {"num_hidden_layers": 2}), (False, True), count=4)


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3", "mixtral", "gemma2", "gpt-oss", "deepseek-v3"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("gemma3n", "gemma4")),
    ],
)
def test_other_families_generate_what_they_do_on_the_cpu(family: str, tmp_path: Path) -> None:
    check_device(save(BY_NAME[family], tmp_path).folder)


@pytest.mark.long
def test_latents_of_8_bits_generate_what_they_do_on_the_cpu(tmp_path: Path) -> None:
    """With scales of the checkpoint, by graphs and without; a code may be off by a step."""
    folder = save(BY_NAME["deepseek-v3"], tmp_path).folder
    layers = range(read_card(find_files(folder)).layers)
    scales = {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor(0.03) for layer in layers}
    change_tensors(folder, lambda tensors: tensors | scales)
    check_device(folder, (False, True), count=4, cache_dtype="fp8_e4m3", rounding=0.02)


@pytest.mark.parametrize("family", ["qwen3-next", "falcon-h1"])
def test_models_with_states_generate_what_they_do_on_the_cpu(family: str, tmp_path: Path) -> None:
    """Decodes, too, are captured in pieces."""
    check_device(save(BY_NAME[family], tmp_path).folder, captured=())


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands for FlashInfer is found."""
    monkeypatch.syspath_prepend(STAND_IN)


@pytest.mark.usefixtures("flashinfer")
def test_flashinfer_generates_what_the_cpu_does(tmp_path: Path) -> None:
    check_device(write_llama(tmp_path, {"num_hidden_layers": 1}), attention="flashinfer")


@pytest.mark.long
@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gpt-oss"])
def test_flashinfer_has_windows_soft_caps_and_sinks(family: str, tmp_path: Path) -> None:
    folder = save(BY_NAME[family], tmp_path).folder
    check_device(folder, (False, True), count=4, attention="flashinfer")


@pytest.mark.long
@pytest.mark.usefixtures("flashinfer")
@pytest.mark.parametrize("family", ["deepseek-v2", "deepseek-v3 with halves rotated"])
def test_flashinfer_attends_to_latents(family: str, tmp_path: Path) -> None:
    """In turn, and with graphs, which have a wrapper each."""
    folder = save(BY_NAME[family], tmp_path).folder
    check_device(folder, (False, True), count=4, attention="flashinfer")


@pytest.mark.usefixtures("flashinfer")
def test_flashinfer_is_refused_for_a_model_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(BY_NAME["deepseek-v3"], tmp_path).folder
    modules = importlib.import_module("flashinfer.jit")
    monkeypatch.setattr(modules, "MISSING_LATENTS", {("fa2", 16, 8)})
    reason = (
        r"attention\.paged: backend 'flashinfer' cannot run here: its module fa2 of latents of 16 "
        "numbers and 8 rotated ones in float32: it is not built ahead of time"
    )
    with pytest.raises(KernelUnavailable, match=reason):
        opened(folder, "interpreter", attention="flashinfer")


PLANNING_MUTANTS = [
    ("weakref.finalize(self, free.append, wrapper)", "free.append(wrapper)"),
    ("rows.planners.append(self._plan_again)", "pass"),
    (
        "_decode_wrapper(self._params.device, self._memory)",
        "_decode_wrapper(self._params.device, [each.clone() for each in self._memory])",
    ),
    (
        "int_workspace_buffer=_plan_memory(self._params)",
        "int_workspace_buffer=torch.zeros(PLAN_BYTES, dtype=torch.uint8)",
    ),
]


LATENT_PLANNING_MUTANTS = [
    (
        "_plan_rows(self.wrapper, params, rows)\n        rows.planners.append(self._plan_again)",
        "_plan_rows(self.wrapper, params, rows)",
    ),
    (
        "_plan_rows(self.wrapper, self._params, rows)",
        "_plan_rows(_wrapper(self._params), self._params, rows)",
    ),
    ("on_host(pages.pages, device)", "rows.upload(pages.pages)"),
]


def found_in_graphs(
    folder: Path, mutants: Sequence[tuple[str, str]], *modules: ModuleType
) -> list[str]:
    """Which edits of FlashInfer's modules change what a model generates, beside none at all."""
    expected = outputs_of(opened(folder, "cpu"), overlap=False, count=2)
    model, found = opened(folder, "interpreter"), list[str]()
    nothing = "from __future__ import annotations\n\nimport weakref\n"
    for old, new in ((nothing, nothing), *mutants):
        with pytest.MonkeyPatch.context() as patch:
            edited(old, new, *modules, attention, patch=patch)
            try:
                runner = replaying(folder, model, attention="flashinfer")
                got = outputs_of(model, runner, overlap=True, count=2)
            except (AssertionError, IndexError):
                found.append(old)
                continue
            if [ids for ids, _ in got] != [ids for ids, _ in expected]:
                found.append(old)
    return found


@pytest.mark.long
@pytest.mark.usefixtures("flashinfer")
def test_plans_that_are_old_or_not_copied_yet_are_found(tmp_path: Path) -> None:
    folder = write_llama(tmp_path, {"num_hidden_layers": 1})
    found = found_in_graphs(folder, PLANNING_MUTANTS, plans)
    assert found == [old for old, _ in PLANNING_MUTANTS]


@pytest.mark.long
@pytest.mark.usefixtures("flashinfer")
def test_plans_of_latents_that_are_old_or_read_too_early_are_found(tmp_path: Path) -> None:
    folder = save(BY_NAME["deepseek-v3"], tmp_path).folder
    found = found_in_graphs(folder, LATENT_PLANNING_MUTANTS, plans, latents)
    assert found == [old for old, _ in LATENT_PLANNING_MUTANTS]


def test_drafts_are_verified_on_a_device(tmp_path: Path) -> None:
    """Whatever they are, the texts are those without drafts."""
    folder = write_llama(tmp_path, {"num_hidden_layers": 2})
    model = opened(folder, "cpu")
    asked = requests(model.spec.vocabulary, 4)
    expected = ModelLoop(model, chunk_tokens=20).run(asked)
    model = opened(folder, "interpreter")
    drafter = often_wrong(texts_of(asked, expected))
    runner = replaying(folder, model)
    loop = ModelLoop(model, runner, overlap=True, drafter=drafter, chunk_tokens=20)
    for got, wanted in zip(loop.run(asked), expected, strict=True):
        compare(got, wanted, rounding=1e-4)
    plans = [record.plan for record in loop.loop.recorder.records()]
    assert any(len(plan.logit_tokens) > len(plan.slot) for plan in plans)


def check_drafts(
    folder: Path, draft: Callable[[LoadedModel, list[int]], DraftModel], count: int
) -> CoreTotals:
    """With drafts, as many as there may be, requests generate what they do without on the CPU.

    `draft` makes the draft model beside a served one whose first request has these tokens.
    """
    model = opened(folder, "cpu")
    asked = requests(model.spec.vocabulary, count)
    expected = ModelLoop(model, chunk_tokens=20).run(asked)
    loaded = load(folder, dtype="float32", device="interpreter")
    drafts = draft(loaded, expected[0].ids)
    groups = (*cache_groups(loaded.spec, loaded.build, page_tokens=4, pages=100), drafts.group)
    runner = DeviceRunner(loaded, groups, DrawnStream(), slots=SLOTS, draft=drafts)
    assert runner.capture(CAPTURED).sizes == (() if drafts.aux_layers else CAPTURED)
    loop = ModelLoop(OpenModel(runner, groups, loaded.spec, draft=drafts), chunk_tokens=20)
    for got, wanted in zip(loop.run(asked), expected, strict=True):
        compare(got, wanted, rounding=1e-4)
    return loop.core.totals()


def test_a_draft_model_drafts_on_a_device(tmp_path: Path) -> None:
    """The model itself, which is right about all that is greedy."""
    folder = write_llama(tmp_path, {"num_hidden_layers": 1})

    def itself(loaded: LoadedModel, _: list[int]) -> DraftModel:
        return DraftModel(loaded, page_tokens=4, pages=100)

    assert check_drafts(folder, itself, 2).drafts_accepted > 0


@pytest.mark.long
def test_a_draft_head_drafts_on_a_device(tmp_path: Path) -> None:
    """It drafts one token, which is right once."""

    def beside(loaded: LoadedModel, ids: list[int]) -> DraftModel:
        head = write_head(tmp_path / "head", token_ids=torch.tensor(ids[1:2]))
        own = load(head, dtype="float32", device="interpreter")
        return DraftHeadModel(own, loaded, page_tokens=4, pages=100)

    totals = check_drafts(write_llama(tmp_path / "model"), beside, 4)
    assert 0 < totals.drafts_accepted < totals.drafts_proposed


def test_chunks_of_prompts_have_logprobs_of_their_own(tmp_path: Path) -> None:
    """The next chunk is launched before those of one are read."""
    folder = write_llama(tmp_path, {"num_hidden_layers": 1})
    found: list[list[float | None]] = []
    for device in ("cpu", "interpreter"):
        model = opened(folder, device)
        runner = replaying(folder, model) if device == "interpreter" else None
        loop = ModelLoop(model, runner, overlap=runner is not None, chunk_tokens=6)
        details = TokenOutputParams(logprobs=True, prompt_start=0)
        asked = state(list(range(3, 20)), max_new_tokens=2, temperature=0.0, details=details)
        found.append([token.logprob for token in loop.run([asked])[0].tokens])
    assert len(found[0]) > 17
    assert found[1] == pytest.approx(found[0], abs=1e-4)


LENGTHS = (3, 21, 10)
"""Of prompts that are pooled: one of them in chunks."""


def check_pooled(folder: Path, vocabulary: int, failing: Sequence[int] = ()) -> None:
    """Prompts are pooled as on the CPU, chunk by chunk, while the next step is launched.

    `failing` is a prompt that fails alone.
    """
    given: dict[str, Any] = {"chunk": 16, "pages": 64, "linear": "plain"}
    random = np.random.default_rng(4)
    asked = [random.integers(1, vocabulary, length).tolist() for length in LENGTHS]
    expected = PoolingEngine(folder, **given).vectors_of(asked)
    engine = PoolingEngine(folder, **given, device="interpreter", overlap=True)
    assert isinstance(engine.model.runner, DeviceRunner)
    assert engine.model.runner.capture_prefills(PREFILLS).sizes == PREFILLS
    got = engine.vectors_of([failing, *asked] if failing else asked)
    assert [*engine.errors] == ([0] if failing else [])
    assert len(got) == len(expected)
    for vector, wanted in zip(got, expected, strict=True):
        assert vector == pytest.approx(wanted, abs=1e-4 * float(np.abs(wanted).max()))


@pytest.mark.parametrize(
    "mode", ["last", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("cls", "mean"))]
)
def test_prompts_are_pooled_on_a_device(mode: str, tmp_path: Path) -> None:
    """And one that is not finite fails alone."""
    source, folder = tmp_path / "source", tmp_path / "model"
    source.mkdir()
    folder.mkdir()
    write_llama(source, {"num_hidden_layers": 1, "tie_word_embeddings": False})
    check_pooled(sentence(with_nan(source, folder, BAD), mode), VOCABULARY, [3, BAD, 4])


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        *("Gemma2ForSequenceClassification", "Qwen3ForRewardModel", "Gemma3TextModel"),
        *("BertForSequenceClassification", "ModernBertModel"),
    ],
)
def test_texts_are_scored_on_a_device(name: str, tmp_path: Path) -> None:
    check_pooled(save(BY_NAME[name], tmp_path).folder, families.VOCABULARY)


def in_a_line(image: Medium) -> Medium:
    """Its tokens have positions as those of text."""
    return msgspec.structs.replace(image, span=msgspec.structs.replace(image.span, columns=0))


@pytest.mark.parametrize("deepstack", [0, pytest.param(1, marks=pytest.mark.long)])
def test_embeddings_of_images_enter_captured_layers(
    deepstack: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but those with parts that are added behind layers."""
    folder, replayed = write_llama(tmp_path, {"num_hidden_layers": 1}), list[StepPlan]()
    run_layers = prefill_graphs.PrefillGraphs.run_layers

    def seen(graphs: prefill_graphs.PrefillGraphs, plan: StepPlan, *rest: Any) -> Any:
        replayed.append(plan)
        return run_layers(graphs, plan, *rest)

    monkeypatch.setattr(prefill_graphs.PrefillGraphs, "run_layers", seen)
    prompt, found = [3] * 4 + [9] * 8 + [4] * 5, list[list[list[int]]]()
    images = [in_a_line(medium(4, 2, 4, content)) for content in (1, 2)]
    for device in ("cpu", "interpreter"):
        model = opened(folder, device)
        on_device = device == "interpreter"
        runner = replaying(folder, model) if on_device else None
        sees: dict[str, Any] = {"deepstack": deepstack, "media_grids": False, "chunk_tokens": 9}
        loop = SeeingLoop(model, runner=runner, overlap=on_device, **sees)
        asked = [
            state(prompt, max_new_tokens=3, temperature=0.0, media=(image,)) for image in images
        ]
        found.append([output.ids for output in loop.run(asked)])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]
    assert replayed
    assert any(plan.spliced is not None for plan in replayed) == (deepstack == 0)


def test_a_row_that_is_not_finite_fails_alone(tmp_path: Path) -> None:
    """The step after it was launched before that was known."""
    source, folder = tmp_path / "source", tmp_path / "model"
    source.mkdir()
    folder.mkdir()
    write_llama(source, {"num_hidden_layers": 1, "tie_word_embeddings": False})
    with_nan(source, folder, BAD)
    model = opened(folder, "interpreter")
    runner = replaying(folder, model)
    good = requests(model.spec.vocabulary, 2)
    bad = state([3, BAD, 4], sampling=SamplingParams(max_new_tokens=3))
    loop = ModelLoop(model, runner, overlap=True, chunk_tokens=20)
    alone = loop.run(good)
    failed, *beside = loop.run([bad, *good])
    assert failed.finish.error is not None
    assert [output.ids for output in beside] == [output.ids for output in alone]
    # Its pages are used again, and a NaN would get through the mask of attention.
    assert not any(pages[:-1].isnan().any() for pages in runner.pools[0].layer(0))


def test_models_are_refused_by_the_op_that_has_no_kernel(tmp_path: Path) -> None:
    folder = write_llama(tmp_path, {"num_hidden_layers": 1})
    reason = r"interpreter: norm\.rmsnorm, which this model needs, has no kernel there"
    with pytest.raises(KernelUnavailable, match=reason):
        open_model(
            folder,
            pages=10,
            dtype="float32",
            device="interpreter",
            backends=("norm.rmsnorm:torch",),
        )


def test_several_streams_are_refused_where_their_sums_depend_on_the_batch(tmp_path: Path) -> None:
    folder = save(BY_NAME["gemma3n"], tmp_path).folder
    reason = "device interpreter: sums of several residual streams and of sparse gates"
    with pytest.raises(KernelUnavailable, match=f"deterministic inference: {reason}"):
        open_model(
            folder,
            pages=10,
            dtype="float32",
            device="interpreter",
            linear="tiled",
            deterministic=True,
        )


class LostStream(InterpretedStream):
    """A device that every call finds lost."""

    @contextmanager
    def launching(self) -> Generator[None]:
        raise torch.AcceleratorError("an illegal memory access was encountered")
        yield

    reading = launching


def test_a_device_that_is_lost_is_lost_for_the_loop_too(tmp_path: Path) -> None:
    folder = write_llama(tmp_path)
    model = opened(folder, "interpreter")
    loaded = load(folder, dtype="float32", device="interpreter")
    runner = DeviceRunner(loaded, model.groups, LostStream())
    with pytest.raises(DeviceLost, match="an illegal memory access was encountered"):
        runner.run(decode_plan(1, 1, 5))


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"cache_dtype": "fp8_e4m3"}], ids=str)
def test_models_run_in_narrow_floats(changes: dict[str, str], tmp_path: Path) -> None:
    """Kernels of the CPU round elsewhere: the likeliest tokens agree where they are far ahead."""
    folder = write_llama(tmp_path, {"num_hidden_layers": 2})
    expected, got = (
        outputs_of(opened(folder, device, **changes), overlap=False, count=1)
        for device in ("cpu", "interpreter")
    )
    assert [ids for ids, _ in got] == [ids for ids, _ in expected]


NARROW = {
    **SHAPE,
    "num_hidden_layers": 1,
    "hidden_size": 160,
    "intermediate_size": 136,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
"""A block of 128 inputs, and a part of one."""


def check_fp8(folder: Path, said: str | None) -> None:
    """On the CPU torch multiplies what the kernels do here, as the settings decide."""
    on_cpu = open_model(folder, pages=100, dtype="float32", quantization=said, quantized="fp8")
    files, environ = find_files(folder), {"ANTIPHON_MODEL__DEVICE": "interpreter"}
    if said is not None:
        environ["ANTIPHON_MODEL__QUANTIZATION"] = said
    settings = settings_of(environ=environ | {"ANTIPHON_CACHE__BYTES_MAX": "1000000"}).settings
    model = load_resolved(files, resolve(settings, read_card(files), host_device("interpreter")))
    assert {c.backend for c in model.runner.choices if c.op == "linear.fp8"} == {"triton"}
    (expected,), (got,) = (outputs_of(each, overlap=False, count=1) for each in (on_cpu, model))
    assert got[0] == expected[0]
    assert got[1] == pytest.approx(expected[1], abs=1e-4)


@pytest.mark.parametrize("name", ["fp8 block", pytest.param("fp8 online", marks=pytest.mark.long)])
def test_weights_stay_in_fp8(name: str, tmp_path: Path) -> None:
    row = QUANTIZED[name]
    folder, _ = write(tmp_path, row, NARROW)
    check_fp8(folder, row.said)


@pytest.mark.parametrize("family", ["mixtral", pytest.param("gpt-oss", marks=pytest.mark.long)])
def test_experts_stay_in_fp8(family: str, tmp_path: Path) -> None:
    row = BY_NAME[family]
    saved = save(replace(row, fields={**row.fields, "num_hidden_layers": 1}), tmp_path)
    check_fp8(saved.folder, "fp8")


GROUPED = {**SHAPE, "num_hidden_layers": 1}
INT8: dict[str, Any] = {
    "pages": 100,
    "dtype": "float32",
    "device": "interpreter",
    "quantized": "int8_dynamic",
}
BLOCKS = {**GROUPED, "intermediate_size": 256}
"""Whole blocks of 256."""


def check_grouped(
    folder: Path,
    op: str,
    expected: Any,
    deterministic: str = "false",
    kept: str = "grouped",
) -> OpenModel:
    files, environ = find_files(folder), {"ANTIPHON_MODEL__DEVICE": "interpreter"}
    environ["ANTIPHON_MODEL__DETERMINISTIC"] = deterministic
    settings = settings_of(environ=environ | {"ANTIPHON_CACHE__BYTES_MAX": "1000000"}).settings
    plan = resolve(settings, read_card(files), host_device("interpreter"))
    assert plan.quantized.value == kept
    model = load_resolved(files, plan)
    assert {choice.backend for choice in model.runner.choices if choice.op == op} == {"triton"}
    (got,) = outputs_of(model, overlap=False, count=1)
    assert got[0] == expected[0]
    assert got[1] == pytest.approx(expected[1], abs=1e-4)
    return model


@pytest.mark.parametrize("name", ["awq", pytest.param("mxfp4", marks=pytest.mark.long)])
def test_weights_stay_in_groups(name: str, tmp_path: Path) -> None:
    """They make the tokens of a checkpoint of the same numbers on the CPU."""
    folder, plain = write(tmp_path, QUANTIZED[name], GROUPED)
    on_cpu = open_model(plain, pages=100, dtype="float32")
    (expected,) = outputs_of(on_cpu, overlap=False, count=1)
    check_grouped(folder, "linear.grouped", expected)


@pytest.mark.long
def test_int8_weights_meet_int8_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They make the tokens that torch makes by the operation's definition."""
    folder, _ = write(tmp_path, QUANTIZED["w8a8_int8"], GROUPED)
    with monkeypatch.context() as patch:
        patch.setattr(int8_kernels, "linear_int8", linear_int8.reference)
        by_torch = open_model(folder, **INT8)
    (expected,) = outputs_of(by_torch, overlap=False, count=1)
    check_grouped(folder, "linear.int8", expected, kept="int8_dynamic")


@pytest.mark.parametrize("kind", ["Q6_K", pytest.param("Q4_K", marks=pytest.mark.long)])
def test_blocks_of_a_gguf_file_stay_in_groups(kind: str, tmp_path: Path) -> None:
    folder, file = write_llama(tmp_path, BLOCKS), tmp_path / "model.gguf"
    write_gguf(folder, file, kind=Kind[kind], quantize=MADE[Kind[kind]])
    on_cpu = open_model(find_files(file), pages=100, dtype="float32", linear="plain")
    (expected,) = outputs_of(on_cpu, overlap=False, count=1)
    model = check_grouped(file, "linear.grouped", expected, deterministic="true")
    (layer,) = model.runner._model.own_decoder.layers
    linears = (each for part in layer.children if part is not None for each in part.children)
    weights = (getattr(linear, "_weights", None) for linear in linears)
    kept = [each.matrix for each in weights if isinstance(each, GroupedCodeWeights)]
    found = sum(len(matrix.codes) * matrix.inputs for matrix in kept)
    assert found == read_card(find_files(file)).weights.gpu_grouped


def test_experts_stay_in_groups(tmp_path: Path) -> None:
    """As those of every published gpt-oss."""
    row = BY_NAME["gpt-oss"]
    folder = save(replace(row, fields={**row.fields, "num_hidden_layers": 1}), tmp_path).folder
    stored, plain = in_mxfp4(folder)
    rewrite(folder, plain, None)
    (expected,) = outputs_of(opened(folder, "cpu"), overlap=False, count=1)
    rewrite(folder, stored, MXFP4)
    model = check_grouped(folder, "moe.experts", expected)
    (layer,) = model.runner._model.own_decoder.layers
    block = layer._feed_forward
    assert isinstance(block, MixtureOfExperts)
    stack = block._experts._stack
    assert stack is not None
    assert [matrix[0].dtype for matrix in stack] == [torch.uint8] * 2


def test_experts_in_nvfp4_stay_so(tmp_path: Path) -> None:
    """With linears that have scales of their own, they make the CPU's tokens."""
    row = BY_NAME["mixtral"]
    folder = save(replace(row, fields={**row.fields, "num_hidden_layers": 1}), tmp_path).folder
    stored, quantization = in_nvfp4(folder)
    (expected,) = outputs_of(opened(folder, "cpu"), overlap=False, count=1)
    rewrite(folder, stored, quantization)
    model = check_grouped(folder, "moe.experts", expected)
    (layer,) = model.runner._model.own_decoder.layers
    block = layer._feed_forward
    assert isinstance(block, MixtureOfExperts)
    stack = block._experts._stack
    assert stack is not None
    for matrix in stack:
        assert isinstance(matrix, GroupedMatrix)
        assert (matrix.codes.dtype, matrix.scales.dtype) == (torch.uint8, torch.float8_e4m3fn)


def test_kernels_that_copy_pages_are_compiled_before_the_first_request(tmp_path: Path) -> None:
    loaded = load(write_llama(tmp_path), dtype="float32", device="interpreter")
    groups = cache_groups(loaded.spec, loaded.build, page_tokens=16, pages=2)
    device = DrawnDevice()
    runner = DeviceRunner(loaded, groups, InterpretedStream(device.queue()))
    assert not device.played
    assert len(runner.page_memories()) == len(groups)
    assert device.played == 2 * len(groups)


def test_pages_are_copied_beside_steps(tmp_path: Path) -> None:
    """On the slowest device: nothing is copied that is not waited for."""
    model = opened(write_llama(tmp_path, {"num_hidden_layers": 2}), "interpreter")
    outputs_of(model, overlap=False, count=2)
    (pool,) = model.runner.pools
    copies = PageStream(DrawnStream().beside(), model.runner.ops, upload_to("interpreter", CPU))
    ours, page_bytes = DevicePages(pool.memory, copies), pool.group.page_bytes
    numbers = [3, 0, 1]
    got, expected = (memoryview(bytearray(3 * page_bytes)) for _ in range(2))
    ours.read(numbers, got)
    pool.memory.read(numbers, expected)
    assert got == expected
    assert any(expected)
    ours.write([7, HOLE, 5], got)
    pool.memory.read([7, 0, 5], got)
    assert got == expected
