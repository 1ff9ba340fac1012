"""A worker beside a page store, on a device whose streams compute when a seed says so.

It generates what it does on the CPU, alone and after its pages were saved, forgotten and fetched,
with graphs and beside a row that fails.
"""

from __future__ import annotations

import random
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.kernels.edits import Edit
from tests.kernels.interpreted.drawn import SLOTS, DrawnStream
from tests.models.model_loop import ModelLoop
from tests.models.test_draft_model import with_nan
from tests.models.tiny import write_llama
from tests.support.models import load, open_model
from tests.support.worker import state

from antiphon.kernels import stream, upload
from antiphon.model_worker.batching.mailbox import Mail
from antiphon.model_worker.batching.page_transfers import TransferDone, TransferLimits
from antiphon.model_worker.runner import decode_graphs, device_pages, prefill_graphs
from antiphon.model_worker.runner.device_runner import DeviceRunner
from antiphon.model_worker.runner.opening import OpenModel
from antiphon.model_worker.runner.pools import cache_groups
from antiphon.transfer.checksums import page_checksum
from antiphon.wire.command import FlushCache
from antiphon.wire.digests import BLOCK_TOKENS
from antiphon.wire.namespaces import stored_name
from antiphon.wire.sampling import SamplingParams, TokenOutputParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.models.model_loop import Output

    from antiphon.model_worker.batching.page_transfers import BlockTransfer
    from antiphon.model_worker.batching.state import RequestState
    from antiphon.model_worker.cache.codec import BlockPages, PageCodec

SEEDS, BATCH = 500, 50
FEW = 2
BAD = 0
"""A token whose embedding is not finite, and which no good prompt has."""
CAPTURED = (2, 3)
PREFILLS = (8, 48)
PAGES = 60
POSITIONS = 128
CHUNKS: dict[str, Any] = {"chunk_tokens": 40, "step_tokens_max": 48}
FETCH_TIMEOUT_S = 1e9
"""A fetch that is given up is a miss: the seed decides about it, not the load of the machine."""


class DrawnStore:
    """A page store whose transfers end in any later turn."""

    available = True

    def __init__(self, codec: PageCodec, seed: int) -> None:
        self._codec = codec
        self._random = random.Random(f"store {seed}")
        self._records: dict[bytes, memoryview] = {}
        self._begun: list[Callable[[], TransferDone]] = []

    def save(self, transfer: BlockTransfer) -> None:
        self._begun.append(partial(self._save, transfer))

    def fetch(self, transfer: BlockTransfer) -> None:
        self._begun.append(partial(self._fetch, transfer))

    def end(self, share: float) -> Iterator[TransferDone]:
        """End a share of the transfers."""
        for transfer in self._begun.copy():
            if self._random.random() < share:
                self._begun.remove(transfer)
                yield transfer()

    def _save(self, transfer: BlockTransfer) -> TransferDone:
        for name, block in _named_blocks(transfer):
            self._records[name] = self._codec.encode(name, block)
        return TransferDone(number=transfer.number)

    def _fetch(self, transfer: BlockTransfer) -> TransferDone:
        fetched = 0
        for name, block in _named_blocks(transfer):
            if (record := self._records.get(name)) is None:
                break
            masks = self._codec.check(name, record, page_checksum(record))
            self._codec.decode(record, masks, block, states=False)
            fetched += 1
        return TransferDone(number=transfer.number, blocks=fetched)


def _named_blocks(transfer: BlockTransfer) -> Iterator[tuple[bytes, BlockPages]]:
    for digest, block in zip(transfer.digests[transfer.first :], transfer.blocks, strict=True):
        yield stored_name(transfer.namespace, digest, "whole"), block


class StoredLoop(ModelLoop):
    """A loop whose pages are saved in a store, and fetched from it."""

    def __init__(self, model: OpenModel, seed: int) -> None:
        super().__init__(model, tree=True, overlap=True, **CHUNKS)
        self._store = DrawnStore(model.codec(), seed)
        limits = TransferLimits(
            save_bytes_max=1 << 20, fetch_timeout_s=FETCH_TIMEOUT_S, fetch_tokens=1
        )
        self.core.batch.use_store(self._store, limits)

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._turn(Mail(commands=[FlushCache()]))

    def _turn(self, mail: Mail) -> None:
        super()._turn(mail)
        for done in self._store.end(1.0 if self.core.idle else 0.5):
            self.core.land(done)


class World:
    """A model, what it generates on the CPU, and a worker with it for each seed."""

    def __init__(self, place: Path) -> None:
        source, folder = place / "source", place / "model"
        source.mkdir()
        folder.mkdir()
        with_nan(write_llama(source, {"num_hidden_layers": 1}), folder, BAD)
        on_cpu = ModelLoop(open_model(folder, pages=PAGES, dtype="float32"), **CHUNKS)
        self._expected = _read(on_cpu.run(_requests()))
        self._model = load(folder, dtype="float32", device="interpreter")
        self._groups = cache_groups(self._model.spec, self._model.build, page_tokens=4, pages=PAGES)

    def live(self, seed: int) -> None:
        """Let a worker run; every other one has graphs of prefills.

        Raises:
            AssertionError: It generates something else.
        """
        runner = DeviceRunner(
            self._model, self._groups, DrawnStream(seed), slots=SLOTS, positions=POSITIONS
        )
        (pool,) = runner.pools
        for pages in pool.layer(0):
            pages[-1] = torch.nan  # which only rows of padding read
        assert runner.capture(CAPTURED).sizes == CAPTURED
        if seed % 2 == 0:
            assert runner.capture_prefills(PREFILLS).sizes == PREFILLS
        loop = StoredLoop(OpenModel(runner, self._groups, self._model.spec), seed)
        self._compare(loop.run(_requests()))
        loop.forget()
        for pages in pool.layer(0):
            pages[:-1] = 1.0  # what pages of another request might have
        bad = state([3, BAD, 4], sampling=SamplingParams(max_new_tokens=3))
        failed, *outputs = loop.run([bad, *_requests()])
        self._compare(outputs)
        assert failed.finish.error is not None
        assert outputs[0].cached_tokens == BLOCK_TOKENS
        assert not any(pages[:-1].isnan().any() for pages in pool.layer(0))

    def finds(self, seed: int) -> bool:
        """Whether something goes wrong."""
        try:
            self.live(seed)
        except Exception:  # noqa: BLE001  # whatever finds it
            return True
        return False

    def _compare(self, outputs: list[Output]) -> None:
        for (ids, logprobs), (expected_ids, expected_logprobs) in zip(
            _read(outputs), self._expected, strict=True
        ):
            assert ids == expected_ids
            assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)


def _requests() -> list[RequestState]:
    """One of a whole block and more with logprobs, which are read behind the step after theirs.

    And one that is decoded beside it, and longer.
    """
    dice = np.random.default_rng(5)
    long, short = (dice.integers(1, 300, count).tolist() for count in (BLOCK_TOKENS + 3, 5))
    details = TokenOutputParams(logprobs=True)
    return [
        state(long, max_new_tokens=2, temperature=0.0, details=details),
        state(short, max_new_tokens=8, temperature=0.0),
    ]


def _read(outputs: list[Output]) -> list[tuple[list[int], list[float | None]]]:
    return [(each.ids, [token.logprob for token in each.tokens]) for each in outputs]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def _nan_in_padding() -> Iterator[None]:
    """Of which numpy warns, and a GPU does not."""
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def live_all(world: World, seeds: range) -> None:
    for seed in seeds:
        try:
            world.live(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def test_a_worker_generates_the_same_whenever_its_streams_compute(world: World) -> None:
    live_all(world, range(FEW))


@pytest.mark.long
@pytest.mark.parametrize("batch", range(SEEDS // BATCH))
def test_it_does_so_with_many_seeds(world: World, batch: int) -> None:
    live_all(world, range(batch * BATCH, (batch + 1) * BATCH))


MUTANTS = [
    Edit(
        "the host does not wait for what it has written",
        device_pages,
        "after.callback(stream.download([]).wait)",
        "stream.download([])",
    ),
    Edit(
        "the host does not wait for what it reads",
        device_pages,
        "download.wait(), strict=True",
        "[each.numpy() for each in download.copies], strict=True",
    ),
    Edit(
        "staging of inputs is reused before it was copied",
        stream,
        "        target.copy_(torch.as_tensor(values.copy()))",
        "        kept = vars(self).setdefault(values.size, values.copy())\n"
        "        kept[:] = values\n"
        "        target.copy_(torch.as_tensor(kept))",
    ),
    Edit(
        "staging of uploads is reused before it was copied",
        upload,
        "    pinned = torch.as_tensor(values.copy())",
        "    kept = vars(_copied).setdefault((values.shape, values.dtype), values.copy())\n"
        "    kept[...] = values\n"
        "    pinned = torch.as_tensor(kept)",
    ),
    Edit(
        "a length is kept as a number of the host",
        decode_graphs,
        "rows.positions, rows.rotary",
        "rows.positions, torch.full_like(rows.rotary, keys - 1)",
    ),
    Edit(
        "a buffer that graphs read is replaced",
        decode_graphs,
        "self._stream.fill(self._inputs[: COLUMNS * size], inputs.ravel())",
        "self._inputs = self._upload(inputs.ravel())",
    ),
    Edit(
        "padding has the slot of a request",
        decode_graphs,
        "inputs[0], inputs[2] = self._padding, 1",
        "inputs[2] = 1",
    ),
    Edit(
        "page tables are not changed in place",
        decode_graphs,
        "target.index_copy_(",
        "target.clone().index_copy_(",
    ),
    Edit(
        "logits are not copied to where they are read",
        decode_graphs,
        "outputs.logits.copy_(made.logits)",
        "outputs.logits.add_(0)",
    ),
    Edit(
        "what enters the layers of a prefill is not copied to where its graph reads it",
        prefill_graphs,
        "fixed[:tokens].copy_(values)",
        "fixed[:tokens].add_(0)",
    ),
    Edit(
        "what attention makes of a prefill is not read by the piece after it",
        prefill_graphs,
        "return out.clone()",
        "return torch.zeros_like(out)",
    ),
    Edit(
        "what a prefill computes is not copied to where it is read",
        prefill_graphs,
        "self._states.hidden[:size].copy_(hidden)",
        "self._states.hidden[:size].add_(0)",
    ),
]


OFTEN = range(1, 4)
"""Mutants that differ from what is right by the time at which something is read, but for the first,
which takes as long as all others to be found."""


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(each, id=each.name, marks=() if place in OFTEN else pytest.mark.long)
        for place, each in enumerate(MUTANTS)
    ],
)
def test_a_mutant_is_found(world: World, mutant: Edit) -> None:
    with mutant.applied():
        found = next((seed for seed in range(SEEDS) if world.finds(seed)), None)
    assert found is not None, f"{SEEDS} workers run with it"
    print(f"{mutant.name}: found by seed {found}")
