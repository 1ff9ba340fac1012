"""What a request may say of sampling, and what is reported, through the whole stack."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer

from antiphon import embedded
from antiphon.client import Client
from antiphon.wire.errors import Unsupported
from antiphon.wire.sampling import AllowRange, TokenOutputParams

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from tests.system.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

QUESTION = "What is 12 + 30?"


async def test_an_openai_client_is_told_of_each_token_of_each_choice(client: AsyncOpenAI) -> None:
    asked: Any = {"model": "default", "messages": [{"role": "user", "content": QUESTION}]}
    answer = await client.chat.completions.create(
        **asked, n=2, temperature=0, logprobs=True, top_logprobs=4
    )
    hot = await client.chat.completions.create(**asked, n=3, temperature=4, seed=5, max_tokens=12)
    texts = {choice.message.content for choice in hot.choices}
    assert len(texts) == 3, "each choice has a seed of its own"
    for choice in answer.choices:
        assert choice.logprobs is not None
        tokens = choice.logprobs.content
        assert tokens is not None
        assert "".join(token.token for token in tokens) == choice.message.content
        for token in tokens:
            tops = [top.logprob for top in token.top_logprobs]
            assert tops == sorted(tops, reverse=True)
            assert len(tops) == 4
            assert token.logprob <= tops[0] <= 0
            assert sum(map(math.exp, tops)) <= 1.001


async def test_a_nats_client_is_told_of_its_prompt(stack: Stack) -> None:
    wanted = TokenOutputParams(logprobs=True, top=1, prompt_start=0)
    async with Client(stack.nats_url) as client:
        first = await client.complete(
            stack.model, QUESTION, temperature=0, details=wanted, token_texts=True
        )
        again = await client.complete(stack.model, QUESTION, temperature=0, details=wanted)
    details = first.details
    assert details is not None
    assert details.offset == 1 - first.usage.prompt_tokens
    assert details.end == first.usage.completion_tokens
    entries = list(details.details.iter_tokens())
    outputs = entries[-details.offset :]
    assert "".join(details.texts[entry.token_id] for entry in outputs) == first.text
    for entry in outputs:  # greedy: each token is the likeliest
        assert entry.top[0] == (entry.token_id, entry.logprob)
    assert again.details is not None
    for one, other in zip(entries, again.details.details.iter_tokens(), strict=True):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=0.05)


async def test_a_bias_and_a_processor_decide_what_is_said(stack: Stack) -> None:
    tokenizer = Tokenizer.from_file(str(embedded.path() / "tokenizer.json"))
    word = tokenizer.encode(" cat", add_special_tokens=False).ids[0]
    async with Client(stack.nats_url) as client:
        biased = await client.complete(
            stack.model, QUESTION, max_tokens=5, logit_bias={word: 100.0}
        )
        only = (AllowRange(first=word, last=word),)
        forced = await client.complete(stack.model, QUESTION, max_tokens=5, processors=only)
        penalised = await client.complete(
            stack.model,
            QUESTION,
            max_tokens=40,
            min_tokens=40,
            temperature=0,
            presence_penalty=2.0,
            frequency_penalty=2.0,
            repetition_penalty=2.0,
            details=TokenOutputParams(logprobs=True),
        )
    assert biased.text == forced.text == tokenizer.decode([word] * 5)
    assert penalised.details is not None
    tokens = [entry.token_id for entry in penalised.details.details.iter_tokens()]
    assert len(tokens) == 40
    assert len(set(tokens)) > 30, "it repeats itself"


async def test_hidden_states_are_refused_where_the_operator_allows_none(stack: Stack) -> None:
    async with Client(stack.nats_url) as client:
        with pytest.raises(Unsupported, match=r"batching\.hidden_states"):
            await client.complete(stack.model, QUESTION, details=TokenOutputParams(hidden=True))
