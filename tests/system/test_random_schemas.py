"""Random JSON schemas through the whole stack, with weights that say nothing but chance.

Whatever ends by itself validates, by a validator that knows nothing of grammars; whatever is cut
off by its length can be completed to what validates; whatever is refused has a reason that we know.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import Counter
from typing import TYPE_CHECKING, cast

import pytest
from openai import APIError, AsyncOpenAI
from tests.models.tiny import CONFIG, write_llama
from tests.system.stack import Stack, serving
from tests.unit.model_worker.grammar.json_schemas import (
    REFUSALS,
    check,
    form_of,
    random_json_schema,
)
from tests.unit.model_worker.grammar.speaker import guide_of, speak

from antiphon import embedded
from antiphon.config.worker import GrammarConfig
from antiphon.model_card.card import read_card
from antiphon.model_card.vocabulary import TokenVocabulary, read_vocabulary
from antiphon.model_worker.grammar.source import source_of
from antiphon.model_worker.grammar.xgrammar_backend import XgrammarCompiler

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from openai.types.shared_params import ResponseFormatJSONSchema

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

TOGETHER = 24
TOKENS_MAX = 250
OFTEN = b'"}],:0123456789abc'
"""What ends a part of JSON, and what names and values of the schemas are made of."""
ALL = 1000
FEW = 60


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("model") / "random"
    card = read_card(embedded.path())
    fields = {"vocab_size": card.vocabulary_size, "max_position_embeddings": 2048}
    write_llama(folder, {**CONFIG, **fields}, seed=1)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(embedded.path() / name, folder / name)
    # The same bits whatever runs beside: what a seed says here it says everywhere. By chance it
    # would begin to think, too, which no schema holds.
    with serving(
        *("--model-path", str(folder), "--served-model-name", "random"),
        *("--gateway-reasoning-parser", "none"),
        *("--model-dtype", "float32", "--enable-deterministic-inference"),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def vocabulary() -> TokenVocabulary:
    return read_vocabulary(embedded.path(), read_card(embedded.path()).vocabulary_size)


async def test_answers_under_a_few_random_schemas_validate(
    stack: Stack, vocabulary: TokenVocabulary
) -> None:
    await _hold(stack, vocabulary, range(FEW))


@pytest.mark.long
async def test_answers_under_a_thousand_random_schemas_validate(
    stack: Stack, vocabulary: TokenVocabulary
) -> None:
    await _hold(stack, vocabulary, range(1000, 1000 + ALL))


async def _hold(stack: Stack, vocabulary: TokenVocabulary, seeds: range) -> None:
    """Ask with a schema a seed, check what comes, and that not too much is cut off or refused."""
    places = asyncio.Semaphore(TOGETHER)
    async with AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=300
    ) as client:

        async def one(seed: int) -> str:
            async with places:
                return await _ask(client, vocabulary, seed)

        counts = Counter(await asyncio.gather(*map(one, seeds)))
    print(f"{len(seeds)} random schemas: {dict(counts)}")
    assert counts.total() == len(seeds)
    assert counts["stop"] > 0.5 * len(seeds), counts
    assert counts["refused"] < 0.35 * len(seeds), counts


async def _ask(client: AsyncOpenAI, vocabulary: TokenVocabulary, seed: int) -> str:
    """Ask for one answer, streamed or whole in turn; return how it ended once it is checked."""
    schema = random_json_schema(random.Random(seed))
    try:
        text, reason = await _answer(client, vocabulary, schema, seed)
    except APIError as error:  # a 400, or in the stream if the headers were out by then
        refusal = error
    else:
        if reason == "stop":
            check(schema, text)
        else:
            assert reason == "length", reason
            _check_beginning(vocabulary, schema, text, seed)
        return reason
    assert refusal.param == "response_format", refusal
    message = cast("dict[str, str]", refusal.body)["message"]
    assert REFUSALS.search(message), (seed, message)
    return "refused"


async def _answer(
    client: AsyncOpenAI, vocabulary: TokenVocabulary, schema: object, seed: int
) -> tuple[str, str | None]:
    form: dict[str, object] = {"name": "random", "schema": schema, "strict": True}
    asked = {
        "model": "random",
        "messages": [{"role": "user", "content": f"Say anything, number {seed}."}],
        "response_format": cast(
            "ResponseFormatJSONSchema", {"type": "json_schema", "json_schema": form}
        ),
        "max_tokens": TOKENS_MAX,
        "temperature": 1.0,
        "seed": seed,
        "logit_bias": {str(vocabulary.tokens.index(bytes([byte]))): 4 for byte in OFTEN},
    }
    if seed % 2:
        whole = await client.chat.completions.create(**asked)  # pyright: ignore
        (choice,) = whole.choices
        return choice.message.content or "", choice.finish_reason
    text, reason = "", None
    async for chunk in await client.chat.completions.create(stream=True, **asked):  # pyright: ignore
        for piece in chunk.choices:
            text += piece.delta.content or ""
            reason = piece.finish_reason or reason
    return text, reason


def _check_beginning(
    vocabulary: TokenVocabulary, schema: Mapping[str, object] | bool, text: str, seed: int
) -> None:
    """Fail unless what was cut off can be gone on with, to an end that validates."""
    end_ids = frozenset(read_card(embedded.path()).eos_ids)
    compiled = XgrammarCompiler(vocabulary, end_ids, GrammarConfig()).compile(
        source_of(form_of(schema), 20)
    )
    guide = guide_of(compiled, vocabulary)
    begun = text.rstrip("\ufffd").encode()  # a character may have been cut in two
    for byte in begun:
        assert guide.accept_token(vocabulary.tokens.index(bytes([byte]))) is None, (schema, text)
    # In an address braces are letters like others, and only its own marks lead to its end.
    closers = b'"]}@.'
    rest = speak(guide, vocabulary, seed=seed, tokens_max=4000, hurry=1.0, closers=closers)
    assert rest.finish is not None, (schema, text)
    check(schema, (begun + rest.text).decode())
