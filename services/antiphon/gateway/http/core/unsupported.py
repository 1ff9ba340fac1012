"""Documented fields of SGLang's APIs that no family of APIs supports, each with a reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.gateway.http.core.fields import UnsupportedField

if TYPE_CHECKING:
    from collections.abc import Mapping

NOTHING: tuple[object, ...] = ({}, [], "")
"""Values that request nothing."""
_ROUTING = UnsupportedField("requests are placed by the scheduler; clients cannot select a worker")

COMMON: Mapping[str, UnsupportedField] = {
    "beam_width": UnsupportedField("beam search is not supported", (1,)),
    "watermark": UnsupportedField("watermarks are not supported", (*NOTHING, {"enabled": False})),
    "return_routed_experts": UnsupportedField("expert routing is not recorded", (False,)),
    "return_spec_tokens_details": UnsupportedField(
        "speculative decoding is not supported", (False,)
    ),
    "lora_path": UnsupportedField("LoRA adapters are not supported", NOTHING),
    "custom_labels": UnsupportedField("metric labels cannot be set by a request body", NOTHING),
    "bootstrap_host": _ROUTING,
    "bootstrap_port": _ROUTING,
    "bootstrap_room": _ROUTING,
    "bootstrap_pair_key": _ROUTING,
    "disagg_prefill_dp_rank": _ROUTING,
    "routed_dp_rank": _ROUTING,
    "data_parallel_rank": _ROUTING,
}

EMBEDDING: Mapping[str, UnsupportedField] = {
    name: COMMON[name]
    for name in (
        *("lora_path", "custom_labels"),
        *("routed_dp_rank", "data_parallel_rank"),
        *("bootstrap_host", "bootstrap_port", "bootstrap_room"),
    )
}
