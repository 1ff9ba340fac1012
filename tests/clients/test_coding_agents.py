"""Coding agents, Claude Code and Codex: they think, run a command, and read its output."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.clients.conftest import MODEL, ScriptedStack, thinking_call
from tests.clients.programs import node_program, run_on_loopback
from tests.clients.relay import first_turn

if TYPE_CHECKING:
    from pathlib import Path

    from tests.system.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

COMMAND = "echo $((7 * 9 * 13))"
PRINTED = "819"
ANSWER = f"The command printed {PRINTED}."


def claude_code(url: str, folder: Path, prompt: str) -> tuple[list[str], dict[str, str]]:
    """Return Claude Code's command and environment, with all that calls home switched off."""
    del folder
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


def codex(url: str, folder: Path, prompt: str) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of Codex, with all that calls home switched off."""
    home = folder / "codex"
    home.mkdir()
    provider = f'{{name="antiphon", base_url="{url}/v1", wire_api="responses"}}'
    settings = (
        'model_provider="antiphon"',
        f"model_providers.antiphon={provider}",
        "analytics.enabled=false",
        "check_for_update_on_startup=false",
        "features.plugins=false",  # it would look for their list on GitHub
    )
    options = [word for setting in settings for word in ("-c", setting)]
    flags = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    program = str(node_program("codex"))
    return [program, "exec", *flags, *options, "-m", MODEL, prompt], {"CODEX_HOME": str(home)}


def run_command(agent: Any, call: str, scripted: ScriptedStack, folder: Path) -> list[Any]:
    """Have an agent run the command; return the events that it prints."""
    scripted.script((PRINTED, f"<think>It printed something.</think>{ANSWER}"), ("", call))
    command, environment = agent(scripted.url, folder, "Multiply 7, 9 and 13 in the shell.")
    ran = run_on_loopback(command, folder=folder, environment=environment)
    assert ran.code == 0, ran.output
    assert len(scripted.prompts()) == 2
    return [json.loads(line) for line in ran.output.splitlines() if line.startswith("{")]


def test_claude_code_runs_a_command_and_reports_its_output(
    scripted: ScriptedStack, tmp_path: Path
) -> None:
    call = thinking_call("Bash", {"command": COMMAND, "description": "Multiply"})
    events = run_command(claude_code, call, scripted, tmp_path)
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


def test_codex_runs_a_command_and_reports_its_output(
    scripted: ScriptedStack, tmp_path: Path
) -> None:
    call = thinking_call("exec_command", {"cmd": COMMAND})
    events = run_command(codex, call, scripted, tmp_path)
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    assert [i["aggregated_output"] for i in items if i["type"] == "command_execution"] == [
        f"{PRINTED}\n"
    ]
    assert [i["text"] for i in items if i["type"] == "agent_message"] == [ANSWER]
    assert events[-1]["type"] == "turn.completed"


@pytest.mark.long
@pytest.mark.parametrize(
    ("agent", "path", "ends"),
    [
        (claude_code, "/v1/messages", (b"event: message_stop",)),
        # The stack's limit of an answer may cut it, which is an end, and no error.
        (codex, "/v1/responses", (b"event: response.completed", b"event: response.incomplete")),
    ],
)
async def test_coding_agent_is_answered_in_time_by_the_embedded_model(
    agent: Any, path: str, ends: tuple[bytes, ...], engine: Stack, tmp_path: Path
) -> None:
    first = await first_turn(
        engine, lambda url: agent(url, tmp_path, "What is 17 + 25?"), path, tmp_path
    )
    *_, last = [line for line in bytes(first.body).splitlines() if line.startswith(b"event: ")]
    assert last in ends
    assert b"event: error" not in first.body
