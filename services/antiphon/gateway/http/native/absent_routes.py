"""SGLang routes that are not supported: each returns the reason instead of a plain 404."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.http.core.operation import Operation, refusal
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator


class NotBuilt(InvalidRequest):
    code = "not_built"
    status = 404


class GpuOnly(InvalidRequest):
    code = "gpu_only"
    status = 404


class ByDesign(InvalidRequest):
    code = "by_design"
    status = 404


_TRAINER = "weights are not received from a trainer; restart the workers with a new checkpoint"
_HICACHE = "the KV cache has one level, without a storage backend"

ABSENT: tuple[tuple[type[InvalidRequest], str, str, str], ...] = (
    (
        NotBuilt,
        "POST",
        "/update_weights_from_disk /begin_weight_update /end_weight_update /weights_checker",
        "weights are read when a worker starts; restart it to serve a new checkpoint",
    ),
    (
        GpuOnly,
        "POST",
        "/init_weights_update_group /destroy_weights_update_group "
        "/update_weights_from_distributed /update_weights_from_tensor /update_weights_from_ipc "
        "/init_weights_send_group_for_remote_instance /send_weights_to_remote_instance",
        _TRAINER,
    ),
    (GpuOnly, "GET", "/get_remote_instance_transfer_engine_info", _TRAINER),
    (NotBuilt, "GET POST", "/get_weights_by_name", "workers do not return their weights"),
    (
        GpuOnly,
        "GET POST",
        "/release_memory_occupation /resume_memory_occupation",
        "a worker keeps its memory until it exits; stop it to free memory",
    ),
    (
        NotBuilt,
        "POST",
        "/load_lora_adapter /load_lora_adapter_from_tensors /unload_lora_adapter",
        "LoRA adapters are not supported",
    ),
    (
        NotBuilt,
        "GET POST",
        "/start_profile /stop_profile",
        "the profiler is not supported; use traces and metrics",
    ),
    (
        NotBuilt,
        "GET POST",
        "/start_expert_distribution_record /stop_expert_distribution_record "
        "/dump_expert_distribution_record",
        "expert routing is not recorded",
    ),
    (ByDesign, "GET POST", "/freeze_gc", "every service tunes its garbage collector at startup"),
    (
        ByDesign,
        "GET POST",
        "/set_trace_level",
        "traces have one level of detail; --telemetry-trace-ratio sets the sampling ratio",
    ),
    (
        ByDesign,
        "POST PUT",
        "/set_internal_state",
        "settings are fixed while the server runs; restart it with new ones",
    ),
    (ByDesign, "GET POST", "/slow_down", "slowing the server down on purpose is not supported"),
    (NotBuilt, "GET PUT DELETE", "/hicache/storage-backend", _HICACHE),
    (NotBuilt, "POST", "/hicache/storage-backend/clear", _HICACHE),
    (NotBuilt, "GET POST", "/clear_hicache_storage_backend", _HICACHE),
    (NotBuilt, "GET", "/get_hicache_l3_cache_layout", _HICACHE),
    (NotBuilt, "POST", "/pd_role_switch", "prefill and decode run in the same worker"),
    (
        NotBuilt,
        "POST",
        "/vertex_generate",
        "Vertex AI's request format is not supported; use POST /generate",
    ),
    (
        NotBuilt,
        "GET",
        "/v1/realtime",
        "audio is transcribed in files; use /v1/audio/transcriptions",
    ),
    (NotBuilt, "POST", "/v1/decisions", "use POST /v1/score for the probabilities of labels"),
    (NotBuilt, "POST", "/v1/systemone", "use POST /v1/chat/completions for conversations"),
)
"""Error, methods, paths and reason; several methods or paths are separated by spaces."""


def absent_operations() -> Iterator[Operation]:
    for error, methods, paths, reason in ABSENT:
        for path in paths.split():
            refuse = refusal(error, f"{path} is not supported: {reason}")
            summary = f"Not supported (`{error.code}`): {reason}."
            for method in methods.split():
                yield Operation(method, path, refuse, summary)
