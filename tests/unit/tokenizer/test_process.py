"""`python -m antiphon.tokenizer` on a folder that it cannot serve."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path

from tests.support.nats import NatsServer

from antiphon import embedded


async def test_a_broken_model_card_is_one_line_and_exit_code_3(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(embedded.path(), tmp_path / "model"))
    (folder / "config.json").write_text("{")
    async with NatsServer() as server, asyncio.timeout(20):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "antiphon.tokenizer", "--instance", "tokenizer-0"),
            *("--bus-url", server.url, "--model-path", str(folder)),
            stderr=asyncio.subprocess.PIPE,
        )
        _, log = await process.communicate()
    assert process.returncode == 3
    assert f"{folder}/config.json: Input data was truncated" in log.decode()
    assert "Traceback" not in log.decode()
