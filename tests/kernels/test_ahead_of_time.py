from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.kernels.ahead_of_time import Usage, compiled, every_launch, name_of, read_table

from antiphon.kernels.triton.backend import SMS

ROOT = Path(__file__).parents[2]


def test_what_is_launched_is_what_was_compiled() -> None:
    """The table has the launches that there are now; the long test below compiles all of them."""
    counts: dict[str, int] = {}
    for launch in every_launch():
        counts[name_of(launch)] = counts.get(name_of(launch), 0) + 1
    rows = read_table()
    assert {(row.kernel, row.sm): row.launches for row in rows} == {
        (name, sm): count for name, count in counts.items() for sm in SMS
    }
    assert all(row.usage.refusal(row.sm) is None for row in rows)


@pytest.mark.timeout(120)
def test_one_launch_of_each_kernel_compiles() -> None:
    """What the interpreter runs, the compiler may refuse.

    In a process of its own, which interprets nothing: another test may have let this one do so.
    """
    code = (
        "import os\n"
        "os.environ.pop('TRITON_INTERPRET', None)\n"
        "from tests.kernels.ahead_of_time import compiled, every_launch\n"
        "one_each = {launch.kernel: launch for launch in every_launch()}\n"
        "assert len(compiled(one_each.values(), (90,))) == len(one_each) > 0\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_table_of_compiled_launches_is_current() -> None:
    assert compiled(every_launch(), SMS) == read_table()


def test_a_launch_that_does_not_fit_is_refused_with_its_figures() -> None:
    fits = Usage(registers=128, stack=0, local=0, shared=99 * 1024)
    assert fits.refusal(86) is None
    large = fits._replace(shared=100 * 1024)
    assert large.refusal(90) is None
    assert large.refusal(86) == "102400 bytes of shared memory, of 99 KiB"
    assert fits._replace(stack=8).refusal(90) == "8 bytes of stack and 0 of spilled registers"
