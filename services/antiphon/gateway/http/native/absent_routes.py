"""SGLang routes that are not supported: each returns the reason instead of a plain 404."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NoReturn

import msgspec

from antiphon.gateway.http.core.operation import Operation
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiohttp import web

Why = Literal["not_built", "gpu_only", "by_design"]


class AbsentRoute(msgspec.Struct, frozen=True):
    """An SGLang route that is not supported, and why."""

    methods: tuple[str, ...]
    path: str
    why: Why
    reason: str


class NotBuilt(InvalidRequest):
    """The route is not implemented."""

    code = "not_built"
    status = 404


class GpuOnly(InvalidRequest):
    """The route applies to GPUs only."""

    code = "gpu_only"
    status = 404


class ByDesign(InvalidRequest):
    """The route is left out by design."""

    code = "by_design"
    status = 404


_ERRORS: Mapping[Why, type[InvalidRequest]] = {
    "not_built": NotBuilt,
    "gpu_only": GpuOnly,
    "by_design": ByDesign,
}
_POST, _GET = ("POST",), ("GET",)
_BOTH = ("GET", "POST")
_UPDATE = "weights are read when a worker starts; restart it to serve a new checkpoint"
_TRAINER = "weights are not received from a trainer; restart the workers with a new checkpoint"
_LORA = "LoRA adapters are not supported"
_MEMORY = "a worker keeps its memory until it exits, and has no device memory to release"
_EXPERTS = "expert routing is not recorded"
_PROFILE = "the profiler is not supported; use traces and metrics"
_HICACHE = "the KV cache has one level, without a storage backend"
_CORPUS = "speculative decoding, which would use the corpus, is not supported"
_AUDIO = "models read and write text only"

ABSENT: tuple[AbsentRoute, ...] = (
    *(
        AbsentRoute(_POST, path, "not_built", _UPDATE)
        for path in (
            *("/update_weights_from_disk", "/begin_weight_update", "/end_weight_update"),
            "/weights_checker",
        )
    ),
    *(
        AbsentRoute(_POST, path, "gpu_only", _TRAINER)
        for path in (
            *("/init_weights_update_group", "/destroy_weights_update_group"),
            *("/update_weights_from_distributed", "/update_weights_from_tensor"),
            *("/update_weights_from_ipc", "/init_weights_send_group_for_remote_instance"),
            "/send_weights_to_remote_instance",
        )
    ),
    AbsentRoute(_GET, "/get_remote_instance_transfer_engine_info", "gpu_only", _TRAINER),
    AbsentRoute(_BOTH, "/get_weights_by_name", "not_built", "workers do not return their weights"),
    *(
        AbsentRoute(_BOTH, path, "gpu_only", _MEMORY)
        for path in ("/release_memory_occupation", "/resume_memory_occupation")
    ),
    *(
        AbsentRoute(_POST, path, "not_built", _LORA)
        for path in (
            *("/load_lora_adapter", "/load_lora_adapter_from_tensors"),
            "/unload_lora_adapter",
        )
    ),
    *(
        AbsentRoute(_BOTH, path, "not_built", _PROFILE)
        for path in ("/start_profile", "/stop_profile")
    ),
    *(
        AbsentRoute(_BOTH, path, "not_built", _EXPERTS)
        for path in (
            *("/start_expert_distribution_record", "/stop_expert_distribution_record"),
            "/dump_expert_distribution_record",
        )
    ),
    AbsentRoute(
        _BOTH, "/freeze_gc", "by_design", "every service tunes its garbage collector at startup"
    ),
    AbsentRoute(
        _BOTH,
        "/set_trace_level",
        "by_design",
        "traces have one level of detail; --telemetry-trace-ratio sets the sampling ratio",
    ),
    AbsentRoute(
        ("POST", "PUT"),
        "/set_internal_state",
        "by_design",
        "settings are fixed while the server runs; restart it with new ones",
    ),
    AbsentRoute(
        _BOTH, "/slow_down", "by_design", "slowing the server down on purpose is not supported"
    ),
    AbsentRoute(("GET", "PUT", "DELETE"), "/hicache/storage-backend", "not_built", _HICACHE),
    AbsentRoute(_POST, "/hicache/storage-backend/clear", "not_built", _HICACHE),
    AbsentRoute(_BOTH, "/clear_hicache_storage_backend", "not_built", _HICACHE),
    AbsentRoute(_GET, "/get_hicache_l3_cache_layout", "not_built", _HICACHE),
    AbsentRoute(_POST, "/add_external_corpus", "not_built", _CORPUS),
    AbsentRoute(_POST, "/remove_external_corpus", "not_built", _CORPUS),
    AbsentRoute(_GET, "/list_external_corpora", "not_built", _CORPUS),
    AbsentRoute(_POST, "/pd_role_switch", "not_built", "prefill and decode run in the same worker"),
    AbsentRoute(
        _POST,
        "/vertex_generate",
        "not_built",
        "Vertex AI's request format is not supported; use POST /generate",
    ),
    AbsentRoute(_POST, "/v1/audio/transcriptions", "not_built", _AUDIO),
    AbsentRoute(_GET, "/v1/realtime", "not_built", _AUDIO),
    AbsentRoute(
        _POST, "/v1/decisions", "not_built", "use POST /v1/score for the probabilities of labels"
    ),
    AbsentRoute(
        _POST, "/v1/systemone", "not_built", "use POST /v1/chat/completions for conversations"
    ),
)


class AbsentRoutesEndpoints:
    """Handlers for the unsupported routes."""

    def __init__(self) -> None:
        self._by_path = {absent.path: absent for absent in ABSENT}

    def operations(self) -> list[Operation]:
        """Return one operation per route."""
        return [
            Operation(
                method=method,
                path=absent.path,
                handler=self._refuse,
                summary=f"Not supported (`{absent.why}`): {absent.reason}.",
            )
            for absent in ABSENT
            for method in absent.methods
        ]

    async def _refuse(self, request: web.Request) -> NoReturn:
        resource = request.match_info.route.resource
        assert resource is not None, "the handler was matched by its path"
        absent = self._by_path[resource.canonical]
        raise _ERRORS[absent.why](f"{absent.path} is not supported: {absent.reason}")
