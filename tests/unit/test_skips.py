"""A test that is skipped without being expected to fails the run."""

from __future__ import annotations

from tests.support.skips import unexpected

KERNELS = "Skipped: the CPU's own kernels are not built"


def test_skips_for_want_of_kernels_fail_where_kernels_run() -> None:
    assert unexpected([KERNELS] * 2, kernels=True) == [f"2 tests skipped, 0 expected: {KERNELS}"]
    assert unexpected([KERNELS] * 2, kernels=False) == []


def test_expected_skips_pass_up_to_their_number() -> None:
    reason = "Skipped: no docker-compose on this machine; the tests above need none"
    assert unexpected([reason] * 4, kernels=True) == []
    assert unexpected([reason] * 5, kernels=True) == [
        "5 tests skipped, 4 expected: no docker-compose on this machine"
    ]


def test_an_index_out_of_reach_leaves_one_test_unchecked() -> None:
    reason = "Skipped: https://an.index/whl is not reached: not checked that it has the torch"
    assert unexpected([reason], kernels=True) == []
    assert unexpected([reason] * 2, kernels=True) == [
        "2 tests skipped, 1 expected: is not reached: not checked"
    ]
