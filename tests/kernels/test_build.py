"""Building the C++ kernels: what is compiled again, what is refused, and what is never loaded."""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
from typing import TYPE_CHECKING

import pytest

from antiphon.kernels.cpu import build, extension

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="they are written for x86-64")
def test_where_there_is_a_compiler_the_kernels_run() -> None:
    """Tests of theirs are skipped without them: this one says that they were not."""
    assert extension.unavailable_reason() is None


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two units and a header that one of them includes; built into a folder of their own."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "answer.h").write_text("static inline int answer() { return 42; }\n")
    (folder / "inner.h").write_text('#include "answer.h"\n')
    (folder / "one.cpp").write_text('#include "inner.h"\nint one() { return answer(); }\n')
    (folder / "two.cpp").write_text("int two() { return 2; }\n")
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setattr(build, "CACHE_FOLDER", tmp_path / "kept")
    return folder


def objects() -> set[str]:
    return {path.name for path in build.CACHE_FOLDER.glob("*.o")}


def test_a_library_is_built_once(sources: Path) -> None:
    assert not build.library().exists()
    built = build.build()
    assert built == build.library()
    made = built.stat().st_mtime_ns
    assert build.build().stat().st_mtime_ns == made


def test_only_what_includes_a_changed_header_is_compiled_again(sources: Path) -> None:
    before, old = build.build(), objects()
    (sources / "answer.h").write_text("static inline int answer() { return 43; }\n")
    assert not build.library().exists()
    after, new = build.build(), objects()
    assert {name.split("-")[0] for name in new - old} == {"one"}
    assert len(new) == len(old) + 1
    assert after.exists()
    assert before.exists()


def test_another_source_is_another_arithmetic(sources: Path) -> None:
    before = build.version()
    assert build.version() == before
    (sources / "answer.h").write_text("static inline int answer() { return 43; }\n")
    assert build.version() != before


def test_what_was_built_long_ago_is_forgotten_but_for_what_is_used(sources: Path) -> None:
    before, old = build.build(), objects()
    for path in build.CACHE_FOLDER.iterdir():
        os.utime(path, (0, 0))
    (sources / "two.cpp").write_text("int two() { return 22; }\n")
    build.build()
    assert not before.exists()
    assert {name.split("-")[0] for name in objects() & old} == {"one"}


def test_an_error_of_the_compiler_is_raised_and_leaves_nothing(sources: Path) -> None:
    (sources / "two.cpp").write_text("int two() { return three; }\n")
    with pytest.raises(build.CannotBuild, match="three"):
        build.build()
    assert not build.library().exists()
    assert {path.suffix for path in build.CACHE_FOLDER.iterdir()} <= {".o"}


@pytest.mark.parametrize(
    ("module", "name", "value", "said"),
    [
        (shutil, "which", None, "apt install g\\+\\+"),
        (platform, "machine", "aarch64", "x86-64, and this is aarch64"),
        (sysconfig, "get_paths", {"include": "/nowhere"}, "apt install python3-dev"),
    ],
)
def test_what_is_missing_is_named(
    module: object,
    name: str,
    value: object,
    said: str,
    sources: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, name, lambda *_: value)
    with pytest.raises(build.CannotBuild, match=said):
        build.build()


def test_a_failure_is_one_line_and_an_exit_status(
    sources: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert build.main() == 1
    said = capsys.readouterr().err
    assert said.startswith("CPU kernels not built, torch's own are used: there is no g++")
    assert said.count("\n") == 1


def test_what_was_built_of_other_sources_is_not_loaded(sources: Path) -> None:
    build.build()
    (sources / "two.cpp").write_text("int two() { return 22; }\n")
    with pytest.raises(ImportError, match="python -m antiphon"):
        extension.load.__wrapped__()
