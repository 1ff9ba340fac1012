"""Cached folders with a model's description, converted from files in another format.

All services read config.json and tokenizer.json; the contents of GGUF, SentencePiece and Mistral
files are converted to these, in a folder whose name depends on the contents.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.model_card.chat_templates import MORE, PROCESSOR_CONFIGS, TOKENIZER_CONFIG
from antiphon.model_card.config_json import parse_json
from antiphon.model_card.converted.gguf_file import ROPE_FACTORS, gguf_config, gguf_tokenizer
from antiphon.model_card.converted.tokenizer_files import piece_tokenizer, tekken_tokenizer
from antiphon.model_card.weight_headers import read_gguf

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Json = dict[str, object]

VERSION = 2
"""Version of the converted files; a new number converts every folder again."""
CONFIG, TOKENIZER = "config.json", "tokenizer.json"
PIECES, TEKKEN = "tokenizer.model", "tekken.json"
_BESIDE = (
    *(CONFIG, TOKENIZER_CONFIG, "special_tokens_map.json", "generation_config.json"),
    *("params.json", *PROCESSOR_CONFIGS),
)
_TEMPLATES = ("*.jinja", f"{MORE}/*.jinja")


def gguf_folder(files: Sequence[Path], cache: Path) -> Path:
    """Return a folder with the description of the model in a GGUF file, or in its parts."""

    def contents() -> Mapping[str, Json | bytes]:
        headers = {file: read_gguf(file, lists=True) for file in files}
        first = files[0]
        tokenizer, card = gguf_tokenizer(first, headers[first])
        return {CONFIG: gguf_config(headers), TOKENIZER: tokenizer, TOKENIZER_CONFIG: card}

    digest = hashlib.sha256()
    for file in files:
        header = read_gguf(file)
        factors = header.tensors.get(ROPE_FACTORS)
        try:
            with file.open("rb") as stream:
                digest.update(stream.read(header.size_bytes))
                if factors is not None:  # the one tensor whose values are part of config.json
                    stream.seek(factors.start)
                    digest.update(stream.read(4 * factors.count))
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}") from error
    return _cached_folder(digest.hexdigest(), cache, contents)


def tokenizer_files_folder(folder: Path, cache: Path) -> Path | None:
    """Return a folder with a converted tokenizer.json and the files beside it; None without one."""
    source = next((folder / name for name in (PIECES, TEKKEN) if (folder / name).is_file()), None)
    if source is None:
        return None
    beside = [folder / name for name in _BESIDE if (folder / name).is_file()]
    beside += sorted(file for pattern in _TEMPLATES for file in folder.glob(pattern))
    read = piece_tokenizer if source.name == PIECES else tekken_tokenizer

    def contents() -> Mapping[str, Json | bytes]:
        copied = {str(file.relative_to(folder)): file.read_bytes() for file in beside}
        tokenizer, card = read(source)
        old = copied.get(TOKENIZER_CONFIG, b"{}")
        card |= parse_json(old, dict[str, object], folder / TOKENIZER_CONFIG)
        return {**copied, TOKENIZER: tokenizer, TOKENIZER_CONFIG: card}

    digest = hashlib.sha256()
    for file in (source, *beside):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder)} {len(content)}\n".encode() + content)
    return _cached_folder(digest.hexdigest(), cache, contents)


def _cached_folder(
    name: str, cache: Path, contents: Callable[[], Mapping[str, Json | bytes]]
) -> Path:
    """Return the folder of that name, written first if missing; safe under concurrent calls."""
    folder = cache / f"described-{VERSION}" / name[:32]
    if folder.is_dir():
        return folder
    files = contents()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
        try:
            for file, content in files.items():
                data = content if isinstance(content, bytes) else msgspec.json.encode(content)
                (new / file).parent.mkdir(exist_ok=True)
                (new / file).write_bytes(data)
            new.chmod(0o755)
            new.rename(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    except OSError as error:
        if not folder.is_dir():
            advice = "load.download_folder names a folder for such files"
            raise ConfigError(f"{folder}: {error.strerror}; {advice}") from error
    return folder
