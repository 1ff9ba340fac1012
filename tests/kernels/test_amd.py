"""The report of what compiles for AMD's GPUs, on which nothing is served."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

import msgspec
import pytest
from tests.kernels.ahead_of_time import read_table
from tests.kernels.amd import (
    E4M3,
    E4M3_FNUZ,
    FP8_FORMS,
    LDS_KIB,
    REPORT,
    Resources,
    Row,
    formatted,
    outcome_of,
    read_report,
    reason_of,
    report,
    representatives,
    resources_of,
)
from tests.kernels.dry_run import Launch, every_launch

VGPRS_MAX = 512
"""Registers of a lane, if a compute unit runs one wavefront in each of its four parts."""


def test_the_report_has_every_kernel_on_every_gpu() -> None:
    rows, kernels = read_report(), {row.kernel for row in read_table()}
    assert formatted(rows) == REPORT.read_text()
    assert rows == sorted(rows)
    assert {(row.kernel, row.target) for row in rows} == {
        (kernel, target) for kernel in kernels for target in FP8_FORMS
    }
    keys = {row[:3] for row in rows}
    assert len(keys) == len(rows)
    with_fp8 = {row.kernel for row in rows if row.fp8}
    assert {key for key in keys if key[2]} == {
        (kernel, target, form)
        for kernel in with_fp8
        for target, forms in FP8_FORMS.items()
        for form in forms
    }


def test_a_row_of_the_report_has_a_reason_or_figures() -> None:
    for row in read_report():
        assert (row.resources is None) == bool(row.reason), row
        assert row.resources is None or 0 < row.resources.vgprs <= VGPRS_MAX, row


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_report_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert report(every_launch()) == read_report()


PLAIN = Launch(
    module="antiphon.kernels.triton.linear_tiled",
    kernel="linear_kernel",
    arguments=("*bf16:16", "i32"),
    constants=(("INPUTS", 4096), ("BLOCK_M", 16), ("BLOCK_N", 64), ("BIAS", None)),
    warps=4,
    stages=2,
)


def changed(launch: Launch, **changes: object) -> Launch:
    return msgspec.structs.replace(launch, **changes)


def test_the_largest_tile_stands_for_a_kernel_and_then_most_stages() -> None:
    large = changed(PLAIN, constants=(("INPUTS", 64), ("BLOCK_M", 64), ("BLOCK_N", 64)))
    staged = changed(large, stages=3)
    wide = changed(PLAIN, constants=(("INPUTS", 1 << 20), ("BLOCK_M", 16), ("BLOCK_N", 64)))
    for every in ([PLAIN, large, staged, wide], [wide, staged, large, PLAIN]):
        assert representatives(every) == {
            ("linear_tiled.linear", target, ""): staged for target in FP8_FORMS
        }


def test_operands_of_fp8_have_a_launch_of_their_own_in_each_form() -> None:
    fp8 = changed(PLAIN, arguments=("*fp8e4nv:16", "i32"))
    other = changed(PLAIN, arguments=("*fp8e4b8:16", "i32"))
    kernel = "linear_tiled.linear"
    assert representatives([PLAIN, fp8]) == {
        (kernel, "gfx942", ""): PLAIN,
        (kernel, "gfx950", ""): PLAIN,
        (kernel, "gfx942", E4M3): fp8,
        (kernel, "gfx942", E4M3_FNUZ): other,
        (kernel, "gfx950", E4M3): fp8,
    }


ASSEMBLY = """
\tv_mfma_f32_32x32x8_bf16_1k a[0:15], v[2:3], v[4:5], a[0:15]
\tv_mfma_f32_16x16x16_bf16 a[0:3], v[2:3], v[4:5], a[0:3]
\tv_mfma_f32_32x32x8_bf16_1k a[0:15], v[6:7], v[4:5], a[0:15]
\t.amdgpu_metadata
amdhsa.kernels:
  - .agpr_count:     32
    .args:
      - .address_space:  global
        .offset:         0
        .size:           8
    .group_segment_fixed_size: 0
    .private_segment_fixed_size: 48
    .sgpr_count:     46
    .sgpr_spill_count: 3
    .vgpr_count:     120
    .vgpr_spill_count: 12
"""
USED = Resources(
    vgprs=120,
    vgpr_spills=12,
    sgpr_spills=3,
    scratch=48,
    lds=65537,
    matrix="f32_16x16x16_bf16/f32_32x32x8_bf16_1k",
)


def test_resources_are_read_from_the_metadata_of_an_assembly() -> None:
    assert resources_of(ASSEMBLY, 65537) == USED
    assert resources_of(ASSEMBLY.replace("v_mfma", "v_fma"), 0).matrix == ""
    with pytest.raises(KeyError, match="vgpr_spill_count"):
        resources_of(ASSEMBLY.replace(".vgpr_spill_count", ".another"), 0)


def test_a_row_says_whether_it_fits_and_spills() -> None:
    row = Row("norm.rmsnorm", "gfx942", "", "1f", "", USED)
    assert not row.fits
    assert row._replace(target="gfx950").fits
    assert row._replace(resources=USED._replace(lds=LDS_KIB["gfx942"] * 1024)).fits
    assert row.spills
    assert not row._replace(resources=USED._replace(vgpr_spills=0, scratch=0)).spills
    refused = Row("norm.rmsnorm", "gfx942", "", "1f", "ValueError: no", None)
    assert not refused.fits
    assert not refused.spills


@pytest.mark.parametrize(
    ("written", "exit_status", "reason"),
    [
        ("warning: w\nk.py:9: error: cannot legalize\nerror: later\n", 0, "cannot legalize"),
        ("LLVM ERROR: Cannot select:  t4\nPLEASE submit\n", -6, "Cannot select: t4"),
        ("x.cpp:9: f(): Assertion `a < b' failed.\n", -6, "Assertion a < b"),
        ("", -11, "the compiler's process has ended by SIGSEGV"),
        ("remark: slow\n", 3, "the compiler's process has ended by status 3"),
    ],
)
def test_a_refusal_is_the_first_error_that_the_compiler_writes(
    written: str, exit_status: int, reason: str
) -> None:
    assert reason_of(written, exit_status) == reason


def refuse() -> NoReturn:
    raise RuntimeError("at 3:4: a quoted source") from ValueError("fp8e4nv\n  is not supported")


def end() -> NoReturn:
    os.write(2, b"LLVM ERROR: out of registers\n")
    os.kill(os.getpid(), signal.SIGKILL)  # SIGABRT would leave a trace in the log
    raise AssertionError("it has ended")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_compiler_that_raises_or_ends_its_process_is_reported() -> None:
    assert outcome_of(lambda: USED) == USED
    assert outcome_of(refuse) == "ValueError: fp8e4nv is not supported"
    assert outcome_of(end) == "out of registers"
