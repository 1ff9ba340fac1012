"""Ids become texts again; templates get tools, calls and variables."""

from __future__ import annotations

import pytest
from tests.unit.tokenizer.requests import asks

from antiphon import embedded
from antiphon.tokenizer import model_tokenizer as vocabulary
from antiphon.tokenizer.encoding import EncodedPrompt, TextEncoder, decode
from antiphon.tokenizer.template import ChatTemplate
from antiphon.wire.codec import pack_ids, unpack_ids
from antiphon.wire.digests import namespace
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.ids import ModelName, RequestId
from antiphon.wire.tokenize import (
    ChatMessage,
    DecodeRequest,
    EncodeRequest,
    MessageToolCall,
    TemplateParams,
)

WORDS = vocabulary.read_model_tokenizer(embedded.path())
USER = (ChatMessage(role="user", content="hi"),)


def request(*rows: list[int], skip: bool = True) -> DecodeRequest:
    return DecodeRequest(
        request_id=RequestId("r"),
        model=ModelName("m"),
        token_ids=tuple(map(pack_ids, rows)),
        skip_special_tokens=skip,
        deadline_unix_ms=0,
    )


def encode(text: EncodeRequest) -> EncodedPrompt:
    (encoded,) = TextEncoder(WORDS, namespace("m", ""), 1000).encode([text])
    assert isinstance(encoded, EncodedPrompt)
    return encoded


def test_each_row_becomes_a_text():
    ids = list(unpack_ids(encode(asks(None, "one two")).token_ids))
    assert decode(WORDS, request(ids, [], [2, *ids])) == ("one two", "", "one two")
    assert decode(WORDS, request([2, *ids], skip=False)) == ("<|end|>one two",)


def test_an_id_beyond_the_vocabulary_is_refused():
    with pytest.raises(InvalidRequest, match="no token 5000"):
        decode(WORDS, request([1, 5000]))


def test_end_of_a_rendered_prompt_is_returned():
    assert encode(asks(USER, None)).text_end.endswith("<|user|>hi<|end|><|assistant|>")
    assert encode(asks(None, "hi")).text_end == ""


def test_a_template_sees_tools_calls_and_variables():
    source = (
        "{% set turn = messages[0] %}{{ tools[0].function.name }} {{ style }} "
        "{{ turn.tool_calls[0].function.arguments.at }} {{ turn.reasoning_content }} "
        "{{ add_generation_prompt }}"
    )
    called = ChatMessage(
        role="assistant",
        content="",
        reasoning_content="hm",
        tool_calls=(MessageToolCall(id="c", name="look", arguments='{"at": "Rome"}'),),
    )
    params = TemplateParams(
        generation_prompt=False,
        tools='[{"type": "function", "function": {"name": "look"}}]',
        options='{"style": "short", "messages": "mine"}',
    )
    text = ChatTemplate(source, {}).render((called,), params, continue_final=False)
    assert text == "look short Rome hm False"


@pytest.mark.parametrize(
    ("params", "arguments", "param"),
    [
        (TemplateParams(tools="{}"), "{}", "tools"),
        (TemplateParams(tools="["), "{}", "tools"),
        (TemplateParams(options="[]"), "{}", "chat_template_kwargs"),
        (TemplateParams(), "{", "messages"),
    ],
)
def test_what_is_not_json_is_refused(params: TemplateParams, arguments: str, param: str):
    turn = ChatMessage(
        role="assistant",
        content="",
        tool_calls=(MessageToolCall(id="", name="f", arguments=arguments),),
    )
    with pytest.raises(InvalidRequest) as refused:
        ChatTemplate("x", {}).render((turn,), params, continue_final=False)
    assert refused.value.param == param
