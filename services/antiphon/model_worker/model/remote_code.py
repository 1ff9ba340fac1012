"""Code in a model folder: never run, but named where a model cannot be served without it."""

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
    """The family that serves a model, by our own code whatever the folder brings.

    Raises:
        ModelLoadError: None does; it names the code that others would have run.
        ConfigError: It cannot be told which code that is.
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
    """What a config asks to have run: `file.py:Class` of each class that it maps, in its order.

    Raises:
        ConfigError: It does not say so as others do.
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
    """`repository--module.Class`, where another repository brings it."""
    repository, _, local = target.rpartition("--")
    module, _, name = local.rpartition(".")
    return f"{repository}/{module}.py:{name}" if repository else f"{module}.py:{name}"
