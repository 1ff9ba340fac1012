"""Attention by FlashInfer, on what stands for it; a long test compares that with FlashInfer."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import subprocess
import sys
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.kernels.edits import edited
from tests.kernels.interpreted.checks import (
    LONG,
    RAGGED,
    Rows,
    a_shape,
    check_attention,
    check_planned_latents,
)

from antiphon.kernels.attention import AttentionMetadata, paged_attention
from antiphon.kernels.flashinfer import attention, backend, latents, plans
from antiphon.kernels.kv import UNSCALED
from antiphon.kernels.op import AttentionFeatures, DeviceCapability, KernelUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

    from antiphon.kernels.attention import KvShape

STAND_IN = Path(__file__).parent / "stand_in"
DECODE = [1, 1, 1, 1], [0, 130, 3, 63]
PREFILL = [5, 70, 2], [0, 40, 130]
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It is found, and memory that is not written is NaN."""
    monkeypatch.syspath_prepend(STAND_IN)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("lengths", [DECODE, PREFILL, RAGGED, LONG, ([1], [0]), ([3], [0])])
@pytest.mark.parametrize("window", [None, 1, 20])
def test_attention_equals_its_reference(
    window: int | None, lengths: tuple[list[int], list[int]]
) -> None:
    check_attention(attention, a_shape(window=window), lengths)


@pytest.mark.parametrize("lengths", [DECODE, PREFILL])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_attention_is_the_same_in_16_bits_and_over_a_cache_of_8(
    dtype: torch.dtype, lengths: tuple[list[int], list[int]]
) -> None:
    check_attention(attention, a_shape(dtype=dtype), lengths)
    check_attention(attention, a_shape(dtype=dtype), lengths, cache=E4M3)


@pytest.mark.parametrize("lengths", [DECODE, PREFILL])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_has_soft_caps_and_sinks(
    softcap: float | None, lengths: tuple[list[int], list[int]]
) -> None:
    check_attention(attention, a_shape(window=20), lengths, softcap, sinks=True)


@pytest.mark.parametrize("seed", range(6))
def test_attention_of_any_rows_equals_its_reference(seed: int) -> None:
    """Of any number and lengths, with pages of any size in any order."""
    random = np.random.default_rng(seed)
    rows = int(random.integers(1, 9))
    queries = random.integers(1, 9, rows) if seed % 2 else np.ones(rows, np.int64)
    shape = a_shape(
        heads=int(random.integers(1, 4)),
        group=int(random.integers(1, 6)),
        size=8 * int(random.integers(1, 5)),
        page_tokens=int(random.integers(1, 18)),
        window=(None, 1, 7, 64)[random.integers(4)],
    )
    lengths = queries.tolist(), random.integers(0, 60, rows).tolist()
    check_attention(attention, shape, lengths, (None, 3.0)[random.integers(2)], sinks=seed > 2)


def test_a_pass_without_tokens_is_empty() -> None:
    case, none = Rows([1], [0], a_shape()), np.zeros(0, np.int32)
    rows = AttentionMetadata(case.rows.shape, none[:, None], none, none)
    out = attention.paged_attention(case.q[:0], case.keys, case.values, rows, 1.0)
    assert out.shape == (0, 6, 24)


def test_a_row_without_a_page_is_refused() -> None:
    case = Rows([1, 1], [3, 30], a_shape())
    case.rows.page_table[1, 2] = -1
    with pytest.raises(RuntimeError, match="a row reads or writes a token that has no page"):
        attention.paged_attention(case.q, case.keys, case.values, case.rows, 1.0)


def test_layers_that_attend_alike_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a wrapper belongs to its rows until these are dropped."""
    made: list[object] = []
    make = attention._decode_wrapper
    monkeypatch.setattr(attention, "_decode_wrapper", lambda *given: made.append(0) or make(*given))
    plans.free_wrappers(torch.device("cpu"), None).clear()

    def attend(case: Rows, *beside: Any) -> None:
        arguments = case.q, case.keys, case.values, case.rows, case.scale
        attention.paged_attention(*arguments, *beside)

    one, another = (Rows(*DECODE, a_shape()) for _ in range(2))
    attend(one)
    attend(one)
    assert len(made) == 1
    attend(another)
    assert len(made) == 2
    attend(one, UNSCALED, 2.0)
    assert len(made) == 3
    del one, another
    for _ in range(3):
        attend(Rows(*DECODE, a_shape()))
    assert len(made) == 3


def test_captured_steps_of_all_sizes_read_one_memory() -> None:
    """They are planned one after the other, the largest first."""
    params = attention.PlanParams(a_shape(), None, 1.0, torch.float32, torch.device("cpu"))
    addresses: list[list[int]] = []
    for size in (4, 2):
        ones = np.ones(size, np.int32)
        rows = AttentionMetadata(params.shape, ones[:, None], ones, ones, pages_max=8)
        memory = attention._Captured(params, rows)._memory
        assert [len(each) for each in memory] == [size + 1, 8 * size, size]
        addresses.append([each.data_ptr() for each in memory])
    assert addresses[0] == addresses[1]


def test_latents_equal_their_reference() -> None:
    for lengths in (DECODE, PREFILL, RAGGED, LONG, ([1], [0]), ([3], [0])):
        check_planned_latents(latents, lengths=lengths)
    for dtype in (torch.float16, torch.bfloat16):
        check_planned_latents(latents, 4, (512, 64), PREFILL, dtype, page_tokens=16)


@pytest.mark.parametrize("seed", range(4))
def test_latents_of_any_rows_equal_their_reference(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = int(random.integers(1, 9))
    queries = random.integers(1, 9, rows) if seed % 2 else np.ones(rows, np.int64)
    check_planned_latents(
        latents,
        2 ** int(random.integers(5)),
        (8 * int(random.integers(1, 5)), int(random.integers(1, 9))),
        (queries.tolist(), random.integers(0, 60, rows).tolist()),
        page_tokens=int(random.integers(1, 18)),
    )


def check_parts(module: ModuleType) -> None:
    """A plan has room for four tokens: rows are cut, and parts have pieces of several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PLAN_QUERIES", 9)
        for lengths in (([5, 14, 2], [0, 40, 130]), ([1] * 9, [7] * 9)):
            check_planned_latents(module, lengths=lengths)


def test_a_pass_that_has_no_room_in_a_plan_has_several(monkeypatch: pytest.MonkeyPatch) -> None:
    check_parts(latents)
    monkeypatch.setattr(latents, "PLAN_QUERIES", 9)
    first, second, third, *_ = latents._parts(Rows(*PREFILL, a_latent_shape()).rows)
    for (tokens, part), start, lengths in (
        (first, 0, [4]),
        (second, 4, [1, 3]),
        (third, 8, [4]),
    ):
        assert (tokens.start, part.query_len.tolist()) == (start, lengths)


def a_latent_shape() -> KvShape:
    return replace(a_shape(heads=1, group=2), latent=20)


def test_latents_without_tokens_or_pages() -> None:
    case, none = Rows([1, 1], [3, 30], a_latent_shape()), np.zeros(0, np.int32)
    rows = AttentionMetadata(case.rows.shape, none[:, None], none, none)
    assert latents.latent_attention(case.q[:0], case.keys, rows, 1.0).shape == (0, 2, 20)
    case.rows.page_table[1, 2] = -1
    with pytest.raises(RuntimeError, match="a row reads or writes a token that has no page"):
        latents.latent_attention(case.q, case.keys, case.rows, 1.0)


def test_layers_with_latents_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `attention.paged`, whose keys are its values; a wrapper belongs to its rows."""
    made: list[object] = []
    make = latents._wrapper
    monkeypatch.setattr(latents, "_wrapper", lambda *given: made.append(0) or make(*given))
    plans.free_wrappers.cache_clear()
    one, another = (Rows(*PREFILL, a_latent_shape()) for _ in range(2))
    for case, wrappers in ((one, 1), (one, 1), (another, 2)):
        attention.paged_attention(case.q, case.keys, case.keys, case.rows, case.scale)
        assert len(made) == wrappers
    del one, another, case
    for lengths in (DECODE, PREFILL, DECODE):
        case = Rows(*lengths, a_latent_shape())
        attention.paged_attention(case.q, case.keys, case.keys, case.rows, case.scale)
    assert len(made) == 2


def test_captured_steps_with_latents_read_pages_from_one_memory() -> None:
    """And each has a wrapper, which is planned again."""
    params = latents.LatentParams(a_latent_shape(), 1.0, torch.device("cpu"))
    addresses: list[int] = []
    for size in (4, 2):
        ones = np.ones(size, np.int32)
        rows = AttentionMetadata(params.shape, ones[:, None], ones, ones, pages_max=8)
        captured: Any = latents._CapturedLatents(params, rows).wrapper
        memory = captured._captured
        assert [len(each) for each in memory] == [size + 1, size + 1, 8 * size, size]
        addresses.append(memory[2].data_ptr())
        (plan_again,) = rows.planners
        plan_again(replace(rows, page_table=ones[:, None] * 5), rows)
        assert memory[2][:size].tolist() == [5] * size
    assert addresses[0] == addresses[1]


check = partial(check_attention, shape=a_shape())
windowed = partial(check_attention, shape=a_shape(window=20))
eight_bits = partial(check, cache=E4M3)
MUTANTS: list[tuple[str, str, Callable[..., None]]] = [
    ("else shape.window - 1", "else shape.window", windowed),
    ("(first + counts - 1) * size)", "(first + counts - 1) * size - 1)", check),
    ("(first + counts - 1) * size)", "(counts - 1) * size)", windowed),
    ("starts[:-1] - first, counts", "starts[:-1], counts", windowed),
    ("causal=True", "causal=False", partial(check, lengths=PREFILL)),
    ('"sm_scale": self.scale', '"sm_scale": 1.0', check),
    ('"logits_soft_cap": self.softcap', '"logits_soft_cap": None', partial(check, softcap=2.0)),
    ("k_scale=float(scales.key)", "k_scale=1.0", eight_bits),
    ("v_scale=float(scales.value)", "v_scale=1.0", eight_bits),
    ("made[1] * math.log(2)", "made[1]", partial(check, sinks=True)),
    ("mass - sinks.float()", "mass", partial(check, sinks=True)),
    ("keys[:, :, :size], values[:, :, :size]", "keys, values", check),
    (
        "row_starts(rows.query_len)",
        "row_starts(rows.query_len * 0 + 1)",
        partial(check, lengths=PREFILL),
    ),
    ("(rows.query_len == 1).all()", "(rows.query_len >= 1).all()", partial(check, lengths=PREFILL)),
]


@pytest.mark.parametrize(("old", "new", "compare"), MUTANTS, ids=lambda each: str(each)[:40])
def test_edits_are_found(
    old: str, new: str, compare: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = edited(old, new, plans, attention, patch=monkeypatch)
    compare(attention)
    with pytest.raises(AssertionError):
        compare(mutant)


prefilled = partial(check_planned_latents, lengths=([5, 14, 2], [0, 40, 130]))
LATENT_MUTANTS: list[tuple[str, str, Callable[..., None]]] = [
    ("causal=bool((rows.query_len > 1).any())", "causal=False", prefilled),
    ("sm_scale=params.scale", "sm_scale=1.0", prefilled),
    ("head_dim_ckv=shape.latent", "head_dim_ckv=shape.latent - 1", prefilled),
    ("rows.kv_len.copy()", "rows.kv_len - 1", prefilled),
    ("row_starts(rows.query_len)", "row_starts(rows.query_len * 0 + 1)", prefilled),
    ("pages[:, 0, : shape.page_tokens]", "pages[:, 0]", prefilled),
    ("(rows.kv_len - ends + last)[there]", "rows.kv_len[there]", check_parts),
    ("slice(first, first + most)", "slice(0, most)", check_parts),
    ("np.maximum(ends - rows.query_len, first)", "(ends - rows.query_len)", check_parts),
]


@pytest.mark.parametrize(
    ("old", "new", "compare"),
    LATENT_MUTANTS,
    ids=lambda each: getattr(each, "__name__", str(each))[:40],
)
def test_edits_of_latents_are_found(
    old: str, new: str, compare: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = edited(old, new, plans, latents, patch=monkeypatch)
    with pytest.raises(AssertionError):
        compare(mutant)


PLAIN = AttentionFeatures(128)
LATENT = AttentionFeatures(576, latent=512, heads=16)
GPU = partial(DeviceCapability, "cuda", torch.bfloat16)


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (DeviceCapability("cpu"), "it runs on CUDA only"),
        (DeviceCapability("cuda", torch.float32, 90), "it does not compute in float32"),
        (GPU(75), "its kernels are not written for sm_75"),
        (GPU(80, None, (LATENT,)), None),
        (
            GPU(90, E4M3, (LATENT,)),
            "its kernels of latent attention (MLA) are not built for a KV cache of 8 bits",
        ),
        (
            GPU(90, None, (replace(LATENT, heads=20),)),
            "its kernels of latent attention (MLA) take numbers of heads that divide 128, and not "
            "20",
        ),
        (
            GPU(90, None, (LATENT, AttentionFeatures(288, latent=256))),
            "its module fa3 of latents of 256 numbers and 32 rotated ones in bfloat16: it is not "
            "built ahead of time",
        ),
        (GPU(90, None, (PLAIN,)), None),
        (GPU(100, E4M3, (AttentionFeatures(64, window=True, softcap=True),)), None),
        (
            GPU(80, None, (PLAIN, AttentionFeatures(80))),
            "its module fa2 of 80 numbers a head in bfloat16: it is not built ahead of time",
        ),
        (
            GPU(90, None, (AttentionFeatures(96, window=True, softcap=True),)),
            "its module fa3 of 96 numbers a head in bfloat16, with a window, with a soft cap: it "
            "is not built ahead of time",
        ),
        (
            GPU(89, E4M3, (AttentionFeatures(80),)),
            "its module fa2 of 80 numbers a head in bfloat16, cached in float8_e4m3fn: it is not "
            "built ahead of time",
        ),
        (GPU(90, E4M3, (AttentionFeatures(96),)), None),
    ],
)
def test_a_device_or_a_model_is_refused_by_what_it_lacks(
    device: DeviceCapability, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = importlib.import_module("flashinfer.prefill")
    monkeypatch.setattr(modules, "MISSING", {("fa2", 80), ("fa3", 96)})
    latent_modules = importlib.import_module("flashinfer.jit")
    monkeypatch.setattr(latent_modules, "MISSING_LATENTS", {("fa3", 256, 32)})
    (row,) = (row for row in paged_attention.backends if row.name == "flashinfer")
    assert row.needs(device) == reason


def test_modules_are_loaded_when_backends_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of decodes and of prefills, each once."""
    monkeypatch.setattr(importlib.import_module("flashinfer.prefill"), "LOADED", loaded := [])
    features = PLAIN, AttentionFeatures(128, window=True)
    choice = paged_attention.select(GPU(90, None, features))
    assert (choice.backend, choice.call) == ("flashinfer", attention.paged_attention)
    beside = 128, 128, 0
    dtypes = torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32
    assert loaded == [
        (kernels, *dtypes, *beside, window, False, False, False)
        for window in (False, True)
        for kernels in ("fa2", "fa3")
    ]


def test_latents_have_one_module_for_prefills_and_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("flashinfer.jit"), "LOADED_LATENTS", loaded := [])
    for sm in (80, 90, 100):
        assert paged_attention.select(GPU(sm, None, (LATENT,))).backend == "flashinfer"
    dtypes = torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32
    assert loaded == [(kernels, *dtypes, 512, 64, False) for kernels in ("fa2", "fa3", "fa2")]


@pytest.mark.parametrize(
    ("package", "reason"),
    [
        ("flashinfer", "flashinfer-python is not installed"),
        ("flashinfer_jit_cache", "its modules are not built ahead of time"),
    ],
)
def test_triton_runs_where_flashinfer_or_its_modules_are_not_installed(
    package: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )
    gpu = GPU(90, None, (PLAIN,))
    choice = paged_attention.select(gpu)
    assert choice.backend == "triton"
    assert reason in dict(choice.refused)["flashinfer"]
    with pytest.raises(KernelUnavailable, match=f"backend 'flashinfer' cannot run here: {reason}"):
        paged_attention.select(gpu, "flashinfer")


def test_triton_runs_where_flashinfer_and_its_modules_are_of_two_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As FlashInfer raises it when it is imported."""
    reason = "flashinfer-jit-cache version (0.7.1) does not match flashinfer version (0.7.2)"
    import_module = importlib.import_module

    def refuse(name: str) -> ModuleType:
        if name.startswith("flashinfer"):
            raise RuntimeError(reason)
        return import_module(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    choice = paged_attention.select(GPU(90, None, (PLAIN,)))
    assert choice.backend == "triton"
    assert dict(choice.refused)["flashinfer"] == f"it cannot be imported: {reason}"


def test_deterministic_inference_leaves_flashinfer_out() -> None:
    gpu = GPU(90, None, (PLAIN,))
    choice = paged_attention.select(gpu, invariant=True)
    assert (choice.backend, choice.invariant) == ("triton", True)
    assert dict(choice.refused)["flashinfer"] == "its results depend on batch composition"
    assert not paged_attention.select(gpu, "flashinfer", invariant=True).invariant


LATENT_CLASS, METADATA = "BatchMLAPagedAttentionWrapper", "MLAPlanMetadata"
CLASSES = {
    "BatchDecodeWithPagedKVCacheWrapper": "decode.py",
    "BatchPrefillWithPagedKVCacheWrapper": "prefill.py",
    LATENT_CLASS: "mla/_batch_mla/_wrapper.py",
    METADATA: "mla/_batch_mla/_contracts.py",
}
METHODS = {"plan": "_plan_impl"}
"""Where a method takes any argument, the one that it calls with all of them."""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_call_binds_to_the_signature_of_the_pinned_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its source says, which is not run: its kernels take a GPU."""
    calls = recorded_calls(monkeypatch)
    sources = pinned_sources(tmp_path)
    for (name, method), every in calls.items():
        signature = signature_of(sources / CLASSES[name], name, method)
        for given in every:
            signature.bind(None, **given)
        with pytest.raises(TypeError):
            signature.bind(None, **every[0], window=1)
    assert {method for _, method in calls} == {"__init__", "plan", "run", "reset_workspace_buffer"}
    csr = signature_of(sources / CLASSES[METADATA], METADATA, "csr")
    for given in calls[LATENT_CLASS, "plan"]:
        csr.bind(None, **vars(given["metadata"]))
    modules = sources / "jit" / "attention" / "modules.py"
    for features, function in ((PLAIN, "get_batch_prefill_uri"), (LATENT, "gen_batch_mla_module")):
        named = backend.module_arguments(features, torch.bfloat16, torch.bfloat16)
        assert list(signature_of(modules, None, function).parameters) == ["backend", *named]
    loader = signature_of(sources / "prefill.py", None, "get_batch_prefill_module")
    assert str(loader) == "(backend, *args)"
    exported = imported_by(sources / "jit" / "__init__.py")
    assert {"MissingJITCacheError", "gen_batch_mla_module"} <= exported
    assert "from ._core import *" in (sources / "mla" / "__init__.py").read_text()
    assert {LATENT_CLASS, METADATA} <= imported_by(sources / "mla" / "_core.py")
    env = (sources / "jit" / "env.py").read_text()
    assert 'FLASHINFER_AOT_DIR: pathlib.Path = _package_root / "data" / "aot"' in env
    read = (sources / "jit" / "core.py").read_text()
    assert 'os.environ.get("FLASHINFER_DISABLE_JIT")' in read


def imported_by(path: Path) -> set[str]:
    """The names that a module has of others, for those that import it."""
    imports = (
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)
    )
    return {alias.asname or alias.name for node in imports for alias in node.names}


def recorded_calls(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """All calls of the cases here, of each method of the three wrappers."""
    stand_in = importlib.import_module("flashinfer")
    latent_wrapper = getattr(importlib.import_module("flashinfer.mla"), LATENT_CLASS)
    calls: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def record(name: str, method: str, kind: Any) -> None:
        real = getattr(kind, method)

        def call(self: Any, *unnamed: Any, **given: Any) -> Any:
            assert not unnamed, "each argument is named"
            calls.setdefault((name, method), []).append(given)
            return real(self, **given)

        monkeypatch.setattr(kind, method, call)

    for name in list(CLASSES)[:2]:
        for method in ("__init__", "plan", "run", "reset_workspace_buffer"):
            record(name, method, getattr(stand_in, name))
    for method in ("__init__", "plan", "run"):
        record(LATENT_CLASS, method, latent_wrapper)
    plans.free_wrappers.cache_clear()
    for lengths in (DECODE, PREFILL):
        check_attention(attention, a_shape(window=20), lengths, 2.0, sinks=True)
        check_planned_latents(latents, lengths=lengths)
    for case in (Rows(*DECODE, a_shape()), Rows(*DECODE, a_latent_shape())):
        captured = replace(case.rows, pages_max=40)
        values = case.values if case.rows.shape.latent is None else case.keys
        attention.paged_attention(case.q, case.keys, values, captured, case.scale)
        for plan in captured.planners:
            plan(captured, case.rows)
    return calls


def pinned_sources(folder: Path) -> Path:
    """The sources of the pinned package, unpacked."""
    project = Path(__file__).parents[2] / "pyproject.toml"
    (pinned,) = {
        word.strip('",') for word in project.read_text().split() if "flashinfer-python" in word
    }
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", pinned]
    subprocess.run([*command, "--dest", str(folder)], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if name.endswith(".py")]
        packed.extractall(folder, [name for name in names if name.startswith("flashinfer/")])
    return folder / "flashinfer"


def signature_of(path: Path, name: str | None, method: str) -> inspect.Signature:
    """The signature of a function, or of a method of the class, as its source has it."""
    body = ast.parse(path.read_text()).body
    if name is not None:
        (found,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
        body = found.body
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    last = functions[method]  # after its overloads
    if last.args.kwarg is not None:
        last = functions[METHODS[method]]
    last.body, last.decorator_list, last.returns = [ast.Pass()], [], None
    arguments = last.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    for argument in (arguments.vararg, arguments.kwarg):
        if argument is not None:
            argument.annotation = None
    none = ast.Constant(None)
    arguments.defaults = [none for _ in arguments.defaults]
    arguments.kw_defaults = [None if each is None else none for each in arguments.kw_defaults]
    module = ast.fix_missing_locations(ast.Module([last], []))
    space: dict[str, Any] = {}
    exec(compile(module, str(path), "exec"), space)
    return inspect.signature(space[last.name])
