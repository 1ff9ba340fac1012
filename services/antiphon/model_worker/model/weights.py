"""A checkpoint: its tensors are compared with those the model needs before any is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.config.errors import ConfigError
from antiphon.config.model import LoadFormat
from antiphon.model_card.config_json import text_name
from antiphon.model_card.files import ENDINGS, ModelFiles, ModelLocation, files_at
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.formats import page_hints as pages
from antiphon.model_worker.model.formats.prefetch import prefetch_tensors
from antiphon.model_worker.model.formats.progress import LoadProgress
from antiphon.model_worker.model.formats.safetensors import read_safetensors

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    import torch

    from antiphon.layers.weights import WeightSource
    from antiphon.model_worker.model.formats.stored_tensor import StoredTensor

NAMED_MAX = 5
"""Tensors that an error names; the rest are counted."""


class Checkpoint:
    """The tensors of a model, in whatever files they are."""

    def __init__(self, tensors: dict[str, StoredTensor]) -> None:
        self.tensors = tensors

    @classmethod
    def open(cls, place: ModelLocation, sources: Sequence[WeightSource] = ()) -> Checkpoint:
        """Read the headers of all files.

        Args:
            place: The model.
            sources: Tensors that the model will load: GGUF and dummy weights are created from
                these.

        Raises:
            ModelLoadError: A file is missing, truncated, or not of its format.
        """
        try:
            files = files_at(place)
            tensors = _read(files, sources)
        except ConfigError as error:
            raise ModelLoadError(str(error)) from error
        if not tensors:
            raise ModelLoadError(f"{files.folder}: the {_endings(files)} files hold no tensors")
        return cls({text_name(name): tensor for name, tensor in tensors.items()})

    def add_prefix(self, prefix: str, beside: tuple[str, ...] = ()) -> None:
        """Add a prefix to every name if none has it, as in the checkpoint of a base model.

        Args:
            prefix: Of the base model's tensors.
            beside: Prefixes of names that never have it: those of the head.
        """
        if not any(name.startswith(prefix) for name in self.tensors):
            self.tensors = {
                name if name.startswith(beside) else prefix + name: tensor
                for name, tensor in self.tensors.items()
            }

    def rename_endings(self, endings: Mapping[str, str]) -> None:
        """Rename tensors with suffixes that other tools write."""
        for old, new in endings.items():
            for name in [name for name in self.tensors if name.endswith(old)]:
                self.tensors[name.removesuffix(old) + new] = self.tensors.pop(name)

    def compare(
        self,
        sources: Iterable[WeightSource],
        ignored: tuple[str, ...],
        blank: tuple[str, ...] = (),
        passed_over: tuple[str, ...] = (),
    ) -> None:
        """Compare the checkpoint with what the model loads.

        Args:
            sources: The tensors that the model loads.
            ignored: Suffixes of further names that are allowed.
            blank: Suffixes of further names that are allowed if all elements are zero.
            passed_over: Prefixes of further names that are allowed.

        Raises:
            ModelLoadError: Tensors are missing, of another shape or dtype, or not used by the
                model.
        """
        wanted = {source.name: source for source in sources}
        held = [(self.tensors[name], one) for name, one in wanted.items() if name in self.tensors]
        complaints = (
            _listed("missing", sorted(wanted.keys() - self.tensors)),
            _listed("unexpected", sorted(self._unexpected(wanted, ignored, blank, passed_over))),
            _listed(
                "of another shape",
                [
                    f"{one.name} {tensor.shape}, not {one.shape}"
                    for tensor, one in held
                    if not one.fits(tensor.shape)
                ],
            ),
            _listed(
                "of another number format",
                [
                    f"{one.name} {_dtype_names(tensor.dtype)}, not {_dtype_names(*one.dtypes)}"
                    for tensor, one in held
                    if tensor.dtype not in one.dtypes
                ],
            ),
        )
        if any(complaints):
            raise ModelLoadError("weights: " + "; ".join(filter(None, complaints)))

    def _unexpected(
        self,
        wanted: Container[str],
        ignored: tuple[str, ...],
        blank: tuple[str, ...],
        passed_over: tuple[str, ...],
    ) -> Iterator[str]:
        for name, tensor in self.tensors.items():
            if name in wanted or name.endswith(ignored) or name.startswith(passed_over):
                continue
            if not (name.endswith(blank) and not tensor.decode(tensor.data.read()).any()):
                yield name

    def load(self, sources: Iterable[WeightSource]) -> None:
        """Load every source; each tensor is read once, then released. Call `compare` first.

        Other threads read tensors, but only this one copies them: each thread that allocates keeps
        some of the memory that it frees.
        """
        takers: dict[str, list[WeightSource]] = {}
        for source in sources:
            takers.setdefault(source.name, []).append(source)
        tensors = [self.tensors[name] for name in takers]
        progress = LoadProgress(sum(tensor.data.size_bytes for tensor in tensors))
        contents = prefetch_tensors([tensor.data for tensor in tensors])
        for tensor, takes, content in zip(tensors, takers.values(), contents, strict=True):
            numbers = tensor.decode(content)
            for source in takes:
                source.load(numbers)
            tensor.data.release()
            progress.add(tensor.data.size_bytes)
        pages.trim()
        progress.end()


def _read(files: ModelFiles, sources: Sequence[WeightSource]) -> dict[str, StoredTensor]:
    if files.format is LoadFormat.DUMMY:
        from antiphon.model_worker.model.formats.dummy import dummy_weights  # noqa: PLC0415

        return dummy_weights(sources)
    if not files.weights:
        raise ModelLoadError(f"{files.folder}: there is no {_endings(files)} file")
    if files.format is LoadFormat.GGUF:
        from antiphon.model_worker.model.formats.gguf import read_gguf_files  # noqa: PLC0415

        names = [source.name for source in sources]
        return read_gguf_files(files.weights, names, mapped=files.mapped)
    read = read_safetensors
    if files.format is LoadFormat.PT:
        from antiphon.model_worker.model.formats.torch_file import read_torch  # noqa: PLC0415

        read = read_torch
    tensors: dict[str, StoredTensor] = {}
    for file in files.weights:
        tensors.update(read(file, mapped=files.mapped))
    return tensors


def _endings(files: ModelFiles) -> str:
    return " or ".join(ENDINGS[files.format])


def _listed(what: str, names: list[str]) -> str | None:
    if not names:
        return None
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return f"{what}: {', '.join(names[:NAMED_MAX])}{more}"


def _dtype_names(*dtypes: torch.dtype) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
