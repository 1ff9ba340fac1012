"""Grammars with the embedded model: it says what parses, beside others and moved at any token."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.support.reports import ProgressReader, new_ids
from tests.support.worker import state as worker_state
from tokenizers import Tokenizer

from antiphon import embedded
from antiphon.config.cluster import ClusterConfig
from antiphon.config.model import Dtype, ModelConfig
from antiphon.config.settings import Settings
from antiphon.config.worker import CacheConfig
from antiphon.model_worker.batching.flights import InTurn
from antiphon.model_worker.batching.loop import BatchingLoop
from antiphon.model_worker.batching.mailbox import Mail, Mailbox
from antiphon.model_worker.batching.state import ChoiceKey, Finish
from antiphon.model_worker.grammar.backend import GrammarBackend, GrammarMetrics
from antiphon.model_worker.startup.engine import Engine, open_engine
from antiphon.telemetry.metrics import Metrics
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.ids import RequestId
from antiphon.wire.sampling import Grammar, GrammarKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from antiphon.model_worker.batching.state import RequestState
    from antiphon.model_worker.grammar.matcher import GrammarMatcher

TOKENIZER = Tokenizer.from_file(str(embedded.path() / "tokenizer.json"))
SETTINGS = Settings(model=ModelConfig(dtype=Dtype.FLOAT32), cache=CacheConfig(tokens_max=4096))
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "colours": {"type": "array", "items": {"enum": ["red", "grün"]}, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "colours", "age"],
}
PROMPT = "<|user|>What colour is the sky?<|end|><|assistant|>"


def schema() -> Grammar:
    return Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(PERSON))


def regex(text: str, begins_after: tuple[int, ...] = ()) -> Grammar:
    return Grammar(kind=GrammarKind.REGEX, text=text, begins_after=begins_after)


def state(grammar: Grammar | None, seed: int, **sampling: object) -> RequestState:
    prompt = TOKENIZER.encode(PROMPT, add_special_tokens=False).ids
    params = {"max_new_tokens": 400, "temperature": 1.5, "seed": seed, **sampling}
    return worker_state(prompt, request_id=RequestId(f"r{seed}"), grammar=grammar, **params)


class Said(msgspec.Struct):
    ids: list[int]
    finish: Finish | None = None

    @property
    def text(self) -> str:
        return TOKENIZER.decode(self.ids, skip_special_tokens=True)


class Worker:
    """The engine of a worker, and what compiles its grammars."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine = engine
        self.settings = settings
        self.loop = BatchingLoop(engine.core, InTurn(engine.runner), Mailbox(1), lambda _: None)

    def guides(self, states: Sequence[RequestState]) -> list[GrammarMatcher | None]:
        async def make() -> list[GrammarMatcher | None]:
            vocab_size = self.engine.core.limits.vocab_size
            opener = self.engine.open_compiler
            async with asyncio.TaskGroup() as group:
                grammars = GrammarBackend(
                    self.settings.grammar, vocab_size, opener, group, GrammarMetrics(Metrics())
                )
                made = [
                    None if state.sampling.grammar is None else await grammars.matcher(state)
                    for state in states
                ]
                grammars.close()
            return made

        return asyncio.run(make())

    def run(self, *states: RequestState) -> list[Said]:
        """What these say, all at once."""
        said = {
            ChoiceKey(number): Said(list(unpack_ids(state.output_ids)))
            for number, state in enumerate(states)
        }
        runs = zip(states, self.guides(states), strict=True)
        mail = Mail(runs=dict(zip(said, runs, strict=True)))
        reader = ProgressReader()
        while not self.engine.core.idle or mail.runs:
            report = self.loop.turn(mail)
            for news in reader.read(report.progress):
                said[news.key].ids += new_ids(news)
                said[news.key].finish = news.finish
            mail = Mail()
        return list(said.values())


@pytest.fixture(scope="module")
def worker() -> Worker:
    return Worker(open_engine(SETTINGS), SETTINGS)


def test_answers_parse_and_stop_whatever_they_run_beside(worker: Worker) -> None:
    states = [state(schema(), seed) for seed in range(6)]
    states += [state(regex("(ja|nein|世界|👋){2,5}"), seed) for seed in range(6)]
    states += [state(None, seed) for seed in range(4)]
    together = worker.run(*states)
    for said in together[:6]:
        assert said.finish is not None
        assert said.finish.reason == "stop"
        person = json.loads(said.text)
        assert set(person) == {"name", "colours", "age"}
        assert len(person["name"]) <= 8
        assert set(person["colours"]) <= {"red", "grün"}
        assert 0 <= person["age"] <= 150
    for said in together[6:12]:
        assert re.fullmatch("(ja|nein|世界|👋){2,5}", said.text)
    for index in (0, 7, 13):
        assert worker.run(states[index])[0].ids == together[index].ids


def test_greedy_answers_are_guided_too(worker: Worker) -> None:
    (said,) = worker.run(state(regex("[0-9]{3}-[0-9]{2}"), 0, temperature=0.0))
    assert re.fullmatch("[0-9]{3}-[0-9]{2}", said.text)


def test_what_is_moved_at_any_token_goes_on_as_if_it_had_stayed(worker: Worker) -> None:
    whole_state = state(schema(), 3)
    (whole,) = worker.run(whole_state)
    moved = [
        msgspec.structs.replace(whole_state, output_ids=pack_ids(whole.ids[:cut]))
        for cut in range(0, len(whole.ids) + 1, 3)
    ]
    assert {tuple(said.ids) for said in worker.run(*moved)} == {tuple(whole.ids)}


def test_end_tokens_that_are_ignored_still_end_a_grammar(worker: Worker) -> None:
    (said,) = worker.run(state(regex("[ab]{4}"), 1, ignore_eos=True))
    assert re.fullmatch("[ab]{4}", said.text)
    assert said.finish is not None
    assert said.finish.reason == "stop"


def test_a_grammar_that_must_end_does_so_before_the_least_length(worker: Worker) -> None:
    several = worker.run(*(state(regex("a{1,9}"), seed, min_new_tokens=3) for seed in range(8)))
    assert all(len(said.ids) >= 3 or said.text == "a" * 9 for said in several)
    (short,) = worker.run(state(regex("ab"), 0, min_new_tokens=30))
    assert short.text == "ab"


def test_a_grammar_may_begin_after_thinking(worker: Worker) -> None:
    closing = TOKENIZER.encode(" is", add_special_tokens=False).ids
    grammar = regex("[0-9]{2}", begins_after=tuple(closing))
    biased = worker.run(*(state(grammar, seed, temperature=1.0) for seed in range(12)))
    thought = [said for said in biased if closing[0] in said.ids]
    assert thought
    for said in thought:
        rest = said.ids[said.ids.index(closing[0]) + 1 :]
        assert re.fullmatch("[0-9]{2}", TOKENIZER.decode(rest).strip())
        assert said.finish is not None
        assert said.finish.reason == "stop"


def test_few_pages_and_long_waits_leave_no_trace() -> None:
    pages = ClusterConfig(page_tokens=16)
    small = msgspec.structs.replace(SETTINGS, cache=CacheConfig(tokens_max=192), cluster=pages)
    tight, roomy = Worker(open_engine(small), small), Worker(open_engine(SETTINGS), SETTINGS)
    states = [state(schema(), seed, max_new_tokens=120) for seed in range(8)]
    assert [said.ids for said in tight.run(*states)] == [said.ids for said in roomy.run(*states)]
    assert tight.engine.core.planner.retractions > 0
    assert tight.engine.core.pools.used() == tight.engine.core.pools.loose()
