from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.kernels import ahead_of_time
from tests.kernels.ahead_of_time import (
    Row,
    Usage,
    by_kernel,
    compiled,
    compiled_at_once,
    digest_of,
    every_launch,
    lacks,
    missing,
    name_of,
    read_table,
)
from tests.kernels.published import MODELS
from tests.kernels.sass import Code, code_of

from antiphon.kernels.triton.backend import SMS

if TYPE_CHECKING:
    from typing import NoReturn

    from tests.kernels.dry_run import Launch

ROOT = Path(__file__).parents[2]


def test_what_is_launched_is_what_was_compiled() -> None:
    """The table has the launches that there are now; the long test below compiles all of them."""
    rows, launches = read_table(), by_kernel(every_launch(), SMS)
    assert {(row.kernel, row.sm): (row.launches, row.digest) for row in rows} == {
        key: (len(each), digest_of(each)) for key, each in launches.items()
    }
    assert all(row.usage.refusal(row.sm) is None for row in rows)


def test_a_new_model_leaves_rows_of_the_others_as_they_are() -> None:
    every, others = every_launch(), every_launch(tuple(MODELS)[:-1])
    own = [launch for launch in every if launch not in others]
    whole, added = by_kernel(every, SMS), by_kernel(own, SMS)
    usage = Usage(registers=8, stack=0, local=0, shared=512)
    table = [
        Row(*key, len(launches), digest_of(launches), usage, "", 128)
        for key, launches in by_kernel(others, SMS).items()
    ]
    kept, lacking = missing(table, others, every)
    assert [*kept.values()] == table
    assert lacking == added
    stale = [row._replace(digest="") if row.kernel == "norm.rmsnorm" else row for row in table]
    kept, lacking = missing(stale, others, every)
    assert [*kept.values()] == [row for row in table if row.kernel != "norm.rmsnorm"]
    assert lacking == added | {key: whole[key] for key in whole if key[0] == "norm.rmsnorm"}
    assert not missing(read_table(), others, every)[1]


def test_a_row_uses_what_one_of_its_launches_uses_at_most() -> None:
    usage = Usage(registers=8, stack=0, local=0, shared=512)
    one = Row("experts.down", 90, 2, "1f", usage, "HMMA", 128)
    more = Row("experts.down", 90, 1, "2f", usage._replace(registers=4, shared=1024), "HGMMA", 64)
    most = usage._replace(shared=1024)
    assert one.joined(more) == Row("experts.down", 90, 3, "1f", most, "HGMMA/HMMA", 64)
    plain = one._replace(matrix="")
    assert plain.joined(plain).matrix == ""


@pytest.mark.timeout(120)
def test_one_launch_of_each_kernel_compiles() -> None:
    """What the interpreter runs, the compiler may refuse.

    In a process of its own, which interprets nothing: another test may have let this one do so.
    """
    one_each = {launch.kernel: launch for launch in every_launch()}
    code = (
        "import os, sys\n"
        "os.environ.pop('TRITON_INTERPRET', None)\n"
        "import msgspec\n"
        "from tests.kernels.ahead_of_time import compiled\n"
        "from tests.kernels.dry_run import Launch\n"
        "launches = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Launch])\n"
        "assert len(compiled(launches, (90,))) == len(launches) > 30\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        input=msgspec.json.encode([*one_each.values()]),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout.decode()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_table_of_compiled_launches_is_current() -> None:
    assert compiled_at_once(every_launch()) == read_table()


LISTING = """
        /*0000*/                   LDG.E R1, desc[UR4][R2.64] ;      /* 0x000000 */
        /*0010*/                   LDGSTS.E.BYPASS.128 [R3], desc[UR4][R2.64] ; /* 0x0 */
        /*0020*/              @!P1 HMMA.16816.F32.BF16 R4, R8, R9, R4 ;  /* 0x0 */
        /*0030*/                   LDG.E.64 R1, desc[UR4][R2.64] ;   /* 0x0 */
        /*0040*/               @P0 BRA {target} ;                      /* 0x0 */
        /*0050*/                   STG.E.128 desc[UR4][R2.64], R4 ;  /* 0x0 */
        /*0060*/                   BRA 0x60;                         /* 0x0 */
"""


def test_machine_code_is_read_in_the_loop_that_multiplies() -> None:
    assert code_of(LISTING.format(target="0x10")) == Code("HMMA", 128, 128, asynchronous=True)
    assert code_of(LISTING.format(target="0x20")) == Code("HMMA", 64, 128, asynchronous=False)
    with pytest.raises(ValueError, match="no loop multiplies"):
        code_of(LISTING.format(target="0x30"))
    with pytest.raises(ValueError, match="kept in memory: LDL"):
        code_of(LISTING.replace("LDG.E.64", "LDL.64"))
    unrolled = LISTING.format(target="0x50")
    assert code_of(unrolled) == Code("HMMA", 128, 128, asynchronous=True)
    without = LISTING.format(target="0x30").replace("HMMA", "FFMA")
    assert code_of(without) == Code("", 128, 128, asynchronous=True)


def test_a_launch_that_spills_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def spilling(launch: Launch, sm: int) -> NoReturn:
        code_of(LISTING.replace("LDG.E.64", "STL.64"))
        raise AssertionError(launch, sm)

    monkeypatch.setattr(ahead_of_time, "compile_for", spilling)
    launch = every_launch()[0]
    with pytest.raises(RuntimeError, match="sm_120: registers are kept in memory: STL: Launch"):
        compiled([launch], (120,))


def test_what_machine_code_lacks_is_named() -> None:
    small = next(
        each
        for each in every_launch()
        if name_of(each) == "experts.down"
        and ("BLOCK_M", 16) in each.constants
        and each.arguments[0].startswith("*bf16")
    )
    large = msgspec.structs.replace(small, constants=(("BLOCK_M", 64),))
    found = Code("HMMA", 128, 128, asynchronous=True)
    assert lacks(found, small, 90) is lacks(found, large, 80) is None
    assert lacks(found, large, 90) == "it multiplies by HMMA, not by HGMMA"
    assert lacks(found._replace(load_bits=64), small, 90) == "its widest load is of 64 bits"
    assert lacks(found._replace(asynchronous=False), small, 90) == "it loads nothing ahead"


def test_a_launch_that_does_not_fit_is_refused_with_its_figures() -> None:
    fits = Usage(registers=128, stack=0, local=0, shared=99 * 1024)
    assert fits.refusal(86) is None
    large = fits._replace(shared=100 * 1024)
    assert large.refusal(90) is None
    assert large.refusal(86) == "102400 bytes of shared memory, of 99 KiB"
    assert fits._replace(stack=8).refusal(90) == "8 bytes of stack and 0 of spilled registers"
