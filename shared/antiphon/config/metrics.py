"""Settings of metrics: buckets and labels."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import cast

import msgspec

from antiphon.config.schema import Config

BUCKETS_MAX = 100
LABELS_MAX = 16
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_TAKEN = frozenset(
    {
        *("le", "quantile", "instance", "job", "model_name", "engine_type", "worker", "tenant"),
        *("tp_rank", "pp_rank", "dp_rank", "outcome", "code", "kind", "route", "reason", "mode"),
        *("endpoint", "method", "status_code", "component", "category", "cache_source"),
    }
)
"""Labels that metrics already have, or that Prometheus adds."""


class MetricsConfig(Config):
    """Buckets and labels of metrics. Lists are separated by commas or spaces."""

    time_to_first_token_buckets: str = ""
    """Buckets of `time_to_first_token_seconds`: ascending upper bounds in seconds; empty: built-in
    buckets."""
    inter_token_latency_buckets: str = ""
    """Buckets of `inter_token_latency_seconds`: ascending upper bounds in seconds; empty: built-in
    buckets."""
    e2e_request_latency_buckets: str = ""
    """Buckets of `e2e_request_latency_seconds`: ascending upper bounds in seconds; empty: built-in
    buckets."""
    tokens_histogram: bool = False
    """Whether histograms of prompt and generation tokens per request are collected."""
    prompt_tokens_buckets: str = "default"
    """Buckets of `prompt_tokens_histogram`: `default`, `tse MIDDLE BASE COUNT` (two-sided
    exponential) or `custom BOUND ...`, in tokens."""
    generation_tokens_buckets: str = "default"
    """Buckets of `generation_tokens_histogram`, in the same format as
    metrics.prompt_tokens_buckets."""
    custom_labels_header: str = "x-custom-labels"
    """HTTP header with the custom labels of a request, as a JSON object."""
    custom_labels: str = ""
    """Names of the custom labels that requests may set; empty: none."""
    extra_labels: str = ""
    """JSON object of labels and values added to every metric of the model."""
    by_worker: bool = False
    """Whether metrics are reported per worker instead of summed over all workers."""

    def __post_init__(self) -> None:
        bounds(self.time_to_first_token_buckets, "time_to_first_token_buckets")
        bounds(self.inter_token_latency_buckets, "inter_token_latency_buckets")
        bounds(self.e2e_request_latency_buckets, "e2e_request_latency_buckets")
        token_bounds(self.prompt_tokens_buckets, "prompt_tokens_buckets")
        token_bounds(self.generation_tokens_buckets, "generation_tokens_buckets")
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", self.custom_labels_header):
            raise ValueError("custom_labels_header: must be the name of an HTTP header")
        names = (*label_names(self.custom_labels), *label_values(self.extra_labels))
        for name in names:
            if not _LABEL.fullmatch(name) or name.startswith("__"):
                advice = "use letters, digits and underscores"
                raise ValueError(f"'{name}' is not a label name; {advice}")
            if name in _TAKEN:
                raise ValueError(f"the label '{name}' is reserved for built-in metrics")
        if len(set(names)) != len(names):
            raise ValueError("custom_labels and extra_labels contain a duplicate label")
        if len(names) > LABELS_MAX:
            raise ValueError(
                f"custom_labels, extra_labels: {len(names)} labels; the limit is {LABELS_MAX}"
            )


def label_names(text: str) -> tuple[str, ...]:
    return tuple(_words(text))


def label_values(text: str) -> dict[str, str]:
    if not text:
        return {}
    try:
        found = msgspec.json.decode(text, type=dict[str, str | int | float | bool])
    except msgspec.DecodeError as error:
        reason = f"extra_labels: must be a JSON object of names and values: {error}"
        raise ValueError(reason) from error
    return {name: value if isinstance(value, str) else str(value) for name, value in found.items()}


def bounds(text: str, name: str) -> tuple[float, ...]:
    """Parse bucket bounds, which are finite and ascending; empty if the text is."""
    try:
        found = tuple(float(word) for word in _words(text))
    except ValueError as error:
        raise ValueError(f"{name} = '{text}': must be a list of numbers") from error
    return _checked(found, name)


def token_bounds(text: str, name: str) -> tuple[float, ...]:
    """Parse the rule for buckets of token counts; empty for the built-in ones."""
    rule, *words = _words(text) or ["default"]
    values = bounds(" ".join(words), name) if rule == "custom" else ()
    if (rule == "default" and not words) or values:
        return values
    if rule == "tse" and len(words) == 3:
        return _checked(_two_sided(words, name), name)
    raise ValueError(
        f"{name}: '{text}' must be `default`, `tse MIDDLE BASE COUNT` or `custom BOUND ...`"
    )


def _two_sided(words: list[str], name: str) -> tuple[float, ...]:
    try:
        middle, base, count = float(words[0]), float(words[1]), int(words[2])
    except ValueError as error:
        raise ValueError(f"{name}: tse takes two numbers and an integer count") from error
    if not (base > 1 and 1 <= count <= BUCKETS_MAX and math.isfinite(middle) and base < 1e6):
        raise ValueError(f"{name}: tse takes a base > 1 and a count from 1 to {BUCKETS_MAX}")
    distances = [min(base**exponent, 1e12) for exponent in range(1, count // 2 + 1)]
    found = {middle, *(middle + d for d in distances), *(middle - d for d in distances)}
    return tuple(sorted(bound for bound in found if bound > 0))


def _checked(found: tuple[float, ...], name: str) -> tuple[float, ...]:
    if len(found) > BUCKETS_MAX:
        raise ValueError(f"{name}: {len(found)} buckets; the limit is {BUCKETS_MAX}")
    ascending = all(before < after for before, after in pairwise(found))
    if not ascending or not all(map(math.isfinite, found)):
        raise ValueError(f"{name}: bucket bounds must be finite and ascending")
    return found


def _words(text: str) -> list[str]:
    return cast("list[str]", re.split(r"[\s,]+", text.strip())) if text.strip() else []
