"""Models of the Hugging Face Hub: downloaded once into its cache.

Access to private models, mirrors and the cache directory are settings of the `huggingface_hub`
package itself (HF_TOKEN, HF_ENDPOINT, HF_HOME), which reads them from the environment.
"""

from __future__ import annotations

import logging
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.config.sourced_value import nearest
from antiphon.model_card.files import refuse_full_disk, weight_names
from antiphon.model_card.packaged import MODELS

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from antiphon.config.model import LoadConfig

log = logging.getLogger(__name__)

METADATA_PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model")
"""Config, tokenizer and templates, which every process of a model reads."""

DENSE = ("*_Dense/*",)
"""Dense layers after pooling, in subfolders of sentence-transformers models: small weights."""

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class PublishedFile(msgspec.Struct, frozen=True):
    size_bytes: int
    sha256: str | None
    """Checksum of large files; unset for files stored in git itself."""
    git_id: str
    """Git blob id, for small files."""


def is_hub_id(path: str) -> bool:
    """Whether a model path is a hub id: neither a short name nor a path on this machine."""
    return looks_like_id(path) and path not in MODELS and not Path(path).exists()


def looks_like_id(path: str) -> bool:
    """Whether a text has the form `owner/name` or `name`, and is not a GGUF file."""
    return _ID.fullmatch(path) is not None and not path.endswith(".gguf")


def fetch(repo: str, load: LoadConfig, *, weights: bool, endpoint: str | None = None) -> Path:
    """Download a model into the cache unless it is there, and return its folder. Blocks.

    `endpoint` is the URL of the hub, if it is not the package's own setting.
    """
    from huggingface_hub import errors  # noqa: PLC0415 (half a second that most starts save)

    try:
        return _fetch(repo, load, weights=weights, endpoint=endpoint)
    except (errors.HTTPError, OSError, ValueError) as error:  # pyright: ignore[reportPrivateImportUsage]
        unknown = isinstance(error, errors.RepositoryNotFoundError | errors.LocalEntryNotFoundError)
        guess = nearest(repo, MODELS) if unknown else ""
        raise ConfigError(f"{repo}: {_describe_error(error, load)}{guess}") from error


def list_published_files(
    repo: str, load: LoadConfig, *, endpoint: str | None = None
) -> dict[str, PublishedFile]:
    from huggingface_hub import HfApi, errors  # noqa: PLC0415

    if load.offline:
        raise ConfigError(f"{repo}: cannot fetch checksums from the hub while load.offline is set")
    try:
        return _published(HfApi(endpoint=endpoint), repo, load.revision or None)
    except (errors.HTTPError, OSError, ValueError) as error:  # pyright: ignore[reportPrivateImportUsage]
        raise ConfigError(f"{repo}: {_describe_error(error, load)}") from error


def _fetch(repo: str, load: LoadConfig, *, weights: bool, endpoint: str | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download  # noqa: PLC0415  # pyright: ignore[reportUnknownVariableType]

    cache = load.download_folder
    download = partial(
        snapshot_download,
        repo,
        revision=load.revision or None,
        cache_dir=str(Path(cache).expanduser()) if cache else None,
        local_files_only=load.offline,
        endpoint=endpoint,
    )

    folder = Path(download(allow_patterns=[*METADATA_PATTERNS]))
    if not weights:
        return folder
    files = _known(HfApi(endpoint=endpoint), repo, folder, load)
    _, names = weight_names(folder, files.keys(), load.format)
    if missing := [name for name in names if not (folder / name).exists()]:
        size_bytes = sum(files[name].size_bytes for name in missing if name in files)
        refuse_full_disk(folder, size_bytes, f"{repo}: weights need")
        log.info("fetching", extra={"model": repo, "files": len(missing), "bytes": size_bytes})
    return Path(download(allow_patterns=[*METADATA_PATTERNS, *DENSE, *names]))


def _known(api: HfApi, repo: str, folder: Path, load: LoadConfig) -> dict[str, PublishedFile]:
    """Return the files of a revision; those in the cache if the hub cannot be reached."""
    from huggingface_hub import errors  # noqa: PLC0415

    if not load.offline:
        try:
            return _published(api, repo, folder.name)
        except (errors.HTTPError, OSError) as error:  # pyright: ignore[reportPrivateImportUsage]
            log.warning("hub does not answer", extra={"model": repo, "reason": _line(error)})
    cached = {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
    return {name: PublishedFile(size, None, "") for name, size in cached.items()}


def _published(api: HfApi, repo: str, revision: str | None) -> dict[str, PublishedFile]:
    from huggingface_hub.hf_api import RepoFile  # noqa: PLC0415

    files: dict[str, PublishedFile] = {}
    for entry in api.list_repo_tree(repo, revision=revision):
        if isinstance(entry, RepoFile):
            sha256 = None if entry.lfs is None else entry.lfs.sha256
            files[entry.path] = PublishedFile(entry.size, sha256, entry.blob_id)
    return files


def _describe_error(error: Exception, load: LoadConfig) -> str:
    """Describe an error, with advice where an operator can fix it."""
    from huggingface_hub import errors  # noqa: PLC0415

    match error:
        case errors.GatedRepoError():
            return "gated model: request access on its page, then set HF_TOKEN"
        case errors.RepositoryNotFoundError():
            return "neither a local folder nor a Hugging Face model (private models need HF_TOKEN)"
        case errors.RevisionNotFoundError():
            return f"load.revision = {load.revision}: no such revision"
        case errors.LocalEntryNotFoundError() if load.offline:
            return f"not completely in the cache, and load.offline is set: {_line(error)}"
        case errors.LocalEntryNotFoundError():
            return f"neither a local folder nor in the cache, and the hub failed: {_line(error)}"
        case _:
            return _line(error)


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
