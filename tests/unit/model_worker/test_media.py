"""Requests with media wait for embeddings, splice them, and share pages by what they show."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from tests.support.worker import limits, state, step_plan
from tests.unit.model_worker.steps import Steps, spans

from antiphon.model_worker.batching.joint_plan import join_plans, offsets
from antiphon.model_worker.batching.media import MediaLoad, MediaLoaded, check_media
from antiphon.model_worker.batching.plan import PLAIN
from antiphon.model_worker.batching.planner import TokenBudget
from antiphon.model_worker.batching.state import ChoiceKey, RequestMedia
from antiphon.model_worker.runner.context import _goes_on
from antiphon.model_worker.runner.input_batch import InputBatch
from antiphon.wire.claim import Claim
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.media import Medium, MediumSpan
from antiphon.wire.namespaces import PageOrigin, key_ids, medium_key, prompt_digests

if TYPE_CHECKING:
    from antiphon.model_worker.batching.plan import StepPlan
    from antiphon.model_worker.batching.rows import StepRows

WIDTH = 3
PLACEHOLDER = 50
CLAIM = Claim(address="a:1", token="00", size_bytes=1, digest=bytes(32), expires_unix_ms=0)


def medium(
    start: int, tokens: int, content: int = 1, placeholders: int = 0, key: bytes = b""
) -> Medium:
    key = key or medium_key(bytes([content]) * 32, b"")
    span = MediumSpan(start=start, tokens=tokens, key=key, placeholders=placeholders)
    return Medium(span=span, width=1, height=1, claim=CLAIM)


def prompt(*parts: int) -> list[int]:
    """Positive parts are so many tokens of text, negative ones so many placeholders."""
    ids: list[int] = []
    for part in parts:
        ids += range(60, 60 + part) if part > 0 else [PLACEHOLDER] * -part
    return ids


class FakeStore:
    """Loads nothing until `land`."""

    def __init__(self, steps: Steps, rows_max: int | None = None, *, whole: bool = False) -> None:
        self.loads: list[MediaLoad] = []
        self.released: list[tuple[int, int]] = []
        self._batching = steps.batching
        steps.batching.batch.media.use(self, rows_max=rows_max, whole=whole)

    def load(self, load: MediaLoad) -> None:
        self.loads.append(load)

    def release(self, key: ChoiceKey, number: int) -> None:
        self.released.append((key, number))

    def land(self, load: MediaLoad) -> None:
        """Bring embeddings in which each row names its medium and its index."""
        rows = {
            index: rows_of(index, each.medium.span.rows)[each.first : each.last]
            for index, each in load.media.items()
        }
        self._batching.land(MediaLoaded(load.key, load.number, rows))


def rows_of(index: int, tokens: int) -> np.ndarray:
    return np.stack([np.full(WIDTH, 100 * index + row, np.float32) for row in range(tokens)])


def world(**changes: Any) -> tuple[Steps, FakeStore]:
    steps = Steps(pages=40, cached=True, media_width=WIDTH, **changes)
    return steps, FakeStore(steps)


def plan_of(steps: Steps, rows: StepRows) -> StepPlan:
    return steps.batching.build_plan(1, rows, PLAIN)


def test_a_request_waits_for_its_embeddings_and_others_do_not() -> None:
    steps, store = world()
    steps.add(1, prompt(2, -6, 2), media=(medium(2, 6),))
    steps.add(2, prompt(5))
    assert steps.go() == [(2, 5)]
    assert [[*load.media] for load in store.loads] == [[0]]
    assert steps.go() == [(2, 1)]
    store.land(store.loads[0])
    assert (1, 8) in steps.go()
    assert len(store.loads) == 1


def test_nothing_runs_while_the_only_request_waits() -> None:
    steps, store = world()
    steps.add(1, prompt(1, -3), media=(medium(1, 3),))
    assert not len(steps.next())
    assert steps.batching.starved
    store.land(store.loads[0])
    assert len(steps.next())
    assert not steps.batching.starved


def test_rows_are_spliced_where_the_placeholders_are_whatever_the_chunks() -> None:
    for chunk in range(1, 9):
        steps, store = world(chunk_tokens=chunk)
        ids = prompt(3, -7, 2, -4, 1)
        steps.add(1, ids, media=(medium(3, 7), medium(12, 4, 2)))
        steps.next()
        store.land(store.loads[0])
        spliced: dict[int, float] = {}
        while not spliced or max(spliced) < 15:
            rows = steps.next()
            plan = plan_of(steps, rows)
            (start, _, draws), *_ = spans(rows)
            if plan.spliced is not None and plan.spliced_rows is not None:
                assert all(b > a for a, b in pairwise(plan.spliced.tolist()))
                for at, row in zip(plan.spliced.tolist(), plan.spliced_rows, strict=True):
                    assert plan.tokens[at] == PLACEHOLDER
                    spliced[start + at] = row[0].item()
            steps.commit(rows, [1] if draws else [])
        expected = {3 + row: float(row) for row in range(7)} | {12 + n: 100.0 + n for n in range(4)}
        assert spliced == expected


def test_markers_between_placeholders_are_not_spliced() -> None:
    """An image of tiles, with markers between their rows."""
    for chunk in (1, 4, 16):
        steps, store = world(chunk_tokens=chunk)
        steps.add(1, prompt(2, -3, 2, -3, 1, -1, 2), media=(medium(2, 10, placeholders=7),))
        steps.next()
        store.land(store.loads[0])
        spliced: dict[int, float] = {}
        while len(spliced) < 7:
            rows = steps.next()
            plan = plan_of(steps, rows)
            (start, _, draws), *_ = spans(rows)
            if plan.spliced is not None and plan.spliced_rows is not None:
                for at, row in zip(plan.spliced.tolist(), plan.spliced_rows, strict=True):
                    spliced[start + at] = row[0].item()
            steps.commit(rows, [1] if draws else [])
        assert spliced == dict(zip([2, 3, 4, 7, 8, 9, 11], map(float, range(7)), strict=True))


SPAN = 6
IMAGES = ((3, 9), (11, 17))


def prefilled(steps: Steps, store: FakeStore) -> tuple[list[int], dict[int, int]]:
    """Prefill a prompt of two images whose tokens attend to each other: the ends of its chunks, and
    how many tokens each token is ahead of.
    """
    media = tuple(medium(first, SPAN, content) for content, (first, _) in enumerate(IMAGES))
    steps.add(1, prompt(3, -SPAN, 2, -SPAN, 3), media=media)
    ends, ahead = list[int](), dict[int, int]()
    while not ends or ends[-1] < 20:
        rows = steps.next()
        if len(store.loads) == 1:
            store.land(store.loads.pop())
            steps.batching.flush()
        plan = plan_of(steps, rows) if len(rows) else None
        for row in range(rows.decodes, len(rows)):
            assert plan is not None
            start, end, _ = spans(rows)[row]
            ends.append(end)
            at = plan.query_start.item(row)
            if plan.ahead is not None:
                ahead |= dict(enumerate(plan.ahead[at : at + end - start].tolist(), start))
        if len(rows):
            steps.commit(rows, *[[1] if draws else [] for draws in rows.draws.tolist()])
    return ends, ahead


@pytest.mark.parametrize("chunk", [6, 7, 9, 12, 16])
def test_no_chunk_ends_within_an_image_whose_tokens_attend_to_each_other(chunk: int) -> None:
    ends, ahead = prefilled(*world(chunk_tokens=chunk, span_tokens=SPAN))
    assert not [end for end in ends for first, last in IMAGES if first < end < last]
    expected = {first + i: SPAN - 1 - i for first, _ in IMAGES for i in range(SPAN)}
    assert {at: count for at, count in ahead.items() if count} == {
        at: count for at, count in expected.items() if count
    }


def test_an_image_that_does_not_fit_beside_decodes_lets_no_other_prompt_pass() -> None:
    steps, store = world(chunk_tokens=6, step_tokens_max=7, span_tokens=SPAN, mixed=True)
    for key in (2, 3):
        steps.add(key, 2, max_new_tokens=6)
    steps.go()
    steps.add(1, prompt(3, -SPAN, 1), media=(medium(3, SPAN),))
    steps.go()
    store.land(store.loads[0])
    assert steps.go() == [(2, 1), (3, 1), (1, 3)]
    steps.add(4, 2, max_new_tokens=30)
    planned = steps.go()
    while (1, SPAN) not in planned:
        assert 4 not in dict(planned)
        planned = steps.go()


def test_a_chunk_that_ends_within_an_image_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: the planner knows of no images."""
    monkeypatch.setattr(TokenBudget, "_around", lambda _, media, start, length, whole: length)
    with pytest.raises(AssertionError, match="a chunk ends within an image"):
        prefilled(*world(chunk_tokens=6, span_tokens=SPAN))


def test_embeddings_are_released_when_the_prompt_is_computed() -> None:
    steps, store = world()
    steps.add(1, prompt(1, -3, 1), media=(medium(1, 3),))
    steps.next()
    store.land(store.loads[0])
    assert store.released == []
    steps.go()
    assert store.released == [(1, 1)]
    steps.drop(1)
    assert store.released == [(1, 1)]


def test_a_dropped_request_gives_up_its_load_and_what_comes_later_is_ignored() -> None:
    steps, store = world()
    steps.add(1, prompt(1, -3, 1), media=(medium(1, 3),))
    steps.next()
    steps.drop(1)
    assert store.released == [(1, 1)]
    store.land(store.loads[0])
    assert steps.batching.idle


def test_a_failed_load_ends_its_request_alone() -> None:
    steps, store = world()
    steps.add(1, prompt(1, -3, 1), media=(medium(1, 3),))
    steps.add(2, prompt(4))
    steps.go()
    (load,) = store.loads
    error = InvalidRequest("no image", param="media.0")
    steps.batching.land(MediaLoaded(load.key, load.number, error=error))
    ended = {each.key: each.finish for each in steps.progress() if each.finish is not None}
    assert [*ended] == [1]
    (finish,) = ended.values()
    assert finish.error is not None
    assert finish.error.param == "media.0"
    assert steps.running() == [2]


@pytest.mark.parametrize("rows_max", range(1, 12))
def test_a_prefill_has_a_window_of_rows_that_moves_on(rows_max: int) -> None:
    """What is spliced is the same, and no load begins before the rows before it are given up."""
    for chunk in (1, 3, 20):
        steps, store = world(chunk_tokens=chunk)
        store = FakeStore(steps, rows_max)
        steps.add(1, prompt(2, -6, 1, -4, 3), media=(medium(2, 6), medium(9, 4, 2)))
        spliced: dict[int, float] = {}
        while steps.batching.waiting or steps.batching.batch.prefills:
            rows = steps.next()
            if not len(rows):
                assert steps.batching.starved
                assert len(store.released) == len(store.loads) - 1
                window = [each.last - each.first for each in store.loads[-1].media.values()]
                assert 0 < sum(window) <= rows_max
                store.land(store.loads[-1])
                continue
            plan = plan_of(steps, rows)
            if plan.spliced is not None and plan.spliced_rows is not None:
                first = spans(rows)[0][0]
                found = zip(plan.spliced.tolist(), plan.spliced_rows, strict=True)
                spliced |= {first + at: row[0].item() for at, row in found}
            steps.commit(rows, [9] if spans(rows)[0][2] else [])
        expected = {2 + row: row for row in range(6)} | {9 + row: 100 + row for row in range(4)}
        assert spliced == expected
        assert len(store.loads) == -(-10 // rows_max)
        assert len(store.released) == len(store.loads)


def test_another_prefill_goes_on_while_one_waits_for_its_next_rows() -> None:
    steps, _ = world(chunk_tokens=4, step_tokens_max=8)
    store = FakeStore(steps, 4)
    steps.add(1, prompt(-8, 1), media=(medium(0, 8),))
    steps.add(2, prompt(12))
    assert steps.go() == [(2, 4)]
    store.land(store.loads[0])
    assert sorted(steps.go()) == [(1, 4), (2, 4)]
    assert steps.go() == [(2, 4)]
    assert [(each.first, each.last) for each in store.loads[1].media.values()] == [(4, 8)]
    store.land(store.loads[1])
    assert (1, 4) in steps.go()


def test_a_request_that_fails_or_is_retracted_between_windows_holds_nothing() -> None:
    for fails in (True, False):
        steps, _ = world(chunk_tokens=4)
        store = FakeStore(steps, 4)
        steps.add(1, prompt(-8, 1), media=(medium(0, 8),))
        steps.next()
        store.land(store.loads[0])
        steps.go()
        assert not len(steps.next())
        if fails:
            load, error = store.loads[-1], InvalidRequest("no image", param="media.0")
            steps.batching.land(MediaLoaded(load.key, load.number, error=error))
            assert steps.batching.idle
        else:
            (request,) = steps.batching.running.values()
            steps.batching.planner.retract(request)
            assert store.released == [(1, 1), (1, 2)]
            steps.batching.flush()
            assert not len(steps.next())
            assert [each.first for each in store.loads[-1].media.values()] == [0]


def test_a_window_has_all_rows_of_an_image_whose_tokens_attend_to_each_other() -> None:
    media = (medium(1, 3), medium(5, 3, 2), medium(9, 3, 3))
    request = RequestMedia(media, np.array(prompt(1, -3, 1, -3, 1, -3), np.int32))
    for rows_max, expected in ((1, [0]), (5, [0]), (6, [0, 1]), (None, [0, 1, 2])):
        window = request.window(0, rows_max, whole=True)
        assert [*window] == expected
        assert all((each.first, each.last) == (0, 3) for each in window.values())


def test_the_same_picture_is_a_hit_and_another_one_is_not() -> None:
    ids = prompt(2, -6, 8)
    for content, found in ((1, 12), (2, 0)):
        steps, store = world()
        steps.add(1, ids, media=(medium(2, 6),), max_new_tokens=1)
        steps.next()
        store.land(store.loads[0])
        while steps.batching.live_count:
            steps.go(9)
        steps.add(2, ids, media=(medium(2, 6, content),))
        steps.next()
        assert len(store.loads) == (1 if found else 2)
        if not found:
            store.land(store.loads[1])
            steps.next()
        (request,) = steps.batching.running.values()
        assert request.cached_tokens == found


def test_a_picture_that_another_tower_has_embedded_is_no_hit() -> None:
    steps, store = world()
    ids = prompt(4, -6, 6)
    for key, tower in enumerate(("one", "one", "two", "one")):
        if steps.batching.batch.media.tower != tower:
            steps.batching.use_tower(tower)
        steps.add(key, ids, media=(medium(4, 6),), max_new_tokens=1)
        if not len(rows := steps.next()):
            store.land(store.loads[-1])
            rows = steps.next()
        (request,) = steps.batching.running.values()
        found = request.cached_tokens
        while len(rows):
            steps.commit(rows, [9] if spans(rows)[0][2] else [])
            rows = steps.next()
        # Pages of the first one are found again when encoders return to it.
        assert found == (0, 12, 0, 12)[key]
    assert [load.tower for load in store.loads] == ["one", "two"]


@pytest.mark.parametrize("landed", [True, False])
def test_a_request_that_waits_loads_again_from_the_next_tower(landed: bool) -> None:
    """As one that was added before any encoder is known: its digest is empty."""
    steps, store = world()
    steps.add(1, prompt(2, -6, 1), media=(medium(2, 6),))
    assert not len(steps.next())
    if landed:
        store.land(store.loads[0])
    steps.batching.use_tower("one")
    assert store.released == [(1, 1)]
    store.land(store.loads[0])  # late: of the tower before
    assert not len(steps.next())
    assert [load.tower for load in store.loads] == ["", "one"]
    store.land(store.loads[1])
    assert steps.go() == [(1, 8)]


def test_no_prompt_is_made_of_two_towers() -> None:
    steps, _ = world(chunk_tokens=4)
    store = FakeStore(steps, 4)
    steps.batching.use_tower("one")
    steps.add(1, prompt(4, -8, 1), media=(medium(4, 8),))
    steps.add(2, prompt(12))
    assert steps.go() == [(2, 4)]
    store.land(store.loads[0])
    assert sorted(steps.go()) == [(1, 4), (2, 4)]
    (request,) = [each for each in steps.batching.running.values() if each.key == 1]
    steps.batching.use_tower("two")
    assert not request.running
    assert steps.go() == [(2, 4)], "text goes on"
    assert [load.tower for load in store.loads] == ["one", "two"]
    assert [each.first for each in store.loads[-1].media.values()] == [0]
    store.land(store.loads[-1])
    assert (1, 4) in steps.go()
    assert request.found_tokens == 0, "what the other tower's rows had computed is not used"


def test_a_request_that_decodes_goes_on_when_the_tower_is_another() -> None:
    steps, store = world()
    steps.add(1, prompt(2, -6), media=(medium(2, 6),), max_new_tokens=3, ignore_eos=True)
    steps.next()
    store.land(store.loads[0])
    assert steps.go() == [(1, 8)]
    steps.batching.use_tower("two")
    assert steps.go() == [(1, 1)]
    assert steps.go() == [(1, 1)]
    assert steps.batching.idle
    assert len(store.loads) == 1


def test_a_waiting_request_follows_no_prefill_of_another_tower() -> None:
    steps, _ = world(chunk_tokens=4, context_tokens=80)
    ids = [*range(10, 58)]
    steps.add(1, ids)
    steps.go()
    steps.add(2, [*ids, 60])
    assert steps.go() == [(1, 4)]
    steps.batching.use_tower("two")
    assert 2 in dict(steps.go())


def test_pictures_whose_keys_agree_in_their_first_64_bits_share_no_page() -> None:
    ids = prompt(4, -8, 8)
    pictures = [medium(4, 8, key=b"k" * 8 + 24 * rest) for rest in (b"1", b"2")]
    steps, store = world()
    steps.add(1, ids, media=(pictures[0],), max_new_tokens=1)
    steps.next()
    store.land(store.loads[0])
    while steps.batching.live_count:
        steps.go(9)
    steps.add(2, ids, media=(pictures[1],))
    steps.next()
    store.land(store.loads[1])
    steps.next()
    (request,) = steps.batching.running.values()
    assert request.cached_tokens == 4, "the text before them, and no more"
    digests = {
        prompt_digests(
            PageOrigin(model_digest="m"), b"", 4 * key_ids(pack_ids(ids), [(4, 8, each.span.key)])
        )
        for each in pictures
    }
    assert len(digests) == 2


def test_a_retracted_request_loads_again_what_is_not_cached() -> None:
    steps, store = world()
    steps.add(1, prompt(2, -6, 1), media=(medium(2, 6),))
    steps.next()
    store.land(store.loads[0])
    steps.go()
    (request,) = steps.batching.running.values()
    steps.batching.planner.retract(request)
    steps.batching.flush()
    assert not len(steps.next())
    assert [load.number for load in store.loads] == [1, 2]
    store.land(store.loads[0])  # late: of the time before
    assert not len(steps.next())
    store.land(store.loads[1])
    assert len(steps.next())


def test_what_was_brought_is_given_up_for_a_load_of_all_that_is_lacking() -> None:
    """More may be lacking than before: of a prompt that was cached, pages are evicted."""
    steps, store = world()
    asked = state(prompt(1, -3, 1, -2, 1), media=(medium(1, 3), medium(5, 2, 2)))
    request = steps.batching._request(ChoiceKey(1), asked, 0.0, None)
    steps.batching._requests[request.key] = request
    loader = steps.batching.batch.media
    assert loader.wait(request, 4)
    store.land(store.loads[0])
    assert not loader.wait(request, 4)
    assert loader.wait(request, 0)
    assert [[*load.media] for load in store.loads] == [[1], [0, 1]]
    assert store.released == [(1, 1)]
    store.land(store.loads[1])
    assert not loader.wait(request, 0)
    loader.release(request)
    assert store.released == [(1, 1), (1, 2)]


@pytest.mark.parametrize(
    ("media", "width", "reason"),
    [
        ((medium(0, 2),), None, "takes no images"),
        ((medium(2, 3),), WIDTH, "ends behind the prompt"),
        ((medium(2, 1), medium(2, 1)), WIDTH, "not in order"),
        ((medium(1, 0),), WIDTH, "empty"),
        ((medium(1, 3, placeholders=2),), WIDTH, "other placeholders than rows"),
        ((medium(1, 3),), -WIDTH, "3 tokens, of at most 2"),
    ],
)
def test_media_that_do_not_fit_are_refused(
    media: tuple[Medium, ...], width: int | None, reason: str
) -> None:
    spans = 2 if width == -WIDTH else None
    steps = Steps(media_width=width, span_tokens=spans)
    steps.add(1, prompt(-4), media=media)
    ((finish),) = [each.finish for each in steps.progress()]
    assert finish is not None
    assert finish.error is not None
    assert reason in finish.error.message


def test_keys_have_words_of_the_whole_key_in_place_of_placeholders() -> None:
    ids = pack_ids(prompt(2, -9, 1))
    one = [*unpack_ids(key_ids(ids, [(2, 9, b"a" * 32)]))]
    assert one[:2] == [60, 61]
    assert one[11:] == [60]
    words = one[2:11]
    assert len(set(words)) == 9
    assert all(2**30 <= word < 2**31 for word in words)
    # Keys that agree in their first 64 bits have no word in common.
    other = [*unpack_ids(key_ids(ids, [(2, 9, b"a" * 8 + b"b" * 24)]))]
    assert not set(words) & set(other[2:11])
    assert [*unpack_ids(key_ids(ids, [(2, 4, b"a" * 32)]))][2:6] == words[:4]


def grid(start: int, rows: int, columns: int) -> Medium:
    plain = medium(start, rows * columns)
    return msgspec.structs.replace(plain, span=msgspec.structs.replace(plain.span, columns=columns))


def test_a_grid_is_whole_and_only_where_positions_have_axes() -> None:
    ids = np.array(prompt(2, -6, 2), np.int32)
    check_media([grid(2, 2, 3)], ids, limits(media_width=WIDTH, media_grids=True))
    check_media([medium(2, 6)], ids, limits(media_width=WIDTH))
    wrong = [
        (medium(2, 6), True, "no grid"),
        (grid(2, 2, 3), False, "has a grid"),
        (msgspec.structs.replace(grid(2, 2, 3), span=_columns(4)), True, "no whole grid"),
    ]
    for found, grids, reason in wrong:
        with pytest.raises(InvalidRequest, match=reason):
            check_media([found], ids, limits(media_width=WIDTH, media_grids=grids))


def _columns(columns: int) -> MediumSpan:
    return msgspec.structs.replace(grid(2, 2, 3).span, columns=columns)


def test_positions_are_in_the_joint_plan_of_groups_and_in_the_part_of_each() -> None:
    """The first group has a text that decodes; the second one prompts with images."""
    steps, _ = world()
    steps.add(1, prompt(3))
    rows = [steps.next()]
    plans = [plan_of(steps, rows[0])]
    seeing, store = world(media_grids=True, chunk_tokens=16)
    seeing.add(1, prompt(2, -6, 2), media=(grid(2, 2, 3),))
    seeing.next()
    store.land(store.loads[0])
    rows.append(seeing.next())
    plans.append(plan_of(seeing, rows[1]))
    joined = join_plans(1, plans, [None, None], offsets(rows, 4))
    whole = InputBatch(joined, (), 0).rotary_positions
    text, image = np.arange(3), [[2] * 6, [2, 2, 2, 3, 3, 3], [2, 3, 4] * 2]
    axes = [[0, 1, *image[axis], 5, 6] for axis in range(3)]
    np.testing.assert_array_equal(whole, [[*text, *axis] for axis in axes])
    parts = [InputBatch(joined, (), 0, group).own.rotary_positions for group in range(2)]
    np.testing.assert_array_equal(parts[0], text)
    np.testing.assert_array_equal(parts[1], axes)


def test_a_decode_step_goes_on_only_from_the_same_positions() -> None:
    lengths, plain = np.array([5, 8], np.int32), step_plan([1, 1])
    longer = msgspec.structs.replace(plain, kv_len=lengths + 1)
    shifted = msgspec.structs.replace(longer, position_offsets=np.array([0, -3], np.int32))
    moved = np.array([-3, 0], np.int32)
    assert _goes_on((lengths, None), longer)
    assert _goes_on((lengths, shifted.position_offsets), shifted)
    assert not _goes_on((lengths, None), plain)
    assert not _goes_on((lengths, moved), shifted)
    assert not _goes_on((lengths, None), shifted)
    assert not _goes_on((lengths, moved), longer)
