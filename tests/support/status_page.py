"""Writes docs/status.md: supported, rejected and missing features, from the registries.

It imports services and shared packages alike, which modules of neither may do.
"""

from __future__ import annotations

import ast
import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Literal, cast

import aiohttp
from tests.support.markdown import DOCS, table
from tests.unit.gateway.cluster import house

from antiphon.config.fields import fields
from antiphon.config.sglang_arguments import SglangArgument, arguments, reasons, rows, values
from antiphon.gateway.http.native.absent_routes import ABSENT
from antiphon.gateway.parsing.formats import REASONING_FORMATS, TOOL_FORMATS
from antiphon.layers.methods import LinearMethod
from antiphon.model_card.packaged import MODELS
from antiphon.model_card.quantization_config import METHODS as STORED
from antiphon.model_worker.model.formats.gguf import LAYOUTS, READABLE
from antiphon.model_worker.model.load import CACHE_DTYPES
from antiphon.model_worker.model.registry import FAMILIES
from antiphon.telemetry import catalog
from antiphon.wire import routes
from antiphon.wire.base import Role
from antiphon.wire.routes import ROUTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

PAGE = DOCS / "status.md"
ROOT = DOCS.parent
FOLDERS = {role: "model_worker" if role is Role.WORKER else str(role) for role in Role}
REASONS_SHOWN = 2
"""How many reasons per group the table of arguments shows."""

_HEAD = """\
# Status

<!-- Written by `make docs`; change the text there. -->

What works today, what is refused and what is not built. Counts and lists are read from the code,
and a test fails when this page differs from them. Antiphon runs on CPUs only.
"""


SERVICES: Mapping[Role, tuple[str, str]] = {
    Role.GATEWAY: (
        "HTTP and NATS APIs; owns each request that it accepted",
        "Its connections close. Its requests are aborted when it has restarted, or "
        f"{fields()['scheduler.owner_silence_s'].default:g} s (`--scheduler-owner-silence-s`) "
        "after its last heartbeat. Stored responses and sessions stay on the broker.",
    ),
    Role.TOKENIZER: (
        "Renders chat templates, encodes text and decodes tokens; stateless",
        "The gateway calls another tokenizer, or the same one once it has restarted. Running "
        "requests continue.",
    ),
    Role.SCHEDULER: (
        "Queues requests and places them on workers by load and cached prefix",
        "Running requests continue. A standby becomes the leader; without one, requests wait "
        "until the scheduler has restarted.",
    ),
    Role.WORKER: (
        "Runs the model: continuous batching, paged KV cache, prefix cache",
        "Its requests continue on another worker, or on the same one once it has restarted, from "
        "the output so far.",
    ),
    Role.DETOKENIZER: (
        "Turns token ids into text and finds stop strings",
        "Workers send its requests to another one, or to the same one once it has restarted.",
    ),
    Role.ENCODER: (
        "Computes embeddings of images and videos, for models that take them",
        "Workers call another encoder, or the same one once it has restarted; texts do not notice.",
    ),
    Role.KV_STORAGE: (
        "Stores KV pages in memory and files, if workers are started with "
        "`--hicache-storage-backend kv_storage`",
        "Prefixes are computed again.",
    ),
}
"""What each service does, and the effect of its death on requests."""
NOT_BUILT: tuple[tuple[str, str, str], ...] = (
    (
        "GPU kernels and CUDA graphs",
        "Kernels of a GPU, and CUDA graphs of decode steps and prefills, have not yet run on one.",
        "gpu base_gpu cuda_graphs prefill_graphs",
    ),
    (
        "Tensor parallelism by other splits, and other collectives",
        "`--tp-size` splits attention, MLPs, embedding and head alike, with one kind of sum over "
        "ranks.",
        "tensor collectives",
    ),
    (
        "Pipeline parallelism with microbatches of a chosen size",
        "`--pp-size` makes stages, and as many steps are in flight as there are stages.",
        "pipeline",
    ),
    (
        "Expert parallelism with redundant experts, and other MoE kernels",
        "`--ep-size` spreads whole experts over the ranks, which compute them with Antiphon's own "
        "kernels.",
        "moe",
    ),
    (
        "Data parallelism inside a worker of more than attention",
        "`--dp-size` starts several workers, each with the whole model, or with "
        "`--enable-dp-attention` as many groups of ranks that attend to different requests.",
        "dp_attention",
    ),
    ("Context parallelism", "Long prompts are prefilled in chunks.", "context_parallel"),
    ("LoRA adapters", "Merge the adapter into the model and serve the result.", "lora"),
    (
        "Speculative decoding with trees of drafts, or with layers that draft (EAGLE, MTP)",
        "Drafts are one chain, of n-grams or of a small model.",
        "speculative draft_model",
    ),
    (
        "Prefill-decode disaggregation",
        "Prefill and decode run in the same worker.",
        "disaggregation",
    ),
    (
        "Hierarchical KV cache",
        "Prefixes are kept in the memory of their worker, and in kv_storage with "
        "`--enable-hierarchical-cache --hicache-storage-backend kv_storage`. There is no level in "
        "host memory, and no other storage.",
        "hicache",
    ),
    (
        "Images, videos and audio in prompts of other models than [these](models.md#images)",
        "They are refused; the text part of another multimodal model is served. Whisper "
        "transcribes files.",
        "multimodal",
    ),
    ("Sparse attention", "Attention reads every cached token.", "sparse"),
    ("Diffusion language models", "They are refused at start.", "diffusion"),
    ("Beam search", "Requests with more than one beam are refused; `n` samples several.", ""),
    ("gRPC", "The interfaces are HTTP and NATS.", "grpc"),
    ("Files API", "Content comes in the request.", "files"),
    (
        "Loss of a whole host",
        "A request whose worker and detokenizer die together ends with the error `worker_lost` "
        "if its logprobs and hidden states take more than a message, 1 MiB.",
        "",
    ),
    (
        "Weight updates while serving",
        "Restart the worker with the new checkpoint.",
        "weight_updates",
    ),
)
"""A missing feature, what is there instead, and the reasons of refused arguments that report it."""

DEVICES = ("auto", "cpu", "cuda", "cuda:N")


def page() -> str:
    return "\n".join(
        [
            _HEAD,
            *_services(),
            *_not_built(),
            *_apis(asyncio.run(_summaries())),
            *_models(),
            *_outputs(),
            *_arguments(),
        ]
    )


def _services() -> Iterator[str]:
    yield "## Services\n"
    found = senders()
    found = {**found, Role.GATEWAY: ["HTTP clients", *found[Role.GATEWAY]]}
    yield from table(
        ("service", "what it does today", "receives messages from", "when it dies"),
        (
            (
                f"[{FOLDERS[role]}](../services/antiphon/{FOLDERS[role]}/README.md)",
                does,
                ", ".join(found[role]) or "**no caller yet**",
                dies,
            )
            for role, (does, dies) in SERVICES.items()
        ),
    )
    yield (
        "\n`antiphon serve` restarts processes that die; services that are started one by one need "
        "a process manager.\n"
    )


def senders() -> Mapping[Role, Sequence[str]]:
    """By service: the folders whose code imports a route to which only that service listens."""
    listeners = {name: route.listeners for name, route in vars(routes).items() if route in ROUTES}
    folders = {FOLDERS[role]: ROOT / "services/antiphon" / FOLDERS[role] for role in Role}
    folders["NATS clients"] = ROOT / "shared/antiphon/client"
    imported = {sender: _imported(folder) & listeners.keys() for sender, folder in folders.items()}
    return {
        role: [
            sender
            for sender, names in imported.items()
            if sender != FOLDERS[role] and any(listeners[name] == (role,) for name in names)
        ]
        for role in Role
    }


def _imported(folder: Path) -> set[str]:
    """The names that the files of a folder import from `wire.routes`."""
    return {
        alias.name
        for file in folder.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module == routes.__name__
        for alias in node.names
    }


def _not_built() -> Iterator[str]:
    yield "## Not built\n"
    yield "Features of SGLang that Antiphon does not have:\n"
    refused = Counter(row.detail for row in rows() if row.status == "refused")
    yield from table(
        ("what", "today", "SGLang arguments refused for it"),
        (
            (name, instead, str(sum(_refused(refused, reasons.split()))) if reasons else "")
            for name, instead, reasons in NOT_BUILT
        ),
    )
    yield ""


def _refused(refused: Mapping[str, int], reasons: Sequence[str]) -> Iterator[int]:
    for reason in reasons:
        if reason not in refused:  # built since, or its reason has another name
            raise ValueError(f"no argument is refused for {reason!r} any more: change NOT_BUILT")
        yield refused[reason]


async def _summaries() -> Mapping[tuple[str, str], str]:
    """The summaries of all operations of a gateway, by method and path."""
    async with (
        house() as at,
        aiohttp.ClientSession() as session,
        session.get(f"{at.url}/openapi.json") as reply,
    ):
        document = cast("dict[str, dict[str, dict[str, dict[str, str]]]]", await reply.json())
    return {
        (method.upper(), path): operation["summary"]
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def _apis(summaries: Mapping[tuple[str, str], str]) -> Iterator[str]:
    yield "## HTTP\n"
    families: dict[str, dict[str, list[str]]] = {}
    for (method, path), summary in summaries.items():
        if not summary.startswith("Not supported"):
            families.setdefault(_family(path), {}).setdefault(path, []).append(method)
    yield from table(
        ("API", "routes", "paths"),
        (
            (family, str(sum(map(len, paths.values()))), _code(paths))
            for family, paths in families.items()
        ),
    )
    yield (
        "\nIn addition, every service serves `/healthz`, `/readyz` and `/metrics`, and the gateway "
        "`/openapi.json`. Fields, and\nwhich of them are refused: "
        "[reference/http.md](reference/http.md). Some routes need a model of a certain kind, such "
        "as\nan embedding model.\n"
    )
    yield "SGLang's other routes are answered with 404, a code and the reason:\n"
    by_reason: dict[tuple[str, str], list[str]] = {}
    for error, _, absent, reason in ABSENT:
        by_reason.setdefault((error.code, reason), []).extend(absent.split())
    yield from table(
        ("code", "reason", "paths"),
        ((f"`{why}`", reason, _code(paths)) for (why, reason), paths in by_reason.items()),
    )
    absent_paths = {path for paths in by_reason.values() for path in paths}
    elsewhere = [
        f"`{method} {path}`"
        for (method, path), summary in summaries.items()
        if summary.startswith("Not supported") and path not in absent_paths
    ]
    yield f"\nRoutes of other servers that are refused: {', '.join(elsewhere)}.\n"


def _family(path: str) -> str:
    if path.startswith("/api/"):
        return "Ollama"
    if path.startswith("/v1/messages"):
        return "Anthropic"
    if path.startswith("/v1/") and path != "/v1/loads":
        return "OpenAI and other `/v1` routes"
    return "SGLang, health and operations"


def _models() -> Iterator[str]:
    yield "## Models and devices\n"
    refused = values()["--device"]
    families = {family.name for family in FAMILIES.values()}
    yield from (
        f"* Devices (`--device`): {_code(DEVICES)} ([kernels.md](kernels.md): the"
        " kernels of a GPU have not yet run on one); `auto` is `cpu`. Refused:"
        f" {_code(refused)}.",
        f"* Architectures: {len(FAMILIES)}, declared by {len(families)} families:"
        " [reference/models.md](reference/models.md). Other causal models run through the modules"
        " of transformers if a paged KV cache serves them:"
        " [models.md](models.md#models-without-a-family).",
        f"* Models with a short name: {_code(MODELS)}.",
        f"* Quantized checkpoints (`quant_method`): {_code(STORED)}. Not every architecture"
        " supports every method: [reference/models.md](reference/models.md#in-fewer-bits).",
        f"* Weights in memory (`--model-linear`): {_code(LinearMethod)}.",
        f"* Quantized KV cache (`--kv-cache-dtype`): {_code(CACHE_DTYPES)}.",
        f"* GGUF files: architectures {_code(LAYOUTS)}; types "
        f"{_code(kind.name for kind in READABLE)}.",
        "",
    )


def _outputs() -> Iterator[str]:
    yield "## Tool calls, reasoning and metrics\n"
    for title, formats, flag in (
        ("Tool call formats", TOOL_FORMATS, "--tool-call-parser"),
        ("Reasoning formats", REASONING_FORMATS, "--reasoning-parser"),
    ):
        known = sorted(name for one in formats for name in one.names)
        missing = values().get(flag, {})
        tail = f" Not built: {_code(sorted(missing))}." if missing else ""
        yield f"* {title} (`{flag}`), {len(known)} names: {_code(known)}.{tail}"
    shown = [family for family in catalog.FAMILIES.values() if family.sglang]
    yield (
        f"* Metrics: {len(catalog.FAMILIES)}, of which {len(shown)} also have SGLang's name:"
        " [metrics.md](metrics.md).\n"
    )


def _arguments() -> Iterator[str]:
    yield "## SGLang's arguments\n"
    served = [one for one in arguments() if one.status != "refused"]
    tested = sum(bool(one.test) for one in served)
    yield (
        "* `works`: the argument takes effect, or asks for what is the case anyway.\n"
        "* `partly`: some of its values are refused.\n"
        "* `refused`: the server does not start and prints the reason, unless the value is the "
        "default.\n\n"
        f"{tested} of the {len(served)} arguments that work, wholly or partly, have a test that "
        "compares a start with the\nargument with one without it. One by one: "
        "`antiphon config arguments --json` or\n"
        "[reference/configuration.md](reference/configuration.md).\n"
    )
    groups: dict[str, list[SglangArgument]] = {}
    for row in rows():
        groups.setdefault(row.group, []).append(row)
    head = ("group", "works", "partly", "refused", "most common reasons for refusal")
    body = [(name, *_counts(of), _reasons(of)) for name, of in groups.items()]
    yield from table(head, [*body, ("all", *_counts(rows()), "")])
    yield ""


def _counts(of: Iterable[SglangArgument]) -> Iterator[str]:
    counted = Counter(row.status for row in of)
    statuses: tuple[Literal["works", "partly", "refused"], ...] = ("works", "partly", "refused")
    return (str(counted[status]) for status in statuses)


def _reasons(of: Iterable[SglangArgument]) -> str:
    """The most common reasons of a group, each with its count."""
    counted = Counter(row.detail for row in of if row.status == "refused")
    return "<br>".join(
        f"{n}: {reasons()['refused'][key]}" for key, n in counted.most_common(REASONS_SHOWN)
    )


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
