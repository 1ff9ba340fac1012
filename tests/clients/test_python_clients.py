"""Python's frameworks over the OpenAI API: structured output, tools that run, typed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.clients.conftest import MODEL, ScriptedStack, call, thinking_call
from tests.clients.programs import python_of, run_on_loopback
from tests.clients.relay import first_turn

if TYPE_CHECKING:
    from tests.system.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

ENDED = (b"event: response.completed", b"event: response.incomplete")
"""The stack's limit of an answer may cut it, which is an end, and no error."""
PROGRAMS = Path(__file__).parent / "python"
MEASURED = "it has 21 degrees"
QUIET = {"OTEL_SDK_DISABLED": "true"}
LONG = "with_semantic_kernel"
"""The program that only the long run has an environment for."""


def program(name: str, url: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Return the command of one of the programs beside this file, and its environment."""
    python = python_of("long" if name == LONG else "agents")
    words = [str(python), str(PROGRAMS / f"{name}.py")]
    return [*words, f"{url}/v1", MODEL, *arguments], QUIET


def run_program(name: str, stack: ScriptedStack, folder: Path, *arguments: str) -> str:
    """Run one of the programs beside this file; return its last line."""
    command, environment = program(name, stack.url, *arguments)
    ran = run_on_loopback(command, folder=folder, environment=environment)
    assert ran.code == 0, ran.output
    return ran.output.rstrip().splitlines()[-1]


def test_instructor_reads_a_model_from_a_response(scripted: ScriptedStack, tmp_path: Path) -> None:
    scripted.script(("", call("User", {"name": "Ada", "age": 36})))
    read = run_program("with_instructor", scripted, tmp_path)
    assert json.loads(read) == {"name": "Ada", "age": 36}


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_openai_agents_call_a_tool_and_return_their_output_type(
    api: str, scripted: ScriptedStack, tmp_path: Path
) -> None:
    scripted.script(
        (MEASURED, '{"city": "Oslo", "degrees": 21}'),
        ("", thinking_call("measure", {"city": "Oslo"})),
    )
    output = run_program("with_openai_agents", scripted, tmp_path, api)
    assert json.loads(output) == {"city": "Oslo", "degrees": 21}


@pytest.mark.long
def test_semantic_kernel_calls_a_function_by_itself(
    scripted: ScriptedStack, tmp_path: Path
) -> None:
    scripted.script(
        (MEASURED, "It has 21 degrees in Oslo."),
        ("", thinking_call("thermometer-measure", {"city": "Oslo"})),
    )
    answer = run_program(LONG, scripted, tmp_path)
    assert answer == "It has 21 degrees in Oslo."


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "arguments", "path", "ends"),
    [
        ("with_instructor", (), "/v1/responses", (b'"error":null',)),
        ("with_openai_agents", ("responses",), "/v1/responses", ENDED),
        ("with_openai_agents", ("chat",), "/v1/chat/completions", (b"data: [DONE]",)),
        (LONG, (), "/v1/chat/completions", (b'"finish_reason":"',)),
    ],
)
async def test_python_client_is_answered_in_time_by_the_embedded_model(
    name: str,
    arguments: tuple[str, ...],
    path: str,
    ends: tuple[bytes, ...],
    engine: Stack,
    tmp_path: Path,
) -> None:
    first = await first_turn(engine, lambda url: program(name, url, *arguments), path, tmp_path)
    assert any(end in first.body for end in ends)
    assert b'"error":{' not in first.body
