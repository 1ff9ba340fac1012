"""Makes an engine that is ready to run: the model, its limits and its page pools."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.model_card.card import read_card
from antiphon.model_card.files import ModelLocation, files_at
from antiphon.model_card.pooling import module_files, read_pooling
from antiphon.model_card.served_model import model_files, tokenizer_path
from antiphon.model_card.vocabulary import tokenizer_eos_ids
from antiphon.model_worker.cache.table import CachePools
from antiphon.model_worker.grammar.backend import no_compiler, open_compiler
from antiphon.model_worker.startup import checksums
from antiphon.model_worker.startup.engine_core import open_engine_core
from antiphon.resolve.device import detect_device
from antiphon.resolve.resolved_config import ResolvedConfig as Resolved
from antiphon.resolve.resolved_config import resolve, table
from antiphon.service.sockets import CannotStart

if TYPE_CHECKING:
    from collections.abc import Callable

    from antiphon.config.settings import Settings
    from antiphon.model_card.files import ModelFiles
    from antiphon.model_worker.batching.engine_core import EngineCore
    from antiphon.model_worker.batching.plan import PlanRunner
    from antiphon.model_worker.batching.state import EngineLimits
    from antiphon.model_worker.grammar.backend import GrammarCompiler
    from antiphon.model_worker.runner.open import OpenModel
    from antiphon.resolve.device import HostDevice
    from antiphon.resolve.resolved_value import ResolvedValue

log = logging.getLogger(__name__)

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine core and the runner of the batching loop."""

    core: EngineCore
    runner: PlanRunner
    resolved: Resolved | None = None
    """The resolved configuration; None for an engine that runs no model."""
    open_compiler: Callable[[], GrammarCompiler] = no_compiler
    """Makes the grammar compiler."""

    @property
    def numerics_digest(self) -> str:
        """Digest of the numerics, if inference is deterministic; else empty."""
        if self.resolved is None or not self.resolved.deterministic.value:
            return ""
        return self.resolved.bits.value


def open_engine(settings: Settings) -> Engine:
    """Load the model and make its page pools. Blocks for seconds.

    Raises:
        CannotStart: Settings, model folder or memory do not allow it.
    """
    try:
        files = model_files(settings)
        checksums.verify(files, settings.load, settings.model.path)
        verify_digest(files, settings.cluster.model_digest)
        card = read_card(files)
        eos_ids = {*card.eos_ids, *tokenizer_eos_ids(tokenizer_path(settings))}
        card = msgspec.structs.replace(card, eos_ids=tuple(sorted(eos_ids)))
        pooling = read_pooling(files, card, embedding=settings.model.embedding)
        implementation = _implementation(files, settings.model.implementation)
        resolved = resolve(settings, card, _device(), pooling, implementation)
    except ConfigError as error:
        raise CannotStart(str(error)) from error
    log.info("resolved", extra={"plan": "\n" + table(resolved)})
    model = load_resolved(files, resolved)
    core = open_engine_core(
        settings,
        resolved,
        CachePools(model.groups),
        vocab_size=model.spec.vocabulary,
        weights_digest=settings.cluster.model_digest,
        kv_scales=model.kv_scales,
    )
    compiler = _compiler(settings, resolved, core.limits)
    return Engine(core, model.runner, resolved, compiler)


def _compiler(
    settings: Settings, resolved: Resolved, limits: EngineLimits
) -> Callable[[], GrammarCompiler]:
    if resolved.grammar.value == "none":
        return partial(no_compiler, resolved.grammar.reason)
    tokenizer = tokenizer_path(settings)
    return partial(open_compiler, tokenizer, limits.vocab_size, limits.end_ids, settings.grammar)


def _device() -> HostDevice:
    """This machine, whether the CPU kernels run on it, and its numerics."""
    # torch takes seconds to import; meanwhile the process reports that it is starting.
    from antiphon.kernels.cpu.extension import numerics_info, unavailable_reason  # noqa: PLC0415

    return msgspec.structs.replace(
        detect_device(), lacking=unavailable_reason(), arithmetic=numerics_info()
    )


def _implementation(files: ModelFiles, configured: str) -> ResolvedValue[str]:
    """The implementation that runs this model: our own or the transformers backend.

    Raises:
        CannotStart: Neither can run it.
        ConfigError: The config is broken.
    """
    from antiphon.model_worker.model.errors import ModelLoadError  # noqa: PLC0415 (see `_device`)
    from antiphon.model_worker.model.transformers_backend.support import implementation_of  # noqa: PLC0415

    try:
        return implementation_of(files, configured)
    except ModelLoadError as error:
        raise CannotStart(str(error)) from error


def verify_digest(place: ModelLocation, digest: str) -> None:
    """Compare the model with the digest of the cluster, if there is one.

    Raises:
        CannotStart: It is another model.
    """
    if digest and (actual := content_digest(place)) != digest:
        folder = files_at(place).folder
        raise CannotStart(f"{folder}: digest {actual} differs from cluster.model_digest = {digest}")


def content_digest(place: ModelLocation) -> str:
    """SHA-256 over names and bytes of the config and the weights, in order of their names.

    Another config is another model, so overrides of config.json are included. So is another
    pooling: the files of sentence-transformers follow, if there are any.

    Raises:
        ConfigError: The files are broken.
    """
    files = files_at(place)
    content = hashlib.sha256(files.config() if files.overridden else b"")
    listed = [(file.name, file) for file in sorted([files.folder / "config.json", *files.weights])]
    modules = sorted(module_files(files.folder))
    listed += [(file.relative_to(files.folder).as_posix(), file) for file in modules]
    for name, file in listed:
        inner = hashlib.sha256()
        with file.open("rb") as stream:
            while block := stream.read(_READ_BYTES):
                inner.update(block)
        content.update(f"{name}\0{inner.hexdigest()}\n".encode())
    return content.hexdigest()


def load_resolved(place: ModelLocation, resolved: Resolved) -> OpenModel:
    """Load a model by the resolved configuration. Blocks for seconds.

    Raises:
        CannotStart: The folder cannot be served with this configuration.
    """
    import torch  # noqa: PLC0415 (it takes seconds, see `_device`)

    from antiphon.kernels.op import KernelUnavailable  # noqa: PLC0415
    from antiphon.model_worker.model.errors import ModelLoadError  # noqa: PLC0415
    from antiphon.model_worker.runner.open import open_model  # noqa: PLC0415

    torch.set_num_threads(resolved.threads.value)
    try:
        return open_model(
            place,
            page_tokens=resolved.page_tokens.value,
            pages=resolved.cache_pages.value,
            states=resolved.cache_states.value,
            dtype=resolved.dtype.value,
            linear=resolved.linear.value,
            quantization=_optional(resolved.quantization.value),
            quantized=resolved.quantized.value,
            device=resolved.device.value,
            deterministic=resolved.deterministic.value,
            implementation=resolved.implementation.value,
            pooling=resolved.pooling.value,
            cache_dtype=resolved.cache_dtype.value,
            cache_scales=resolved.cache_scales.value,
        )
    except (ModelLoadError, KernelUnavailable) as error:
        raise CannotStart(str(error)) from error


def _optional(quantization: str) -> str | None:
    return None if quantization == "none" else quantization
