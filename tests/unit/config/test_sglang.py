"""Every SGLang argument is honoured or refused with a reason."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from tests.arguments import PARSER, loaded, refusal

from antiphon.config.fields import fields, value_at
from antiphon.config.load import Loaded, child_environment, write_yaml
from antiphon.config.settings import Settings
from antiphon.config.sglang_arguments import (
    TRANSLATIONS,
    SglangArgument,
    other_names,
    reasons,
    rows,
    values,
)
from antiphon.config.worker import GrammarConfig
from antiphon.wire.base import Role

if TYPE_CHECKING:
    from pathlib import Path

SAMPLES = {"int": "3", "float": "7.5", "text": "x", "json": '{"a": 1}', "bool": "true"}
SETTABLE = {
    "cache.storage": "kv_storage",
    "--log-requests-format": "json",
    "--limit-mm-data-per-request": '{"image": 4}',
    "--piecewise-cuda-graph-tokens": "[3, 4]",
    "--mm-process-config": '{"image": {"min_pixels": 800, "max_pixels": 9000}}',
    "grammar.backend": "none",
    "gateway.sampling_defaults": "openai",
    "gateway.chat_template_kwargs": '{"enable_thinking": false}',
    "gateway.root_path": "/llm",
    "gateway.preferred_sampling": '{"top_p": 0.5}',
    "grammar.whitespace_max": r"[ \n\r\t]{0,8}",
    "load.config_overrides": '{"a": 1}',
    "load.format": "dummy",
    "cache.dtype": "bf16",
    "model.attention_backend": "flashinfer",
    "model.decode_attention_backend": "torch_native",
    "model.dtype": "half",
    "model.expert_backend": "triton",
    "model.fp8_backend": "triton",
    "model.prefill_attention_backend": "intel_amx",
    "model.sampling_backend": "pytorch",
    "model.quantization": "fp8",
    "--torchao-config": "int8wo",
    "metrics.custom_labels": "team",
    "metrics.extra_labels": '{"a": 1}',
    "metrics.generation_tokens_buckets": "default",
    "metrics.prompt_tokens_buckets": "tse 1000 2 8",
    "--return-hidden-states-mode": "full",
    "--constrained-json-max-whitespace-cnt": "3",
    "model.device": "cpu",
    "model.completion_template": "qwen_coder",
    "gateway.reasoning_parser": "qwen3",
    "gateway.tool_call_parser": "qwen25",
    "model.implementation": "sglang",
    "queue.policy": "lpm",
    "speculation.algorithm": "NGRAM",
    "speculation.draft_format": "pt",
    "speculation.draft_quantization": "fp8",
    "speculation.ngram_depth": "2",
    "speculation.ngram_match": "PROB",
    "speculation.verify_tokens": "4",
    "cache.eviction": "lfu",
    "telemetry.log_level": "DEBUG",
    "telemetry.otlp_endpoint": "collector:4318",
}
TARGETS = [row for row in rows() if row.path is not None]
SETTLED = [row for row in rows() if row.verdict == "settled"]
REFUSED = [row for row in rows() if row.verdict == "refused"]


def by_flag(row: SglangArgument) -> str:
    return row.flags[0]


def serve(line: str | list[str]) -> Loaded:
    return loaded(*(line.split() if isinstance(line, str) else line))


def refused(line: str | list[str]) -> str:
    return refusal(*(line.split() if isinstance(line, str) else line))


def typed_values(row: SglangArgument) -> list[str]:
    if row.takes == "switch":
        return []
    sample = SAMPLES[row.takes.rstrip("+*?")]
    if sample in row.neutral:
        sample = "false"
    return [sample, sample] if row.takes[-1] in "+*" else [sample]


def test_map_is_total() -> None:
    assert (
        len([row for row in rows() if row.group not in ("Older names", "Configuration file")])
        == 543
    )
    assert len(TARGETS) + len(SETTLED) + len(REFUSED) == len(rows())
    for row in TARGETS:
        assert row.detail in TRANSLATIONS
    for row in (*SETTLED, *REFUSED):
        assert row.reason
    flags = [flag for row in rows() for flag in row.flags]
    assert len(set(flags)) == len(flags)
    assert set(flags) <= PARSER.flags()


def test_every_verdict_has_a_reason_of_its_own_and_none_is_left_over() -> None:
    assert {row.detail for row in SETTLED} == set(reasons()["settled"])
    assert {row.detail for row in REFUSED} == set(reasons()["refused"])
    assert set(values()) <= {row.flags[0] for row in TARGETS}
    texts = [row.reason for row in REFUSED]
    assert len(set(texts)) == len(texts)
    for reason in texts:
        assert re.fullmatch(r"It would [^ ].*[^.]\. [A-Z`/].*\.", reason), reason


@pytest.mark.parametrize(
    ("flag", "value", "reason"),
    [
        (flag, value, reason)
        for flag, refused in values().items()
        for value, reason in refused.items()
        if not value.startswith("<")
    ],
)
def test_value_of_sglang_is_refused_with_its_reason(flag: str, value: str, reason: str) -> None:
    assert refused([flag, value]) == f"{flag} {value}: refused: {reason}"


ATTENTION = (
    "triton torch_native flex_attention dsa nsa dsv4 compressed cutlass_mla fa3 fa4 flashinfer "
    "flashmla trtllm_mla cutedsl_mla tokenspeed_mla tokenspeed_mha trtllm_mha hpc_ops aiter "
    "dual_chunk_flash_attn minicpm_flashattn minicpm_flashinfer wave intel_amx ascend intel_xpu mlu"
)
ATTENDING = {
    "triton": "triton",
    "flashinfer": "flashinfer",
    "torch_native": "torch",
    "intel_amx": "cpu",
}
BACKENDS = {
    "--attention-backend": (ATTENTION, ATTENDING),
    "--prefill-attention-backend": (ATTENTION, ATTENDING),
    "--decode-attention-backend": (ATTENTION, ATTENDING),
    "--sampling-backend": ("flashinfer pytorch ascend", {"pytorch": "torch"}),
    "--moe-runner-backend": (
        "auto deep_gemm triton triton_kernel flashinfer_trtllm experimental_sgl_trtllm "
        "flashinfer_trtllm_routed flashinfer_cutlass flashinfer_mxfp4 flashinfer_cutedsl cutlass "
        "aiter ascend marlin humming experimental_sgl_marlin hpc_ops megamoe intel_xpu",
        {"auto": "auto", "triton": "triton"},
    ),
    "--fp8-gemm-runner-backend": (
        "auto deep_gemm flashinfer_trtllm flashinfer_cutlass flashinfer_deepgemm "
        "flashinfer_cutedsl cutlass triton aiter",
        {"auto": "auto", "triton": "triton"},
    ),
}
"""Every name of SGLang's, of this and of earlier versions; and what those mean that are taken."""


@pytest.mark.parametrize("flag", BACKENDS)
def test_every_backend_of_sglang_is_taken_or_refused_by_its_own_reason(flag: str) -> None:
    names, taken = BACKENDS[flag]
    (path,) = (row.path for row in TARGETS if row.flags[0] == flag)
    assert path is not None
    refusals = values()[flag]
    assert set(names.split()) == taken.keys() | refusals.keys()
    assert not taken.keys() & refusals.keys()
    for name, meant in taken.items():
        assert value_at(serve([flag, name]).settings, fields()[path]) == meant, name


def test_flag_that_is_also_ours_means_the_same() -> None:
    ours = {field.flag: field.path for field in fields().values()}
    shared = {flag: row.path for row in rows() for flag in row.flags if flag in ours}
    assert shared == {flag: ours[flag] for flag in shared}
    assert "--model-path" in shared


NEEDED = {
    "--export-metrics-to-file": ("--export-metrics-to-file-dir", "folder"),
    **dict.fromkeys(
        ("--speculative-draft-model-path", "--speculative-draft-model"),
        ("--speculative-algorithm", "STANDALONE"),
    ),
}
"""What must be typed beside an argument."""


@pytest.mark.parametrize("row", TARGETS, ids=by_flag)
def test_alias_sets_its_setting(row: SglangArgument) -> None:
    path = row.path
    assert path is not None
    sample = SETTABLE.get(row.flags[0], SETTABLE.get(path, "1"))
    value = [sample] if row.takes != "switch" else []
    for flag in row.flags:
        typed = serve([flag, *value, *NEEDED.get(flag, ())])
        assert typed.given[path].source == flag


@pytest.mark.parametrize("row", REFUSED, ids=by_flag)
def test_refused_flag_says_why_and_its_neutral_values_pass(row: SglangArgument) -> None:
    for flag in row.flags:
        said = refused([flag, *typed_values(row)])
        assert said.startswith(flag)
        assert said.endswith(f": refused: {row.reason}")
    for neutral in row.neutral:
        assert serve([row.flags[0], neutral]).settings == Settings()


def test_refused_argument_passes_where_it_has_no_value() -> None:
    assert serve("--dllm-fdfo --allowed-media-domains").settings == Settings()
    assert serve(["--forward-pass-metrics-worker-id", ""]).settings == Settings()
    for line in ("--enable-tf32-matmul", "--grpc-mode"):
        assert refused(line).startswith(f"{line}: refused: It would ")


def test_services_named_by_the_reason_of_a_service_name_are_the_roles() -> None:
    named = re.search(r"\((.*), \.\.\.\)", reasons()["refused"]["service_name"])
    assert named is not None
    assert set(named[1].split(", ")) <= set(Role)


@pytest.mark.parametrize("row", SETTLED, ids=by_flag)
def test_settled_flag_changes_nothing(row: SglangArgument) -> None:
    if row.flags[0] != "--config":  # ours: a file, see the tests of load
        assert serve([row.flags[0], *typed_values(row)]).settings == Settings()


def test_keys_are_taken_from_the_command_line_and_written_nowhere(tmp_path: Path) -> None:
    settings = serve("--api-key swordfish --admin-api-key trout").settings
    assert (settings.access.api_key, settings.access.admin_api_key) == ("swordfish", "trout")
    write_yaml(settings, tmp_path / "settings.yaml")
    written = (tmp_path / "settings.yaml").read_text()
    assert "swordfish" not in written
    assert "trout" not in written
    environment = child_environment(settings)
    assert environment["ANTIPHON_ACCESS__API_KEY"] == "swordfish"
    assert environment["ANTIPHON_ACCESS__ADMIN_API_KEY"] == "trout"


def test_command_line_of_sglang_is_taken_as_it_is() -> None:
    settings = serve(
        "--model /models/small --served-model-name small --host 0.0.0.0 --port 31000 --tp 1 "
        "--dp-size 1 --dtype half --context-len 1024 --mem-frac .8 --max-running-requests 8 "
        "--max-total-tokens 4096 --chunked-prefill-size 512 --random-seed 42 --trust-remote-code "
        "--disable-radix-cache --schedule-conservativeness 1 --log-level INFO --enable-metrics"
    ).settings
    assert (settings.model.path, settings.cluster.model) == ("/models/small", "small")
    assert (settings.gateway.host, settings.gateway.port) == ("0.0.0.0", 31000)
    assert (settings.model.dtype, settings.model.context_tokens) == ("float16", 1024)
    assert (settings.cache.static_ratio, settings.cache.tokens_max) == (0.8, 4096)
    assert (settings.batching.running_max, settings.batching.chunk_tokens) == (8, 512)
    assert settings.model.random_seed == 42


def test_chunk_raises_the_step_unless_that_is_set_and_may_exceed_prefill_tokens() -> None:
    assert serve("--chunked-prefill-size 8192").settings.batching.tokens_max == 8192
    both = serve("--chunked-prefill-size 4096 --max-prefill-tokens 16384").settings.batching
    assert (both.chunk_tokens, both.tokens_max, both.fill_tokens) == (4096, 4096, 16384)
    said = refused("--chunked-prefill-size 4096 --batching-tokens-max 1024")
    assert "chunk_tokens = 4096 exceeds tokens_max = 1024" in said
    batching = serve("--chunked-prefill-size 512 --max-prefill-tokens 64").settings.batching
    assert (batching.chunk_tokens, batching.fill_tokens) == (512, 64)
    assert serve("--chunked-prefill-size -1").settings.batching.chunk_tokens == -1


def test_white_space_of_json_is_bounded_or_the_pattern_is_refused() -> None:
    flag = "--constrained-json-whitespace-pattern"
    assert serve([flag, r"[\n\t\r ]{0,12}"]).settings.grammar.whitespace_max == 12
    assert serve([flag, r"[\n\t\r ]{0,1000}"]).settings.grammar.whitespace_max == 256
    assert serve([flag, r"[ \n\r\t]?"]).settings.grammar.whitespace_max == 1
    for pattern in (r"[ \n\r\t]*", r"\s*", r"[\s]*"):
        assert serve([flag, pattern]).settings.grammar == GrammarConfig()
    # What the grammar may write is a part of what the pattern allows.
    for pattern in (r"[\n\t ]*", r"[ ]{0,4}", " ?", r"[ \n]{,3}", " *"):
        assert serve([flag, pattern]).settings.grammar == GrammarConfig(compact_json=True)
    for pattern in ("", " ", " +", r"[\n]*", r"[ ]{2}", r"[ \n\r\t]{0,0}", "( |x)*", "[ x]*"):
        assert "must be a set of white space" in refused([flag, pattern])
    assert serve("--constrained-json-disable-any-whitespace").settings.grammar.compact_json


def test_parser_that_is_not_built_is_refused_by_name() -> None:
    assert serve("--tool-call-parser hermes").settings.gateway.tool_call_parser == "hermes"
    for line in ("--tool-call-parser gemma4", "--reasoning-parser muse"):
        assert f"{line}: refused: This format" in refused(line)
    said = refused("--tool-call-parser x")
    assert "gateway.tool_call_parser = 'x': must be one of auto, none" in said


def test_drafts_are_one_chain_of_a_model_that_is_named() -> None:
    line = "--speculative-algorithm STANDALONE --speculative-draft-model-path /models/draft "
    chain = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    speculation = serve(line + chain).settings.speculation
    assert (speculation.algorithm, speculation.draft_model) == ("standalone", "/models/draft")
    assert (speculation.draft_steps, speculation.verify_tokens) == (3, 4)
    said = refused(f"{line} --speculative-eagle-topk 4")
    assert "--speculative-eagle-topk 4: refused: It would set the branches of a draft tree." in said
    assert "verified as one chain" in said
    unquantized = serve(f"{line} --speculative-draft-model-quantization unquant --quantization fp8")
    assert unquantized.settings.speculation.draft_quantization is None


def test_tracing_is_switched_on_by_its_own_flag_only() -> None:
    told = serve("--otlp-traces-endpoint far:4318").settings.telemetry
    assert (told.traces, told.otlp_endpoint) == (False, "far:4318")
    told = serve("--enable-trace").settings.telemetry
    assert (told.traces, told.otlp_endpoint) == (True, "localhost:4317")


def test_deterministic_inference_gives_a_seed_to_requests_that_name_none() -> None:
    model = serve("--enable-deterministic-inference").settings.model
    assert (model.deterministic, model.random_seed) == (True, 42)
    assert serve("--enable-deterministic-inference --random-seed 7").settings.model.random_seed == 7


def test_short_forms_of_ours_and_a_model_before_or_behind_the_flags() -> None:
    settings = serve("--nats-url nats://a:1 --encoder-model-path /m --port 0 --host ::1").settings
    assert (settings.bus.url, settings.encoder.model_path) == ("nats://a:1", "/m")
    assert (settings.gateway.host, settings.gateway.port) == ("::1", 0)
    assert "--port" in other_names()["gateway.port"]
    assert serve("/models/a --port 0").settings.model.path == "/models/a"
    assert serve("--port 0 /models/a").settings.model.path == "/models/a"


def test_flag_that_was_typed_is_the_source_of_a_mistake() -> None:
    said = refused("--port 99999")
    assert said == "--port: gateway.port = '99999': must be an integer >= 0, <= 65535"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--prot 1", "--prot: no such argument; did you mean --port?"),
        ("--port", "expected one argument"),
        ("--pp 1", "ambiguous option: --pp could match"),
        ("one two", "two: no such argument"),
        ("one --model-path two", "one: --model-path already sets the model"),
        ("--max-model-len 8", "--max-model-len: no such argument; use --context-length"),
        (
            "--attn-cp-size 2",
            "--attn-cp-size 2: refused: It would split the attention",
        ),
        ("--api-key schlüssel", "--api-key: access.api_key = ***: must be text matching"),
        (
            "--lora-paths a=b c=d",
            "--lora-paths: refused: It would list adapters that are loaded at start. LoRA",
        ),
    ],
)
def test_bad_command_line_is_refused_in_one_line(line: str, message: str) -> None:
    said = refused(line)
    assert message in said
    assert "\n" not in said


OTHER_MEANINGS = """--disable-priority-scheduling --enable-priority-preemption --no-radix-cache
--disable-mixed-chunk --disable-metrics --enable-overlap-schedule --min-prefill-tokens=1
--encode-log-interval --max-model-length"""


@pytest.mark.parametrize("typed", OTHER_MEANINGS.split())
def test_guess_is_not_an_argument_of_another_meaning(typed: str) -> None:
    assert refused(typed) == f"{typed}: no such argument"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--radix-evicton-policy", "--radix-eviction-policy"),
        ("--disable-priority-preemptions", "--disable-priority-preemption"),
        ("--max_running_requests=4", "--max-running-requests"),
        ("--detokeniser-worker-num", "--detokenizer-worker-num"),
        ("--dpsize", "--dp-size"),
    ],
)
def test_guess_is_the_misspelled_argument(typed: str, meant: str) -> None:
    assert refused(typed) == f"{typed}: no such argument; did you mean {meant}?"


def test_flat_yaml_file_of_sglang_is_read_beside_our_groups(tmp_path: Path) -> None:
    file = tmp_path / "sglang.yaml"
    file.write_text(
        """
        model-path: /models/small
        served_model_name: small
        model: {dtype: float32}
        tp-size: 1
        chunked-prefill-size: 8192
        trust-remote-code: true
        disable_radix_cache: true
        enable-cache-report: false
        max_running_requests: 8
        json-model-override-args: {"a": 1}
        api-key: swordfish
        lora-paths: null
        batching: {fill_tokens: 100}
        """
    )
    settings = serve(["--config", str(file), "--max-running-requests", "9"]).settings
    assert (settings.model.path, settings.cluster.model) == ("/models/small", "small")
    assert settings.model.dtype == "float32"
    assert (settings.batching.chunk_tokens, settings.batching.tokens_max) == (8192, 8192)
    assert (settings.cache.prefix, settings.gateway.cache_report) == (False, False)
    assert (settings.batching.running_max, settings.batching.fill_tokens) == (9, 100)
    assert (settings.load.config_overrides, settings.access.api_key) == ('{"a":1}', "swordfish")


def test_flat_yaml_file_of_sglangs_empty_defaults_sets_nothing(tmp_path: Path) -> None:
    """As SGLang's own dump of its arguments has them."""
    file = tmp_path / "sglang.yaml"
    file.write_text(
        """
        encoder_urls: []
        encoder_register_urls: []
        allowed_media_domains: []
        uvicorn_access_log_exclude_prefixes: []
        forward_pass_metrics_worker_id: ''
        dllm_fdfo: true
        enable_lora: null
        """
    )
    assert serve(["--config", str(file)]).settings == Settings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("attn-cp-size: 2", "attn-cp-size 2: refused: It would split the attention"),
        ("enable-lora: true", "enable-lora: refused: It would serve LoRA adapters"),
        (
            "max-running-request: 2",
            "max-running-request: no such group or argument; did you mean max-running-requests?",
        ),
        ("max-running-requests: x", "batching.running_max = 'x': must be an integer"),
        ("load-format: npcache", "npcache: refused: It converts torch files"),
    ],
)
def test_flat_yaml_is_refused_as_the_flags_are(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "sglang.yaml"
    file.write_text(text)
    said = refused(["--config", str(file)])
    assert message in said
    assert said.startswith(str(file))
