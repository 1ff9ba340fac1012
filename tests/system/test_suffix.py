"""A stack whose model has marks of a gap to fill: they stand where the operator's file says."""

from __future__ import annotations

import json
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from tests.system.stack import serving
from tests.system.thinker import copy_with_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.system.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

MARKS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
TEMPLATE = {
    "name": "middle_between",
    "fim_begin_token": "<fim_prefix>",
    "fim_middle_token": "<fim_middle>",
    "fim_end_token": "<fim_suffix>",
    "fim_position": "MIDDLE",
}
PROMPT, SUFFIX = "What is ", "? It is 42."
WRITTEN = f"<fim_prefix>{PROMPT}<fim_middle>{SUFFIX}<fim_suffix>"


@pytest.fixture(scope="module")
def filler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("filler")
    copy_with_tokens(folder, MARKS)
    file = folder / "form.json"
    file.write_text(json.dumps(TEMPLATE))
    with serving("--model-path", str(folder), "--completion-template", str(file)) as running:
        yield running


def post(at: Stack, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        at.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def test_a_gap_is_filled_as_the_marks_say(filler: Stack) -> None:
    asked = {"temperature": 0, "max_tokens": 8, "return_token_ids": True}
    filled = post(filler, "/v1/completions", asked | {"prompt": PROMPT, "suffix": SUFFIX})
    plain = post(filler, "/v1/completions", asked | {"prompt": WRITTEN})
    assert filled["choices"] == plain["choices"]
    ids = filled["choices"][0]["prompt_token_ids"]
    marks = [post(filler, "/v1/tokenize", marked(mark))["tokens"] for mark in MARKS]
    assert [len(each) for each in marks] == [1, 1, 1]
    begin, end, middle = (ids.index(each) for (each,) in marks)
    assert begin < middle < end == len(ids) - 1


def test_ollamas_door_fills_the_same_gap(filler: Stack) -> None:
    asked = {"stream": False, "options": {"temperature": 0, "num_predict": 8}}
    filled = post(filler, "/api/generate", asked | {"prompt": PROMPT, "suffix": SUFFIX})
    plain = post(filler, "/api/generate", asked | {"prompt": WRITTEN, "raw": True})
    told = ("response", "prompt_eval_count", "eval_count")
    assert [filled[name] for name in told] == [plain[name] for name in told]


def marked(mark: str) -> dict[str, Any]:
    return {"prompt": mark, "add_special_tokens": False}
