"""Codex, OpenAI's coding agent: it thinks, runs a command, and reads its output."""

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

COMMAND = "echo $((7 * 9 * 11))"
PRINTED = "693"
ANSWER = f"The command printed {PRINTED}."


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


def test_codex_runs_a_command_and_reports_its_output(
    scripted: ScriptedStack, tmp_path: Path
) -> None:
    scripted.script(
        (PRINTED, f"<think>It printed something.</think>{ANSWER}"),
        ("", thinking_call("exec_command", {"cmd": COMMAND})),
    )
    command, environment = codex(scripted.url, tmp_path, "Multiply 7, 9 and 11 in the shell.")
    ran = run_on_loopback(command, folder=tmp_path, environment=environment)
    events = [json.loads(line) for line in ran.output.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    assert ran.code == 0, ran.output
    assert [i["aggregated_output"] for i in items if i["type"] == "command_execution"] == [
        f"{PRINTED}\n"
    ]
    assert [i["text"] for i in items if i["type"] == "agent_message"] == [ANSWER]
    assert events[-1]["type"] == "turn.completed"
    assert len(scripted.prompts()) == 2


@pytest.mark.long
async def test_codex_is_answered_in_time_by_the_embedded_model(
    engine: Stack, tmp_path: Path
) -> None:
    first = await first_turn(
        engine, lambda url: codex(url, tmp_path, "What is 17 + 25?"), "/v1/responses", tmp_path
    )
    # The stack's limit of an answer may cut it, which is an end, and no error.
    *_, last = [line for line in bytes(first.body).splitlines() if line.startswith(b"event: ")]
    assert last in (b"event: response.completed", b"event: response.incomplete")
