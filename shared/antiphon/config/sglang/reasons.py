"""Reasons why an SGLang argument is rejected or has no effect: sentences, one entry per topic.

The reason of a rejected argument follows a sentence about what the argument would do (the last
column of `sglang_flags.tsv`), so that the two together are about that argument alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

HOLDS: Mapping[str, str] = {
    "absent": "Holds with the flag and without it: what it turns off does not exist here.",
    "config_file": "Reads a YAML file: SGLang's flat keys, or the groups of this page.",
    "idle": "Holds with the flag and without it: an idle worker sleeps until a command arrives.",
    "metrics": "Holds with the flag and without it: a gateway serves /metrics of the whole model, "
    "with SGLang's names.",
    "nan": "Holds with the flag and without it: a request whose numbers are not finite ends with "
    "an error.",
    "no_effect": "It has no effect in SGLang either.",
    "no_overlap": "Holds with the flag and without it: on a CPU the next step is planned after the "
    "last one has ended.",
    "no_warmup": "Holds with the flag and without it: no warm-up request is sent; a worker runs "
    "its first steps before it is ready.",
    "remote_code": "Python code in a model folder is never run; a model that needs it is refused "
    "by name at start.",
    "response_store": "Holds with the flag and without it: responses are stored unless the request "
    "has store: false or the server --no-responses-store.",
    "single_decode": "Holds with the flag and without it: the detokenizer decodes each choice by "
    "itself.",
    "strict_thinking": "Holds with the flag and without it: max_thinking_tokens of a request is "
    "enforced.",
    "tokenizer_batches": "Holds with the flag and without it: the tokenizer encodes the requests "
    "that wait as one batch.",
}
"""Accepted arguments that describe the behavior without them."""

REFUSED: Mapping[str, str] = {
    "backends": "The worker takes the fastest kernel that the processor supports and prints the "
    "choice at start; remove the flag.",
    "balance": "The scheduler places requests by load and by cached prefix; weigh the two with "
    "--scheduler-prefill-weight and --scheduler-request-blocks.",
    "cache_layout": "KV pages have one layout and one prefix tree; their number is "
    "--max-total-tokens and their eviction --radix-eviction-policy.",
    "collectives": "A worker is one process on one CPU, so no ranks exchange tensors; remove the "
    "flag.",
    "config_parser": "The format is detected from the files: config.json, or the metadata of a "
    "GGUF file.",
    "context_parallel": "A prompt is computed by one worker; long prompts are cut into chunks by "
    "--chunked-prefill-size instead.",
    "cuda_graphs": "CUDA graphs exist on GPUs only and the worker runs on the CPU; remove the "
    "flag.",
    "decode_steps": "The worker schedules after each step, which takes well under a millisecond; "
    "remove the flag.",
    "default_priority": "A request without a priority gets that of its tenant in "
    "--access-keys-file, else 0.",
    "delete": "A model folder is never changed; delete it yourself after the server is ready.",
    "device_ports": "Services talk over NATS, whose address is --nats-url, so no other port is "
    "opened for ranks.",
    "diffusion": "Diffusion language models are not built; serve an autoregressive model.",
    "disaggregation": "Prefill and decode run in one worker; --dp-size starts more of them.",
    "dp_attention": "A replica is a whole worker, attention included; --dp-size starts several.",
    "dumps": "Dumps of tensors are not built; `antiphon replay` runs the recorded steps of a "
    "worker again, see --batching-dump-folder.",
    "dynamic_chunks": "Chunks have one length, set by --chunked-prefill-size.",
    "echo_ids": "The option is set per request: return_prompt_token_ids and return_token_ids.",
    "encode_disaggregation": "Requests with images, audio or video are not built, so no server "
    "has media encoded elsewhere; python -m antiphon.encoder embeds images for callers on NATS.",
    "encryption": "Encrypted checkpoints are not supported; decrypt the folder before the start.",
    "files": "The files API is not built; send the content in the request.",
    "fp32_head": "The head is multiplied in the model's dtype and its logits are float32; "
    "--dtype float32 computes all of the model in float32.",
    "gc": "Each service sets its garbage collector once, after its start, and logs no "
    "collections; the time of each step is at /metrics.",
    "gpu": "The worker runs on the CPU and has no GPU kernels; remove the flag.",
    "grpc": "The interfaces are HTTP (--port) and NATS (--nats-url), see docs/nats-client.md.",
    "hicache": "KV pages live in the worker's memory alone, sized by --mem-fraction-static or "
    "--max-total-tokens.",
    "hidden_outputs": "Hidden states of the last layer are returned with "
    "--enable-return-hidden-states; those of inner layers and sampling masks are not.",
    "hooks": "Settings never load code; change the source, or read the metrics and traces.",
    "http_log": "There is one log level for all, --log-level, and no access log.",
    "http_server": "The gateway serves HTTP/1.1 in one process; put a proxy before it for HTTP/2.",
    "kv_canary": "KV pages are not checked while serving; a request whose numbers are not finite "
    "ends with an error, and its pages are zeroed.",
    "kv_events": "Events of the KV cache are published on NATS, events.kv.<model>.<worker>, see "
    "docs/reference/bus.md.",
    "load_snapshots": "Load is published in heartbeats (--service-heartbeat-s) and served at "
    "/v1/loads.",
    "loader_options": "Checkpoint files are read by several threads at once, without further "
    "options; see --load-format and --weight-loader-disable-mmap.",
    "loaders": "Weights are read from files; copy the checkpoint to a folder and name it by "
    "--model-path.",
    "lora": "LoRA adapters are not built; merge the adapter into the model and serve the result.",
    "memory_release": "A worker keeps its memory until it ends, also while it is paused; stop it "
    "to free memory.",
    "mfu": "Device utilization is not estimated; throughput and step times are at /metrics.",
    "moe": "One worker computes all experts of a model with the CPU's kernels; --dp-size starts "
    "more workers, which share the requests.",
    "multimodal": "Requests with images, audio or video are not built; the text part of such a "
    "model is served.",
    "nan": "A request whose numbers are not finite ends with an error and the others continue; "
    "remove the flag.",
    "nodes": "A worker runs on one machine; start workers on other machines by python -m "
    "antiphon.model_worker --bus-url.",
    "notify": "Tokens are written to each response as they arrive; --stream-interval groups them.",
    "numa": "Processes are not bound to NUMA nodes; start the server by numactl.",
    "offload": "The worker's weights are in host memory already, since it runs on the CPU; choose "
    "a smaller dtype or --quantization.",
    "on_policy": "The numerics of trainers are not reproduced; --enable-deterministic-inference "
    "gives results that do not depend on the batch.",
    "pipeline": "Pipeline parallelism is not built; a model must fit on one machine.",
    "prefill_cache": "A prompt is computed in chunks that read the KV pages of those before; "
    "--disable-radix-cache keeps none of them for other requests.",
    "prefill_policy": "Prefill is never delayed; mixed batches keep decodes running beside it.",
    "quantization": "Weights are quantized by other tools, or at loading by --quantization fp8, "
    "--torchao-config or --model-linear int8.",
    "recv_interval": "Commands are read before every step; remove the flag.",
    "remote_sampling": "Code from a request is never run; use the named processors of docs/http.md "
    "and logit_bias.",
    "request_template": "A template in a request would run code of the client; give it by "
    "--chat-template.",
    "request_times": "The record of a request has its times: --log-requests writes it to the log, "
    "--export-metrics-to-file to a file; its phases are trace spans (--enable-trace).",
    "retraction": "When pages run out, the request with the lowest priority is retracted, among "
    "equals the one with the fewest output tokens, then the newest.",
    "routed_experts": "The experts of a token are not recorded; remove the flag.",
    "scoring": "/v1/score takes a list of items and scores each by itself.",
    "service_name": "Spans have the service that made them as service.name (gateway, "
    "worker, ...), in the service.namespace antiphon.",
    "sidecar": "The server starts its own services alone; start the other process beside it.",
    "slow_tokenizer": "The tokenizers library encodes in any case: tokenizer.json, and in its "
    "place tokenizer.model (SentencePiece) and tekken.json.",
    "sparse": "Sparse attention is not built; attention reads every cached token.",
    "speculative": "Speculative decoding is not built; decoding computes one token a step.",
    "ssl_refresh": "The certificate is read at start; restart the gateway after a change.",
    "state_dtype": "Recurrent states are kept in float32; --max-mamba-cache-size sets how many.",
    "states": "Recurrent states have one buffer and one kernel; see --mamba-track-interval and "
    "--max-mamba-cache-size.",
    "step_statistics": "Statistics of forward passes are at /metrics and, with "
    "--decode-log-interval, in the log of the worker; no socket publishes them.",
    "streaming_session": "A prompt must be sent as a whole; use sessions by /open_session.",
    "strip_thinking": "Thinking is cached as it was generated; a prompt without it matches up to "
    "the start of the thinking.",
    "tensor": "Tensor parallelism is not built; a model must fit on one machine, and --dp-size "
    "starts more workers that share its requests.",
    "time_log": "Times of operations are metrics and trace spans, not log lines; see /metrics and "
    "--enable-trace.",
    "token_ids": "Serving without a tokenizer is not built; /generate takes input_ids and returns "
    "output_ids beside the text.",
    "tokenizer_wait": "The tokenizer never waits for a batch to fill; remove the flag.",
    "tools": "Tools run where the client is; the server returns their calls and runs none.",
    "torch_compile": "Layers run in the worker's own C++ kernels, or in torch where these do not "
    "fit, and are not compiled by torch; remove the flag.",
    "trace_modules": "Requests are traced through all services; --telemetry-trace-ratio sets how "
    "many.",
    "warmup": "SGLang's own compile Triton kernels for the GPU (voice_chat, prefill_shapes) or a "
    "grammar of Whisper (whisper_autodetect), which do not exist here; a worker runs its first "
    "steps before the ready line.",
    "watermark": "Watermarks are not built; remove the flag.",
    "weight_cache": "Each worker reads the checkpoint itself and lays the weights out for its "
    "processor; files that were read stay in the page cache of the machine.",
    "weight_updates": "Weights cannot be changed while serving; restart the worker with the new "
    "checkpoint.",
    "window": "Layers with a sliding window have a pool of their own, with as many pages as the "
    "others, and free the pages behind the window; --max-total-tokens sizes both.",
}
"""Why an argument is rejected, and what to do instead."""
