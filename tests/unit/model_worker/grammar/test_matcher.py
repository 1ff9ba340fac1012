"""What ends under a grammar is of the grammar, and the loop waits for no matcher for long."""

from __future__ import annotations

import codecs
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.worker import error_of
from tests.unit.model_worker.grammar.json_schemas import check, random_pattern, random_schema
from tests.unit.model_worker.grammar.speaker import allowed, guide_of, speak
from tests.unit.model_worker.grammar.words import END, VOCAB_SIZE, Word

from antiphon.model_worker.grammar.executor import MatcherExecutor, MatcherTask
from antiphon.model_worker.grammar.matcher import DeferredGrammarState, GrammarMatcher
from antiphon.model_worker.grammar.source import GrammarSource, source_of
from antiphon.model_worker.grammar.xgrammar_backend import (
    START,
    Utf8,
    XgrammarCompiler,
    XgrammarGrammar,
)
from antiphon.wire.base import FinishReason
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.sampling import Grammar, GrammarKind

if TYPE_CHECKING:
    from antiphon.model_card.vocabulary import TokenVocabulary

Compile = Callable[[GrammarKind, str], XgrammarGrammar]


@pytest.fixture(scope="module")
def compiled(compiler_of: Callable[..., XgrammarCompiler]) -> Compile:
    compiler = compiler_of()
    return lambda kind, text: compiler.compile(source_of(Grammar(kind=kind, text=text), 32))


@pytest.mark.parametrize("seed", range(50))
def test_what_ends_under_a_random_schema_is_json_of_that_schema(
    seed: int, compiled: Compile, vocabulary: TokenVocabulary
) -> None:
    schema = random_schema(random.Random(seed))
    grammar = compiled(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=seed % 2 == 0))
    ended = 0
    for voice in range(5):
        said = speak(guide_of(grammar, vocabulary), vocabulary, seed=voice, tokens_max=800)
        if said.finish is not None:
            assert said.finish.reason is FinishReason.STOP
            assert said.finish.matched_stop == END
            check(schema, said.text.decode())
            ended += 1
    assert ended >= 3


PATTERNS = [random_pattern(random.Random(seed)) for seed in range(50)]
PATTERNS += [".*", "[^a]+", r"\S+", "(ab|é)*x+", "[é-👋]{3,}"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_ends_under_a_pattern_matches_it(
    pattern: str, compiled: Compile, vocabulary: TokenVocabulary
) -> None:
    grammar = compiled(GrammarKind.REGEX, pattern)
    for voice in range(5):
        said = speak(guide_of(grammar, vocabulary), vocabulary, seed=voice, closers=b"")
        assert said.finish is not None
        assert said.finish.reason is FinishReason.STOP
        assert re.fullmatch(pattern, said.text.decode(), re.DOTALL), (pattern, said.text)


@pytest.mark.parametrize("seed", range(20))
def test_any_json_object_ends_and_parses(
    seed: int, compiled: Compile, vocabulary: TokenVocabulary
) -> None:
    grammar = compiled(GrammarKind.JSON_OBJECT, "")
    said = speak(guide_of(grammar, vocabulary), vocabulary, seed=seed, tokens_max=1500)
    assert said.finish is not None
    assert isinstance(json.loads(said.text), dict)


def test_rules_are_followed(compiled: Compile, vocabulary: TokenVocabulary) -> None:
    rules = 'root ::= "(" root ")" | "x" | "é世👋"'
    for voice in range(10):
        grammar = compiled(GrammarKind.EBNF, rules)
        text = speak(guide_of(grammar, vocabulary), vocabulary, seed=voice).text.decode()
        assert re.fullmatch(r"(\(*)(x|é世👋)(\)*)", text)
        assert text.count("(") == text.count(")")


TOOL = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
OLD = {
    "structures": [{"begin": "<call>", "schema": TOOL, "end": "</call>"}],
    "triggers": ["<call>"],
}
NEW = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<call>",
        "content": {"type": "json_schema", "json_schema": TOOL},
        "end": "</call>",
    },
}


@pytest.mark.parametrize("tag", [OLD, NEW], ids=["structures", "format"])
def test_a_tag_holds_json_of_its_schema(
    tag: dict[str, object], compiled: Compile, vocabulary: TokenVocabulary
) -> None:
    grammar = compiled(GrammarKind.STRUCTURAL_TAG, json.dumps(tag))
    guide = guide_of(grammar, vocabulary)
    begin = {token: id_ for id_, token in enumerate(vocabulary.tokens)}
    for byte in b"<call>":
        assert guide.accept_token(begin[bytes([byte])]) is None
    rest = speak(guide, vocabulary, seed=1).text
    content = rest[: rest.index(b"</call>")]
    assert set(json.loads(content)) == {"n"}
    assert not re.search(rb"\s{33}", content)


def test_white_space_has_a_bound(
    compiler_of: Callable[..., XgrammarCompiler], vocabulary: TokenVocabulary
) -> None:
    compiler = compiler_of(whitespace_max=3)
    grammar = compiler.compile(GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(TOOL)))
    texts = [speak(guide_of(grammar, vocabulary), vocabulary, seed=n).text for n in range(30)]
    assert not any(re.search(rb"\s{4}", text) for text in texts)
    assert any(re.search(rb"\s{3}", text) for text in texts)


def test_compact_json_has_one_space_after_commas_and_colons(
    compiler_of: Callable[..., XgrammarCompiler], vocabulary: TokenVocabulary
) -> None:
    compiler = compiler_of(compact_json=True)
    schema = {"type": "array", "items": TOOL, "minItems": 2, "maxItems": 2}
    grammar = compiler.compile(GrammarSource(GrammarKind.JSON_SCHEMA, json.dumps(schema)))
    for voice in range(10):
        text = speak(guide_of(grammar, vocabulary), vocabulary, seed=voice).text.decode()
        assert text == json.dumps(json.loads(text))


def test_special_tokens_write_nothing_and_so_are_never_allowed(
    compiled: Compile, vocabulary: TokenVocabulary
) -> None:
    guide = guide_of(compiled(GrammarKind.REGEX, "(.|<|\\||>)*"), vocabulary)
    special = [id_ for id_, token in enumerate(vocabulary.tokens) if not token]
    assert special == [0, 1, 2, 3, 4, 5, 1017]  # the role of tools came last
    assert set(special) & set(allowed(guide.masks[0], len(vocabulary.tokens))) == {END}


def test_after_the_end_of_the_grammar_only_an_end_may_come(
    compiled: Compile, vocabulary: TokenVocabulary
) -> None:
    guide = guide_of(compiled(GrammarKind.REGEX, "ab?"), vocabulary)
    ids = {token: id_ for id_, token in enumerate(vocabulary.tokens) if len(token) == 1}
    assert not guide.must_end()
    assert guide.accept_token(ids[b"a"]) is None
    assert not guide.must_end()
    assert set(allowed(guide.masks[0], 1024)) == {ids[b"b"], END}
    assert guide.accept_token(ids[b"b"]) is None
    assert guide.must_end()
    finish = guide.accept_token(END)
    assert finish is not None
    assert (finish.reason, finish.matched_stop) == (FinishReason.STOP, END)


def test_a_stop_token_without_text_ends_an_answer_too(
    compiled: Compile, vocabulary: TokenVocabulary
) -> None:
    grammar = compiled(GrammarKind.REGEX, "a")
    comma = vocabulary.tokens.index(b",")
    assert grammar.eos_ids((5, comma, 70_000)) == {END, 5}
    state = grammar.start((5, comma, 70_000))
    assert state.accept(vocabulary.tokens.index(b"a"))
    assert not state.accept(comma)
    assert state.accept(5)
    assert state.terminated


def test_a_token_that_is_not_allowed_ends_the_choice_as_our_fault(
    compiled: Compile, vocabulary: TokenVocabulary
) -> None:
    for wrong in (vocabulary.tokens.index(b"b"), END, 0, 1023):
        finish = guide_of(compiled(GrammarKind.REGEX, "a+"), vocabulary).accept_token(wrong)
        assert error_of(finish).code == "internal"


@pytest.mark.parametrize("seed", range(10))
def test_a_replayed_answer_stands_where_it_stood_at_every_cut(
    seed: int, compiled: Compile, vocabulary: TokenVocabulary
) -> None:
    schema = random_schema(random.Random(1000 + seed))
    grammar = compiled(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    said = speak(guide_of(grammar, vocabulary), vocabulary, seed=seed, tokens_max=60)
    for cut in range(len(said.ids) + (said.finish is None)):
        state = grammar.start(())
        assert all(state.accept(token) for token in said.ids[:cut])
        words = np.zeros(32, np.int32)
        mask = words.tolist() if state.fill(words) else None
        assert cut == len(said.masks) or mask == said.masks[cut]


@pytest.mark.parametrize("seed", range(10))
def test_what_is_taken_back_leaves_no_trace(
    seed: int, compiled: Compile, vocabulary: TokenVocabulary
) -> None:
    dice = random.Random(seed)
    grammar = compiled(GrammarKind.JSON_SCHEMA, json.dumps(random_schema(dice)))
    said = speak(guide_of(grammar, vocabulary), vocabulary, seed=seed, tokens_max=60)
    state, length = grammar.start(()), 0
    for _ in range(200):
        target = dice.randint(0, len(said.masks) - 1)
        state.rollback(max(0, length - target))
        assert all(state.accept(token) for token in said.ids[length:target])
        length = target
        words = np.zeros(32, np.int32)
        state.fill(words)
        assert words.tolist() == said.masks[target]


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (GrammarKind.REGEX, "[a", "Unclosed"),
        (GrammarKind.REGEX, r"(a)\1", "Backreference is not supported"),
        (GrammarKind.REGEX, r"\p{L}", "Unicode character class"),
        (GrammarKind.REGEX, "(" * 3000 + ")" * 3000, "Nest layer"),
        (GrammarKind.REGEX, "\ud800", "surrogates"),
        (GrammarKind.REGEX, "[^\\x00-\\U0010FFFF]", "no token may come next"),
        (GrammarKind.EBNF, "root ::= x", 'Rule "x" is not defined'),
        (GrammarKind.EBNF, "x ::= y", '"root" is not found'),
        (GrammarKind.EBNF, "root ::= root", "no token may come next"),
        (GrammarKind.JSON_SCHEMA, '{"type": "foo"}', 'Unsupported type "foo"'),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#/$defs/x"}', "Cannot find field"),
        (GrammarKind.JSON_SCHEMA, "false", "cannot accept any value"),
        (GrammarKind.STRUCTURAL_TAG, '{"format": {"type": "x"}}', "Format type not recognized"),
    ],
)
def test_a_mistake_is_one_line_without_the_compilers_places(
    kind: GrammarKind, text: str, message: str, compiled: Compile
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compiled(kind, text)
    assert caught.value.message.startswith("grammar: ")
    assert message in caught.value.message
    assert ".cc" not in caught.value.message
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 320


def test_an_ambiguous_answer_keeps_no_other_waiting(
    compiled: Compile, vocabulary: TokenVocabulary
) -> None:
    """Each further letter takes longer, here up to many seconds; a step waits for a moment."""
    monster = compiled(GrammarKind.REGEX, "((((a{1,90}){1,90}){1,90}){1,90}){1,90}")
    slow = [guide_of(monster, vocabulary) for _ in range(16)]
    plain = guide_of(compiled(GrammarKind.REGEX, "a*"), vocabulary)
    letter = vocabulary.tokens.index(b"a")
    threads = MatcherExecutor(patience_s=0.02)
    on_the_way: list[MatcherTask] = []
    left_behind = 0
    for _ in range(25):
        busy = {id(walk.matcher) for walk in on_the_way if not walk.done}
        walks = [MatcherTask(guide, [letter]) for guide in slow if id(guide) not in busy]
        mine = MatcherTask(plain, [letter])
        threads.submit([*walks, mine])
        left_behind += sum(not walk.done for walk in walks)
        while not mine.done:
            threads.wait()
        on_the_way += walks
    assert any(guide.slow for guide in slow)
    assert left_behind, "a step stood still"
    for walk in on_the_way:
        threads.cancel(walk)


AFTER = (20, 20, 21)
CAB = [5, 3, 4]


class Barren(Word):
    """Has nothing to go on with after its letters."""

    def fill(self, words: np.ndarray) -> bool:
        if self.place == len(self.letters) - 1:
            raise InvalidRequest("grammar: no token may come next")
        return super().fill(words)


class Raises(Word):
    """Ends as a matcher does that cannot go on."""

    def accept(self, token: int) -> bool:
        raise InvalidRequest("grammar: out of memory")


def guide(state: Word | DeferredGrammarState) -> GrammarMatcher:
    return GrammarMatcher(state, VOCAB_SIZE, frozenset({END}))


def test_a_matcher_that_raises_ends_its_own_choice() -> None:
    finish = guide(Raises("cab")).accept_token(CAB[0])
    assert error_of(finish).code == "invalid_request"


def test_a_sentence_is_followed_to_its_end() -> None:
    word = guide(Word("cab"))
    for token in CAB:
        assert not word.must_end()
        assert word.accept_token(token) is None
    assert word.must_end()
    finish = word.accept_token(END)
    assert finish is not None
    assert (finish.reason, finish.matched_stop, finish.error) == (FinishReason.STOP, END, None)


def test_a_choice_that_cannot_go_on_ends_with_the_reason() -> None:
    barren = guide(Barren("ab"))
    assert barren.accept_token(3) is None
    finish = barren.accept_token(4)
    assert error_of(finish).message == "grammar: no token may come next"
    with pytest.raises(InvalidRequest):
        guide(Barren(""))


def test_everything_is_allowed_until_the_grammar_begins() -> None:
    thinker = guide(DeferredGrammarState(Word("cab"), AFTER))
    for token in (20, 21, 20, 20, 20, END, 7, 20, 20, 21):
        assert thinker.masks[0] is None
        assert not thinker.must_end()
        assert thinker.accept_token(token) is None
    assert thinker.masks[0] is not None
    for token in CAB:
        assert thinker.accept_token(token) is None
    assert thinker.must_end()
    assert thinker.accept_token(END) is not None


@given(st.lists(st.sampled_from([3, 4, 5, 20, 21, END, -1, -2, -4, -9]), max_size=60))
def test_what_is_taken_back_of_a_deferred_grammar_leaves_no_trace(moves: list[int]) -> None:
    """Moves are tokens, or below 0 how many to take back."""
    state, tokens = DeferredGrammarState(Word("cab"), AFTER), list[int]()
    for move in moves:
        if move < 0:
            state.rollback(min(-move, len(tokens)))
            del tokens[len(tokens) - min(-move, len(tokens)) :]
        elif state.accept(move):
            tokens.append(move)
        fresh = DeferredGrammarState(Word("cab"), AFTER)
        assert all(fresh.accept(token) for token in tokens)
        assert fresh.terminated == state.terminated
        if not fresh.terminated:
            words, others = np.zeros((2, 2), np.int32)
            assert fresh.fill(words) == state.fill(others)
            assert words.tolist() == others.tolist()


def masks_of(matcher: GrammarMatcher) -> list[list[int] | None]:
    """The tokens that each of its masks allows."""
    return [None if mask is None else allowed(mask, VOCAB_SIZE) for mask in matcher.masks]


def test_each_draft_has_the_mask_of_what_follows_it() -> None:
    word = guide(Word("cab"))
    assert word.propose(CAB) == 3
    assert masks_of(word) == [[CAB[0]], [CAB[1]], [CAB[2]], [END]]
    assert [word.must_end(draft) for draft in range(4)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("drafts", "count"),
    [([], 0), ([4], 0), ([5, 4], 1), ([5, 3, 3, 4], 2), ([5, END], 1), ([END], 0)],
)
def test_drafts_end_before_the_first_forbidden_one(drafts: list[int], count: int) -> None:
    word = guide(Word("cab"))
    assert word.propose(drafts) == count
    assert masks_of(word) == [[letter] for letter in CAB[: count + 1]]


def test_no_draft_ends_an_answer() -> None:
    """Nothing can be verified after an end, and so none has a mask there."""
    word = guide(Word("cab"))
    assert word.propose([*CAB, END, 7]) == 3
    assert len(word.masks) == 4
    for token in CAB:
        assert word.accept_token(token) is None
    assert word.propose([END]) == 0
    assert word.accept_token(END) is not None


def test_drafts_end_before_one_after_which_nothing_may_come() -> None:
    barren = guide(Barren("ab"))
    assert barren.propose([3, 4]) == 1
    assert masks_of(barren) == [[3], [4]]
    assert barren.propose([3]) == 1


def test_proposing_changes_nothing_but_the_masks() -> None:
    word = guide(Word("cabcab"))
    for place, token in enumerate([*CAB, *CAB]):
        before = masks_of(word)[0]
        for drafts in ([9], [*CAB, *CAB][place:], [*CAB, *CAB, END][place:], []):
            word.propose(drafts)
            assert masks_of(word)[0] == before
        word.propose([*CAB, *CAB][place:])
        assert word.accept_token(token) is None
        assert len(word.masks) == 1, "masks of drafts outlive the step"
    assert word.must_end()


def test_a_row_of_several_tokens_is_rolled_back_as_a_whole() -> None:
    word = guide(Word("cabcab"))
    word.accept_token(C)
    word.propose([A, 4, C])
    for tokens in ([A, 4, C], [A], [A, 4]):
        task = MatcherTask(word, tokens)
        task.run()
        assert task.result() == [None] * len(tokens)
        word.rollback()
        assert masks_of(word) == [[A]]
    assert word.propose([A, 4, C]) == 3


def test_drafts_may_lead_into_a_deferred_grammar_and_through_it() -> None:
    thinker = guide(DeferredGrammarState(Word("cab"), AFTER))
    thought = [7, END, *AFTER]
    assert thinker.propose([*thought, *CAB, 9]) == 8
    assert masks_of(thinker) == [None] * 5 + [[5], [3], [4], [END]]
    assert masks_of(thinker)[: 1 + thinker.propose(thought)] == [None] * 5 + [[5]]
    assert thinker.propose([*AFTER, 9]) == 3
    for count, token in enumerate([*thought, *CAB]):
        rest = [*thought, *CAB][count:]
        assert thinker.propose([*rest, END]) == len(rest)
        assert thinker.accept_token(token) is None
    assert thinker.must_end()


@given(
    st.lists(st.sampled_from([3, 4, 5, 20, 21, END]), max_size=12),
    st.lists(st.sampled_from([3, 4, 5, 20, 21, END]), max_size=12),
)
def test_masks_along_drafts_are_those_of_accepting_them(known: list[int], draft: list[int]) -> None:
    matcher, other = (guide(DeferredGrammarState(Word("cab"), AFTER)) for _ in range(2))
    for token in known:
        if other.masks[0] is not None and token not in allowed(other.masks[0], VOCAB_SIZE):
            continue
        if (finish := other.accept_token(token)) is not None:
            return
        assert matcher.accept_token(token) == finish
    count = matcher.propose(draft)
    masks = masks_of(matcher)
    assert len(masks) == count + 1
    for place, token in enumerate([*draft[:count], None]):
        assert masks_of(other)[0] == masks[place]
        assert token is None or other.accept_token(token) is None


C, A = CAB[:2]
PATIENCE_S = 0.02
STILL_S = 1.0
"""Far longer than patience, on a busy machine too, and far shorter than a stuck task takes."""


class Stuck(Word):
    """Follows its second token when it is released."""

    def __init__(self, text: str, released: threading.Event) -> None:
        super().__init__(text)
        self.released = released

    def accept(self, token: int) -> bool:
        if self.place == 1:
            assert self.released.wait(20)
        return super().accept(token)


class Broken(Word):
    def accept(self, token: int) -> bool:
        raise ZeroDivisionError


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def submitted(
    threads: MatcherExecutor, guides: list[GrammarMatcher], token: int
) -> tuple[list[MatcherTask], float]:
    """Tasks that advance each matcher by a token, and how long the loop waited for them."""
    tasks = [MatcherTask(each, [token]) for each in guides]
    began = time.perf_counter()
    threads.submit(tasks)
    return tasks, time.perf_counter() - began


def finished(threads: MatcherExecutor, tasks: list[MatcherTask]) -> bool:
    until = time.perf_counter() + 10
    while not all(task.done for task in tasks) and time.perf_counter() < until:
        threads.wait()
    return all(task.done for task in tasks)


def test_tasks_that_take_no_time_are_done_at_once() -> None:
    threads = MatcherExecutor(patience_s=10.0)
    guides = [guide(Word("ca")) for _ in range(64)]
    for token, ends in ((C, None), (A, None), (END, FinishReason.STOP)):
        tasks, _ = submitted(threads, guides, token)
        assert all(task.done for task in tasks)
        for task in tasks:
            (finish,) = task.finishes
            assert (finish and finish.reason) == ends


def test_a_stuck_matcher_delays_neither_the_step_nor_the_others(
    released: threading.Event,
) -> None:
    threads = MatcherExecutor(PATIENCE_S)
    stuck, others = guide(Stuck("cab", released)), [guide(Word("cab")) for _ in range(8)]
    submitted(threads, [stuck, *others], C)
    tasks, kept_s = submitted(threads, [stuck, *others], A)
    assert kept_s < STILL_S
    assert stuck.slow
    assert not tasks[0].done
    assert finished(threads, tasks[1:])
    released.set()
    assert finished(threads, tasks)
    assert tasks[0].finishes == [None]


def test_a_step_is_bounded_however_many_are_stuck(released: threading.Event) -> None:
    threads = MatcherExecutor(PATIENCE_S, stuck_max=2)
    guides = [guide(Stuck("cab", released)) for _ in range(64)]
    submitted(threads, guides, C)
    tasks, kept_s = submitted(threads, guides, A)
    assert kept_s < STILL_S
    free = guide(Word("cab"))
    for _ in range(4):  # each finds one more of them stuck, up to the bound
        mine, kept_s = submitted(threads, [free], C)
        assert kept_s < STILL_S
        if not mine[0].done:
            break
    released.set()
    assert finished(threads, tasks)


def test_a_cancelled_task_does_not_hold_up_the_slow_ones(
    released: threading.Event,
) -> None:
    threads = MatcherExecutor(PATIENCE_S)
    gone, slow = guide(Stuck("cab", released)), guide(Word("cab"))
    gone.slow = slow.slow = True
    threads.submit([MatcherTask(gone, [C])])
    (stuck,), _ = submitted(threads, [gone], A)
    behind = MatcherTask(slow, [C, A])
    threads.submit([behind])
    threads.wait()
    assert not behind.done
    threads.cancel(stuck)
    assert finished(threads, [behind])
    waiting = MatcherTask(slow, [C])
    threads.cancel(waiting)  # it never began


def test_an_unexpected_error_is_raised_in_the_loop() -> None:
    threads = MatcherExecutor(patience_s=10.0)
    tasks, _ = submitted(threads, [guide(Broken("cab"))], C)
    with pytest.raises(ZeroDivisionError):
        tasks[0].result()
    tasks, _ = submitted(threads, [guide(Word("cab"))], C)
    assert tasks[0].done


def test_a_matcher_is_rolled_back_to_its_mark() -> None:
    word = guide(Word("cab"))
    word.accept_token(C)
    assert word.masks[0] is not None
    before = word.masks[0].tolist()
    for _ in range(3):
        MatcherTask(word, [A, 4]).run()
        assert word.masks[0].tolist() != before
        word.rollback()
        assert word.masks[0].tolist() == before


BYTES = Utf8([b"", *(bytes([byte]) for byte in range(256))])


def allows(state: int, token: int) -> bool:
    return bool(BYTES.masks[state][token // 32] >> token % 32 & 1)


def wellformed(text: bytes) -> bool:
    """Whether a text is the beginning of one that decodes."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(text)
    except UnicodeDecodeError:
        return False
    # Python takes half of a surrogate for something that is still to come.
    return not (len(text) > 1 and text[-2] == 0xED and text[-1] >= 0xA0)


@given(st.text(max_size=8).map(str.encode), st.binary(max_size=3))
def test_a_byte_is_allowed_if_and_only_if_the_text_can_still_become_well_formed(
    text: bytes, rest: bytes
) -> None:
    state, said = START, b""
    for byte in text + rest:
        assert allows(state, 1 + byte) == wellformed(said + bytes([byte]))
        if not allows(state, 1 + byte):
            return
        state = BYTES.after(state, 1 + byte)
        said += bytes([byte])
        assert (state == START) == wellformed(said + b"a")
        assert allows(state, 0) == (state == START), "an answer ended within a character"


@pytest.mark.parametrize(
    "text",
    [
        b"\xed\xa0\x80",
        b"\xf0\x8f\xbf\xbf",
        b"\xe0\x9f\xbf",
        b"\xc0\x80",
        b"\xf4\x90\x80\x80",
        b"\x80",
    ],
    ids=["surrogate", "long four", "long three", "long two", "beyond", "stray"],
)
def test_what_no_character_is_made_of_is_forbidden_in_one_token_and_in_several(text: bytes) -> None:
    whole = Utf8([text, b"a" + text, text[:1], b"ok"])
    assert whole.masks[START].tolist() == [0b1000 | (wellformed(text[:1]) << 2)]


@given(
    st.lists(st.text(max_size=4).map(str.encode) | st.binary(max_size=4), min_size=1, max_size=40)
)
def test_a_token_is_allowed_as_its_bytes_are(tokens: list[bytes]) -> None:
    utf8 = Utf8(tokens)
    for text in (b"", b"\xc3", b"\xe4\xb8", b"\xed", b"\xf0\x9f"):
        state = START
        for byte in text:
            state = BYTES.after(state, 1 + byte)
        bits = np.unpackbits(utf8.masks[state].view(np.uint8), bitorder="little")
        for token, written in enumerate(tokens):
            fits = wellformed(text + written) if written else state == START
            assert bits[token] == fits


def test_a_token_without_text_is_refused_without_a_word(
    compiled: Compile, vocabulary: TokenVocabulary, capfd: pytest.CaptureFixture[str]
) -> None:
    """Drafts may hold any token; xgrammar's own check writes a line about each."""
    textless = [token for token, text in enumerate(vocabulary.tokens) if not text and token != END]
    matcher = compiled(GrammarKind.REGEX, "a+").start(())
    assert textless
    assert not any(matcher.accept(token) for token in textless)
    assert capfd.readouterr() == ("", "")
