"""Why an SGLang flag is refused, or why it holds already: one sentence a concern."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

REASONS: Mapping[str, str] = {
    # Settled: true whether it is typed or not.
    "absent": "nothing to turn off: what it disables is not built",
    "config_file": "a YAML file of our groups, written as on this page",
    "idle": "an idle worker always sleeps",
    "metrics": "every process always serves /metrics",
    "nan": "a request whose numbers are not finite always ends with an error",
    "no_effect": "it has no effect in SGLang either",
    "no_warmup": "no request is sent for warming up",
    "remote_code": "code in a model folder is never run; what would need it is refused by name",
    "tokenizer_batches": "the tokenizer always encodes what waits in one batch",
    # Refused.
    "backends": "the worker takes the best kernel that the processor runs, and prints which at its "
    "start",
    "decode_steps": "the worker decides after each step what the next one runs",
    "delete": "a model folder is never changed",
    "diffusion": "diffusion language models are not built yet",
    "disaggregation": "prefill and decode run in one worker; their split is not built yet",
    "dumps": "dumps of tensors are not built yet",
    "dynamic_chunks": "the length of a chunk is set by --batching-chunk-tokens, not predicted",
    "encode_disaggregation": "start python -m antiphon.encoder by itself instead",
    "encryption": "encrypted checkpoints are not supported",
    "files": "the files API is not built yet",
    "fp32_head": "a separate number format for the output head is not built yet",
    "gpu": "the worker runs on the CPU; GPU execution is not built yet",
    "grpc": "the doors are HTTP and NATS; there is no gRPC",
    "hicache": "the worker's use of KV storage is not built yet",
    "hooks": "code is never loaded by a setting",
    "http_log": "there is one log level for everything, --log-level",
    "kv_events": "what the cache holds is told on NATS, events.kv.<model>.<worker>, not over ZMQ",
    "loader_options": "tensors are always read by several threads; there is nothing more to set",
    "loaders": "weights are read from files, by no other program",
    "lora": "LoRA adapters are not built yet",
    "metric_buckets": "histogram buckets are fixed",
    "metric_labels": "metric labels are fixed",
    "metrics_file": "metrics are served over HTTP, not written to files",
    "moe": "the experts of a model are computed by one worker; spreading or offloading them is not "
    "built",
    "multimodal": "multimodal models are not built yet",
    "nodes": "ranks on several machines are not built yet",
    "numa": "binding to NUMA nodes is not built yet; use numactl",
    "offload": "offloading of weights is not built yet",
    "on_policy": "nothing imitates the arithmetic of a trainer",
    "parallel": "a model on several devices is not built yet",
    "pipeline": "pipeline parallelism is not built yet",
    "prefill_policy": "no prompt is held back: it starts as soon as it fits",
    "quantization": "weights are quantized by other tools, or at loading by --quantization fp8, "
    "--torchao-config and --model-linear int8",
    "recv_interval": "commands reach the worker before every step",
    "remote_sampling": "code that comes with a request is never run",
    "replicas": "serve starts one process of each service; start more with python -m",
    "request_log": "one line a request is always logged; what it says never is",
    "root_path": "the API is served at /; use a proxy for a prefix",
    "sampling_defaults": "defaults come from the model's generation_config.json",
    "scoring": "each item is scored by itself: /v1/score takes a list of them",
    "slow_tokenizer": "a tokenizer is a tokenizer.json",
    "sparse": "sparse attention is not built yet",
    "speculative": "speculative decoding is not built yet",
    "state_dtype": "recurrent states are kept in float32",
    "states": "there is one way here to keep and to compute recurrent states",
    "step_log": "steps are counted by metrics, not logged",
    "template_name": "a tokenizer has one template here; give another by --chat-template",
    "tensor": "tensor parallelism is not built yet",
    "time_log": "times are metrics and spans, not log lines",
    "token_ids": "serving without a tokenizer is not built yet",
    "tokenizer_wait": "the tokenizer never waits for a batch to fill",
    "tools": "tools run where the client is; the server calls none",
    "truncate": "a prompt that is too long is refused, never cut",
    "warmup": "no request is sent for warming up",
    "weight_updates": "weights cannot be changed while serving",
    "window": "layers with a window give back what is behind it; there is no share of the cache to "
    "set",
}
