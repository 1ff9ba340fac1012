"""Code in a model folder: never run, but named in the error where a model would need it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.registry import find_family

if TYPE_CHECKING:
    from antiphon.model_card.files import ModelFiles
    from antiphon.model_worker.model.spec import ModelFamily

log = logging.getLogger(__name__)


class _AutoMapConfig(msgspec.Struct):
    auto_map: dict[str, str | list[str | None]] = {}


def family_of(architectures: tuple[str, ...], files: ModelFiles) -> ModelFamily:
    """The family that serves a model with our own code, whatever code the folder contains.

    Raises:
        ModelLoadError: No family does; names the code that other servers would run.
        ConfigError: The `auto_map` of the config is malformed.
    """
    code = remote_code(files.config())
    try:
        family = find_family(architectures)
    except ModelLoadError as error:
        if not code:
            raise
        raise ModelLoadError(
            f"{error}; the folder's own code ({', '.join(code)}) is never run"
        ) from error
    if code:
        log.info("code of the model folder is not run", extra={"code": code})
    return family


def remote_code(config: bytes) -> tuple[str, ...]:
    """The code that a config maps: `file.py:Class` of each class, in order.

    Raises:
        ConfigError: The `auto_map` is malformed.
    """
    try:
        mapped = msgspec.json.decode(config, type=_AutoMapConfig).auto_map.values()
    except msgspec.DecodeError as error:
        raise ConfigError(f"config.json: {error}") from error
    targets = [
        target
        for value in mapped
        for target in ([value] if isinstance(value, str) else value)
        if target is not None
    ]
    return tuple(dict.fromkeys(_shown(target) for target in targets))


def _shown(target: str) -> str:
    """`repository--module.Class`, where the code is in another repository."""
    repository, _, local = target.rpartition("--")
    module, _, name = local.rpartition(".")
    return f"{repository}/{module}.py:{name}" if repository else f"{module}.py:{name}"
