"""Chat templates render as model folders expect, and cannot reach out of their sandbox."""

from __future__ import annotations

import pytest

from antiphon.tokenizer.template import ChatTemplate
from antiphon.wire.errors import InvalidRequest
from antiphon.wire.tokenize import ChatMessage, MessageToolCall

TURNS = """\
{% for message in messages %}
    {% if message.role == 'tool' %}
        {{ raise_exception('tool messages are not known') }}
    {% endif %}
<{{ message.role }}>{{ message.content | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}
<assistant>{% endif %}"""


def say(*turns: tuple[str, str]) -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage(role=role, content=content) for role, content in turns)


def template(source: str = TURNS) -> ChatTemplate:
    return ChatTemplate(source, {"eos_token": "</s>"})


def test_blocks_leave_no_blank_lines():
    text = template().render(say(("user", "hi"), ("assistant", "yo")), continue_final=False)
    assert text == "<user>hi</s>\n<assistant>yo</s>\n<assistant>"


def test_a_continued_message_is_left_open():
    text = template().render(say(("user", "hi"), ("assistant", " and so ")), continue_final=True)
    assert text == "<user>hi</s>\n<assistant>and so"


def test_a_template_that_hides_the_last_message_cannot_continue_it():
    with pytest.raises(InvalidRequest, match="cannot be continued"):
        template("{{ messages[0].content }}").render(
            say(("user", "hi"), ("assistant", "zzz")), continue_final=True
        )


def test_what_the_template_refuses_is_the_callers_error_in_its_words():
    with pytest.raises(InvalidRequest, match="tool messages are not known") as caught:
        template().render(say(("tool", "x")), continue_final=False)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% for i in range(10**9) %}{{ i }}{% endfor %}",
    ],
)
def test_the_sandbox_holds(source: str):
    with pytest.raises(InvalidRequest):
        template(source).render(say(("user", "x")), continue_final=False)


def test_generation_marks_and_loop_controls_are_understood():
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    text = template(source).render(say(("user", "a"), ("assistant", "b")), continue_final=False)
    assert text == "b"


def test_json_keeps_letters_and_angle_brackets():
    text = template("{{ messages | tojson }}").render(say(("user", "<é>")), continue_final=False)
    assert text == '[{"role": "user", "content": "<é>"}]'


CALLED = (
    ChatMessage(
        role="assistant",
        content="",
        tool_calls=(MessageToolCall(id="c", name="f", arguments='{"a":"é"}'),),
    ),
)
ARGUMENTS = "messages[0].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("source", "written"),
    [
        (f"{{{{ {ARGUMENTS} | tojson }}}}", '{"a": "é"}'),
        (f"{{% for k, v in {ARGUMENTS} | items %}}{{{{ k }}}}={{{{ v }}}}{{% endfor %}}", "a=é"),
        (f"{{{{ {ARGUMENTS}.a }}}}", "é"),
        (f"{{{{ 'args ' + {ARGUMENTS} + '!' }}}}", 'args {"a":"é"}!'),
        (f"{{{{ 'args ' ~ {ARGUMENTS} }}}}", 'args {"a":"é"}'),
        (f"{{{{ {ARGUMENTS} }}}}", '{"a":"é"}'),
        (f"{{{{ {ARGUMENTS} is mapping and {ARGUMENTS} is not string }}}}", "True"),
    ],
)
def test_arguments_are_an_object_to_some_templates_and_text_to_others(source: str, written: str):
    assert template(source).render(CALLED, continue_final=False) == written


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "[" * 100_000])
def test_arguments_that_are_no_object_are_the_callers_error(arguments: str):
    call = MessageToolCall(id="c", name="f", arguments=arguments)
    turns = (ChatMessage(role="assistant", content="", tool_calls=(call,)),)
    with pytest.raises(InvalidRequest, match="no JSON object"):
        template("{{ messages }}").render(turns, continue_final=False)


def test_developer_is_system_where_the_template_does_not_know_it():
    turns = say(("system", "a"), ("developer", "b"), ("user", "c"), ("developer", "d"))
    text = template().render(turns, continue_final=False)
    assert text == template().render(
        say(("system", "a\n\nb"), ("user", "c"), ("system", "d")), continue_final=False
    )
    only = template().render(say(("developer", "b"), ("user", "c")), continue_final=False)
    assert only == template().render(say(("system", "b"), ("user", "c")), continue_final=False)


def test_developer_stays_where_the_template_knows_it():
    source = "{% for m in messages %}{{ 'dev' if m.role == 'developer' else m.role }};{% endfor %}"
    turns = say(("system", "a"), ("developer", "b"), ("user", "c"))
    assert template(source).render(turns, continue_final=False) == "system;dev;user;"
