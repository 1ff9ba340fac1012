"""What each rank, stage and attention group has of a model and of a machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.resolve.device import INTERPRETER
from antiphon.resolve.resolved_value import ResolvedValue

if TYPE_CHECKING:
    from antiphon.config.settings import Settings
    from antiphon.model_card.card import ModelCard
    from antiphon.model_card.pooling import Pooling
    from antiphon.resolve.device import HostDevice

ONE_RANK = ResolvedValue(1, "parallel.tp_size")
CUT_EXPERTS = ResolvedValue(1, "parallel.ep_size")
ONE_GROUP = ResolvedValue(1, "parallel.attn_dp_size")
ONE_STAGE = ResolvedValue(1, "parallel.pp_size")
NOT_YET_RUN = "not yet run on a GPU"


def rank_device(settings: Settings, device: HostDevice) -> HostDevice:
    """What one rank may use of this machine."""
    model, local = settings.model, len(settings.parallel.local_ranks)
    cores = min(model.cores or device.cores, device.cores)
    # Ranks share the memory of the machine, and have a GPU each.
    free = device.memory_bytes * (local if device.kind == "cuda" else 1)
    memory_bytes = min(model.memory_bytes or free, free)
    return msgspec.structs.replace(
        device, cores=max(1, cores // local), memory_bytes=memory_bytes // local
    )


def resolve_ranks(
    settings: Settings, pooling: Pooling | None, device: HostDevice
) -> ResolvedValue[int]:
    parallel, ranks = settings.parallel, settings.parallel.tp_size
    parallel.check()
    said = f"parallel.tp_size = {ranks}"
    if parallel.pp_size > 1:
        said = f"parallel.pp_size = {parallel.pp_size}"
        if pooling is not None:
            raise ConfigError(f"{said}: a model that only pools has one stage")
        if settings.speculation.draft_model:
            raise ConfigError(
                f"speculation.draft_model: {said}: a model with a draft model has one stage; "
                "use parallel.tp_size (--tp-size)"
            )
    if (groups := parallel.attn_dp_size) > 1:
        said = f"parallel.attn_dp_size = {groups}"
        if pooling is not None:
            raise ConfigError(f"{said}: a model that only pools has one attention group")
        if settings.batching.running_max < groups:
            raise ConfigError(
                f"batching.running_max = {settings.batching.running_max}: must be at least {said}, "
                "whose groups share it"
            )
        if settings.speculation.draft_model:
            raise ConfigError(
                f"speculation.draft_model: {said}: with a draft model there is one attention group"
            )
        if settings.cache.hierarchical:
            raise ConfigError(f"cache.hierarchical: {said}: pages of several groups are not stored")
    if ranks == 1:
        return ONE_RANK
    reason = "layers run one by one, since the fused decoder sums over no ranks"
    if device.kind == "cuda":
        reason = f"each on a GPU of its own, which {_summing(settings)} NCCL: {NOT_YET_RUN}"
    if device.kind == INTERPRETER:
        reason = f"each with an interpreter of its own, which {_summing(settings)} gloo"
    return ResolvedValue(ranks, f"parallel.tp_size; {reason}")


def _summing(settings: Settings) -> str:
    """How ranks sum that share no memory, before the name of what they exchange parts by."""
    return "add in their order what they gather by" if settings.model.deterministic else "sum by"


def resolve_expert_ranks(settings: Settings, device: HostDevice) -> ResolvedValue[int]:
    parts, reason = settings.parallel.ep_size, CUT_EXPERTS.reason
    if parts > 1 and device.kind == "cuda":
        reason += f"; each with a slice of the experts: {NOT_YET_RUN}"
    return ResolvedValue(parts, reason)


def resolve_stages(settings: Settings, device: HostDevice) -> ResolvedValue[int]:
    stages, reason = settings.parallel.pp_size, "parallel.pp_size"
    if stages > 1 and device.kind == "cuda":
        reason += f"; each on GPUs of its own, linked by NCCL: {NOT_YET_RUN}"
    return ResolvedValue(stages, reason)


def group_settings(settings: Settings) -> Settings:
    """With the running requests of one attention group."""
    if (groups := settings.parallel.attn_dp_size) == 1:
        return settings
    running_max = settings.batching.running_max // groups
    batching = msgspec.structs.replace(settings.batching, running_max=running_max)
    return msgspec.structs.replace(settings, batching=batching)


def over_groups(groups: int, each: ResolvedValue[int]) -> ResolvedValue[int]:
    if groups == 1:
        return each
    return ResolvedValue(each.value * groups, f"{groups} attention groups: {each.reason}")


def stage_share(all_layers: int, card: ModelCard, stages: int) -> int:
    """What of a size of all layers the stage with the most layers has."""
    return -(-all_layers * -(-card.layers // stages) // card.layers)
