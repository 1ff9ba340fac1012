"""Claude Code, Anthropic's coding agent: it thinks, runs a command, and reads its output."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from tests.clients.conftest import MODEL
from tests.clients.first_turn import first_turn
from tests.clients.programs import node_program, run_on_loopback
from tests.clients.scripts import thinking_call

if TYPE_CHECKING:
    from pathlib import Path

    from tests.clients.conftest import ScriptedStack
    from tests.system.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

COMMAND = "echo $((7 * 9 * 13))"
PRINTED = "819"
ANSWER = f"The command printed {PRINTED}."


def claude_code(url: str, prompt: str) -> tuple[list[str], dict[str, str]]:
    """Return Claude Code's command and environment, with all that calls home switched off."""
    flags = ("--dangerously-skip-permissions", "--output-format", "stream-json", "--verbose")
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "1024",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "IS_SANDBOX": "1",  # it asks for nothing then, even as root
    }
    return [str(node_program("claude")), "--print", *flags, prompt], environment


def test_claude_code_runs_a_command_and_reports_its_output(
    scripted: ScriptedStack, tmp_path: Path
) -> None:
    scripted.script(
        (PRINTED, f"<think>It printed something.</think>{ANSWER}"),
        ("", thinking_call("Bash", {"command": COMMAND, "description": "Multiply"})),
    )
    command, environment = claude_code(scripted.url, "Multiply 7, 9 and 13 in the shell.")
    ran = run_on_loopback(command, folder=tmp_path, environment=environment)
    assert ran.code == 0, ran.output
    events = [json.loads(line) for line in ran.output.splitlines() if line.startswith("{")]
    results = [
        block["content"]
        for event in events
        if event["type"] == "user"
        for block in event["message"]["content"]
        if block["type"] == "tool_result"
    ]
    assert results == [PRINTED]
    last = events[-1]
    assert (last["type"], last["is_error"], last["result"]) == ("result", False, ANSWER)
    assert len(scripted.prompts()) == 2


@pytest.mark.long
async def test_claude_code_is_answered_in_time_by_the_embedded_model(
    engine: Stack, tmp_path: Path
) -> None:
    first = await first_turn(
        engine, lambda url: claude_code(url, "What is 17 + 25?"), "/v1/messages", tmp_path
    )
    assert b"event: message_stop" in first.body
    assert b"event: error" not in first.body
