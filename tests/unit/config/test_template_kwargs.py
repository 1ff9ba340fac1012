"""Default template arguments: what is read, and what is refused with the reason."""

from __future__ import annotations

import json

import pytest
from tests.arguments import settings_of

from antiphon.config import gateway
from antiphon.config.errors import ConfigError

BYTES_MAX, KEYS_MAX = gateway.TEMPLATE_BYTES_MAX, gateway.TEMPLATE_KEYS_MAX
DEPTH_MAX = gateway.TEMPLATE_DEPTH_MAX
DEEP: object = 1
for _ in range(DEPTH_MAX + 1):
    DEEP = [DEEP]


def test_object_is_read() -> None:
    assert gateway.read_template_kwargs('{"a": {"b": [1]}}') == {"a": {"b": [1]}}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected a JSON object, such as {}, got a list"),
        ("null", "got null"),
        ("3", "got a number"),
        (json.dumps({"a": "x" * BYTES_MAX}), f"the limit is {BYTES_MAX} bytes"),
        (json.dumps({f"k{n}": 0 for n in range(KEYS_MAX + 1)}), f"the limit is {KEYS_MAX} keys"),
        (json.dumps({"a": DEEP}), f"'a' is nested deeper than {DEPTH_MAX} levels"),
        ("[" * 5000, "not valid JSON"),
        ('{"messages": []}', "'messages' comes from each request"),
        ('{"tools": []}', "'tools' comes from each request"),
        ('{"add_generation_prompt": true}', "'add_generation_prompt' comes from each request"),
    ],
)
def test_text_that_is_no_bounded_object_is_refused_at_start(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match="chat_template_kwargs") as caught:
        settings_of("--default-chat-template-kwargs", text)
    assert reason in str(caught.value)
