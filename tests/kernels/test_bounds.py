"""What no pass asks for is refused by the library itself: it neither hangs nor ends the process."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.kernels.rows import ISAS

from antiphon.kernels.cpu import extension
from antiphon.kernels.cpu.linear import PackedWeight

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = pytest.mark.skipif(not ISAS, reason="the CPU's own kernels are not built")

INT32_MAX = 2**31 - 1


def library() -> Any:
    return extension.load()


def rows(*lengths: int, page: int = 0, **sizes: int | bool) -> Any:
    """Rows of so many tokens, each on one page of its own number."""
    shape = {"page_tokens": 4, "heads": 1, "queries_per_head": 1, "head_size": 8, "window": 0}
    shape |= {"bidirectional": False}
    count = np.array(lengths, np.int32)
    tables = np.full((len(lengths), 1), page, np.int32)
    return library().AttentionMetadata(
        **(shape | sizes), tables=tables, query_len=count, kv_len=count
    )


def linear(inputs: int, outputs: int, *, halves: bool = False) -> Any:
    packed = PackedWeight(
        inputs, outputs, bias=False, dtype=torch.float32, format_="packed", halves=halves
    )
    return packed.linear


def a_stack(
    *,
    norm: torch.Tensor | None = None,
    plain: bool = True,
    final: bool = True,
    rotary: int = 0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    keys: torch.dtype = torch.float32,
    values: torch.dtype = torch.float32,
    gated: bool = False,
    recurrent: Any = None,
) -> Any:
    """A layer over one head of 8."""
    ones = torch.ones(16)
    last = ones if norm is None else norm
    stack = library().Stack(
        dtype=library().Dtype.f32,
        hidden=16,
        norm=library().NormKind.rms,
        final_norm=(last, None) if final else None,
        eps=1e-5,
    )
    cache = (
        torch.zeros(2, 1, 8, 4, 1, dtype=keys),
        torch.zeros(2, 1, 4, 8, 1, dtype=values),
    )
    stack.add(
        qkv=linear(16, 24),
        out=linear(8, 16),
        gated=gated,
        attention_scales=(1.0, 1.0),
        recurrent=recurrent,
        latent=None,
        gate_up=linear(16, 64, halves=True) if plain else None,
        down=linear(32, 16),
        experts=None,
        activation=library().Activation.silu,
        mlp_scales=(1.0, 1.0),
        attention_norms=((ones, None), None, None),
        mlp_norms=((ones, None), None, None),
        parallel=False,
        multiplier=1.0,
        head_norms=None,
        scale=1.0,
        softcap=softcap,
        sinks=sinks,
        rotary=rotary,
        group=0,
        cache=(*cache, 1.0, 1.0),
    )
    return stack


def run(
    stack: Any,
    tokens: int,
    groups: list[Any],
    scale: torch.Tensor | None = None,
    states: Sequence[object] = (),
) -> Any:
    turns = torch.zeros(4, 1, 8)
    places = np.zeros(tokens, np.int32)
    return stack.forward(torch.zeros(tokens, 16), [(turns, turns, scale)], places, groups, states)


def recurrence(
    *, heads: int = 2, taps: int = 4, columns: int = 4, dtype: torch.dtype = torch.float32
) -> Any:
    """A gated delta net of `heads` value heads on two key heads of three numbers."""
    return library().RecurrentLayer(
        kind=library().RecurrenceKind.gated_delta,
        key_heads=2,
        heads=heads,
        rows=3,
        columns=columns,
        conv=torch.zeros(taps, 12 + 2 * columns, dtype=dtype),
        conv_bias=None,
        decay_log=torch.zeros(2),
        step_bias=torch.zeros(2),
        skip=None,
        step_limits=(0.0, 1.0),
        scales=None,
        norm=None,
        norm_part=4,
        norm_eps=1e-5,
        gate_first=False,
    )


def recurrent(states: int = 2, *, columns: int = 4, dtype: torch.dtype = torch.float32) -> Any:
    """What a layer of a stack has of it."""
    kept = torch.zeros(states, 3, 20), torch.zeros(states, 2, 3, columns, dtype=dtype)
    return recurrence(), linear(16, 32), linear(8, 16), (1.0, 1.0), *kept, 0


def state_rows(read: int = 0, write: int = 1, tokens: int = 1) -> Any:
    return library().StateMetadata(
        reads=np.array([read], np.int32),
        writes=np.array([[write]], np.int32),
        query_len=np.array([tokens], np.int32),
    )


def ready_heads(heads: torch.Tensor, cache: torch.Tensor, norms: Any = None) -> Any:
    turns = torch.zeros(len(heads), heads.shape[-1])
    places = torch.zeros(len(heads), dtype=torch.int64)
    values = cache.transpose(2, 3).contiguous()
    return library().qk_norm_rope_store(
        heads, turns, turns, cache, values, places, norms, (1.0, 1.0)
    )


def head_norms(size: int, *, kind: str = "rms", dtype: torch.dtype = torch.float32) -> Any:
    weight = torch.ones(size, dtype=dtype)
    return library().QkNorms(
        kind=getattr(library().NormKind, kind),
        over_token=False,
        query=(weight, None),
        key=(weight, weight if kind == "rms_wide" else None),
        eps=1e-5,
    )


HEADS, CACHE = torch.ones(2, 3, 8), torch.ones(1, 1, 8, 4, 1)

REFUSED: dict[str, Callable[[], object]] = {
    "a pass without rows": rows,
    "a row without tokens": lambda: rows(1, 0),
    "a window beyond counting": lambda: rows(1, window=2**63 - 1),
    "a page that no cache has": lambda: run(a_stack(), 1, [rows(1, page=INT32_MAX)]),
    "a stack of no tokens": lambda: run(a_stack(), 0, [rows()]),
    "a cached layer of rows that see both ways": lambda: run(
        a_stack(), 1, [rows(1, bidirectional=True)]
    ),
    "a stack without rows": lambda: run(a_stack(), 1, [None]),
    "a stack whose last layer no norm follows": lambda: run(a_stack(final=False), 1, [rows(1)]),
    "factors of fewer positions": lambda: run(a_stack(), 1, [rows(1)], torch.ones(3)),
    "factors of another dtype": lambda: run(
        a_stack(), 1, [rows(1)], torch.ones(4, dtype=torch.bfloat16)
    ),
    "a rotation that a pass has not": lambda: run(a_stack(rotary=1), 1, [rows(1)]),
    "gates that are not projected": lambda: a_stack(gated=True),
    "a recurrence of heads that are not shared out evenly": lambda: recurrence(heads=3),
    "a recurrence that convolves nothing": lambda: recurrence(taps=1),
    "a recurrence that convolves too much": lambda: recurrence(taps=17),
    "a recurrence without values": lambda: recurrence(columns=0),
    "states of another size": lambda: a_stack(recurrent=recurrent(columns=5)),
    "states in another dtype": lambda: a_stack(recurrent=recurrent(dtype=torch.bfloat16)),
    "a row without a state": lambda: state_rows(write=-1),
    "a row of states without tokens": lambda: state_rows(tokens=0),
    "a recurrence without rows": lambda: run(a_stack(recurrent=recurrent()), 1, [rows(1)]),
    "a recurrence with no rows": lambda: run(
        a_stack(recurrent=recurrent()), 1, [rows(1)], states=[None]
    ),
    "a recurrence with rows of other tokens": lambda: run(
        a_stack(recurrent=recurrent()), 1, [rows(1)], states=[state_rows(tokens=2)]
    ),
    "a state beyond all": lambda: run(
        a_stack(recurrent=recurrent()), 1, [rows(1)], states=[state_rows(write=2)]
    ),
    "a state that is read beyond all": lambda: run(
        a_stack(recurrent=recurrent()), 1, [rows(1)], states=[state_rows(read=2)]
    ),
    "a cap of nothing": lambda: a_stack(softcap=0.0),
    "sinks of other heads": lambda: a_stack(sinks=torch.ones(2)),
    "norms of heads of another size": lambda: ready_heads(HEADS, CACHE, head_norms(4)),
    "norms of heads in another dtype": lambda: ready_heads(
        HEADS, CACHE, head_norms(8, dtype=torch.bfloat16)
    ),
    "a wide norm with a bias": lambda: ready_heads(HEADS, CACHE, head_norms(8, kind="rms_wide")),
    "a wide norm of another dtype": lambda: library().rmsnorm_wide(
        torch.ones(3, 8), torch.ones(8, dtype=torch.bfloat16), 1e-5
    ),
    "a cap of what is not float32": lambda: library().soft_capped(
        torch.ones(3, dtype=torch.bfloat16), 30.0
    ),
    "a norm in pieces": lambda: a_stack(norm=torch.ones(16, 2)[:, 0]),
    "a cache of another dtype": lambda: a_stack(keys=torch.bfloat16, values=torch.bfloat16),
    "half a block": lambda: a_stack(plain=False),
    "values of another dtype": lambda: a_stack(values=torch.bfloat16),
    "norms of nothing": lambda: library().rmsnorm(torch.ones(3, 0), torch.ones(0), 1e-5),
    "gates of nothing": lambda: library().silu_mul(torch.ones(3, 0)),
    "nothing that is finite": lambda: library().finite_rows(torch.ones(3, 0)),
    "heads of nothing": lambda: ready_heads(torch.ones(2, 3, 0), torch.ones(1, 1, 0, 4, 1)),
    "a cache without heads": lambda: ready_heads(torch.ones(2, 3, 8), torch.ones(1, 0, 8, 4, 1)),
    "memory of another device": lambda: library().rmsnorm(
        torch.ones(3, 8, device="meta"), torch.ones(8), 1e-5
    ),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED.keys())
def test_what_no_pass_asks_for_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError):
        call()


def test_the_smallest_pass_is_run() -> None:
    assert run(a_stack(), 1, [rows(1)])[0].shape == (1, 16)
    both, states = a_stack(recurrent=recurrent()), [state_rows()]
    assert run(both, 1, [rows(1)], states=states)[0].shape == (1, 16)


def test_a_team_whose_threads_find_no_memory_raises_and_works_on() -> None:
    """A head as wide as a million wants 320 MB to work in, where 100 MB are left."""
    run_alone("""
        import resource
        from pathlib import Path

        def attend(head_size):
            count, table = np.ones(4, np.int32), np.zeros((4, 1), np.int32)
            rows = library.AttentionMetadata(
                page_tokens=1, heads=1, queries_per_head=1, head_size=head_size, window=0,
                bidirectional=False, tables=table, query_len=count, kv_len=count,
            )
            q, keys = torch.ones(4, 1, head_size), torch.ones(1, 1, head_size, 2, 1)
            values = torch.ones(1, 1, 2, head_size, 1)
            return library.paged_attention(q, keys, values, rows, 1.0, (1.0, 1.0))

        attend(64)
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (mapped + 100 * 2**20,) * 2)
        for _ in range(2):
            try:
                attend(2**20)
            except MemoryError:
                continue
            raise SystemExit("it found the memory")
        assert bool((attend(64) == 1).all())
    """)


def test_a_child_of_a_fork_computes_alone() -> None:
    """It has none of the pool's threads, and would wait for them for ever."""
    run_alone("""
        import os
        import signal

        weight = PackedWeight(256, 4096, bias=False, dtype=torch.float32, format_="packed")
        weight.write(0, torch.ones(4096, 256))
        x = torch.ones(16, 256)
        assert weight.linear.multiply(x)[15, 4095].item() == 256
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            os._exit(0 if weight.linear.multiply(x)[15, 4095].item() == 256 else 1)
        assert os.waitpid(child, 0)[1] == 0
    """)


def run_alone(body: str) -> None:
    """Run a program in a process of two threads; it must end well, and soon."""
    lines = [
        "import numpy as np, torch",
        "from antiphon.kernels.cpu import extension",
        "from antiphon.kernels.cpu.linear import PackedWeight",
        "torch.set_num_threads(2)",
        "library = extension.load()",
        *(line.removeprefix("        ") for line in body.splitlines()),
    ]
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
