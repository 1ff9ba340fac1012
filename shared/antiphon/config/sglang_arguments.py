"""SGLang's arguments: the setting that each one maps to, or why it is rejected; and their flags.

The table is `sglang_flags.tsv`. A row's answer is a path (and the translation of its value),
`settled` (true with or without the argument) or `refused`, each with a reason in
`sglang_reasons.tsv`, which follows a sentence about what a rejected argument would do. A rejected
flag is accepted with values that have no effect. `sglang_values.tsv` has the rejected values of
supported arguments, and `argument_tests.tsv`, which is generated, the test of each argument.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Literal, cast

import msgspec

from antiphon.config.errors import ConfigError
from antiphon.config.fields import fields
from antiphon.config.flags import IMPLIED, Parser, StoreText, TypedText, add_settings
from antiphon.config.sourced_value import Value
from antiphon.config.worker import WHITESPACE_MAX

Status = Literal["works", "partly", "refused"]

PARTLY_HELD = frozenset({"images", "remote_code"})
"""Reasons of settled arguments that are fulfilled only in part."""


class SglangArgument(msgspec.Struct, frozen=True):
    group: str
    """A config group of SGLang 0.5.23, or `Older names`."""
    flags: tuple[str, ...]
    """All its flags; the first is the name of the field, if there is one."""
    takes: str
    """Type and count of its values: `int`, `text+`, `switch` (none), ..."""
    neutral: tuple[str, ...]
    """Values with which a rejected flag has no effect."""
    verdict: str
    """The path of the setting that it sets, `settled` or `refused`."""
    detail: str = ""
    """The name of the value's translation, or of the reason."""
    would: str = ""
    """What a rejected argument would do, after "It would"."""

    @property
    def name(self) -> str:
        return self.flags[0].removeprefix("--").replace("-", "_")

    @property
    def path(self) -> str | None:
        return self.verdict if self.verdict in fields() else None

    @property
    def refused_values(self) -> Mapping[str, str]:
        return values().get(self.flags[0], {})

    @property
    def status(self) -> Status:
        if self.verdict == "refused":
            return "refused"
        if self.refused_values or self.detail in PARTLY_HELD:
            return "partly"
        return "works"

    @property
    def reason(self) -> str:
        """Why it is rejected or has no effect, or which values are rejected and why."""
        if self.verdict == "refused":
            return f"It would {self.would}. {reasons()['refused'][self.detail]}"
        if self.verdict == "settled":
            return reasons()["settled"][self.detail]
        by_reason: dict[str, list[str]] = {}
        for value, reason in self.refused_values.items():
            by_reason.setdefault(reason, []).append(value)
        listed = ((", ".join(refused), why) for why, refused in by_reason.items())
        return " ".join(f"{refused}: refused. {why}" for refused, why in listed)


class ArgumentStatus(msgspec.Struct, frozen=True):
    """One SGLang argument in the output of `antiphon config arguments --json`."""

    name: str
    flags: tuple[str, ...]
    status: Status
    reason: str
    test: str
    """The test that covers it; empty for a rejected one."""


@functools.cache
def rows() -> tuple[SglangArgument, ...]:
    return tuple(_row(*line) for line in _table("sglang_flags.tsv"))


@functools.cache
def reasons() -> Mapping[str, Mapping[str, str]]:
    """Why arguments are `settled` or `refused`: sentences, one per topic, by its name."""
    by_verdict: dict[str, dict[str, str]] = {}
    for verdict, name, reason in _table("sglang_reasons.tsv"):
        by_verdict.setdefault(verdict, {})[name] = reason
    return by_verdict


@functools.cache
def values() -> Mapping[str, Mapping[str, str]]:
    """By main flag: the rejected values of supported arguments, with their reasons."""
    refused: dict[str, dict[str, str]] = {}
    for flag, listed, reason in _table("sglang_values.tsv"):
        names = [listed] if listed.startswith("<") else listed.split(",")
        refused.setdefault(flag, {}).update(dict.fromkeys(names, reason))
    return refused


def arguments() -> tuple[ArgumentStatus, ...]:
    tests = dict(_table("argument_tests.tsv"))
    return tuple(
        ArgumentStatus(
            name=row.name,
            flags=row.flags,
            status=row.status,
            reason=row.reason,
            test="" if row.status == "refused" else tests.get(row.flags[0], ""),
        )
        for row in rows()
    )


class TranslatedValue(msgspec.Struct, frozen=True):
    """The text for a setting, and by path the texts that it implies unless they are set."""

    text: str | None
    implied: Mapping[str, str] = {}


class Translation(msgspec.Struct, frozen=True):
    """The way of a value from SGLang's argument to a setting, and back."""

    forward: Callable[[str], TranslatedValue]
    back: Callable[[Value], Value] = lambda value: value


def _renamed(**names: str) -> Callable[[str], TranslatedValue]:
    return lambda text: TranslatedValue(names.get(text, text))


def _always(text: str, implied: Mapping[str, str] = {}) -> Callable[[str], TranslatedValue]:
    return lambda _: TranslatedValue(text, implied)


def _chunk(text: str) -> TranslatedValue:
    """A chunk above the default step size raises the step size."""
    if not text.isdecimal():
        return TranslatedValue(text)
    step = fields()["batching.tokens_max"].default
    assert isinstance(step, int)
    return TranslatedValue(text, {"batching.tokens_max": str(max(step, int(text)))})


_NEVER = 2**64 - 1
"""No difference of priorities exceeds it: they have 64 bits."""


def _whitespace(text: str) -> TranslatedValue:
    """White space that a pattern allows: all of JSON's up to a limit, or JSON on one line.

    A pattern sets what may be between two elements, and none of it is required: allowing less is
    within it. JSON on one line has single spaces, so the pattern must allow these.
    """
    match = _WHITESPACE.fullmatch(text)
    written = set(re.findall(r"\\.| ", match["allowed"])) if match else set[str]()
    allowed = written | _JSON_WHITE if r"\s" in written else written
    most = int(match["most"] or "1") if match else 0
    if " " not in allowed or most == 0:
        raise ConfigError(
            f"--constrained-json-whitespace-pattern {text}: refused: must be a set of white space "
            r"with the space in it and *, ? or a bound: [ \n\r\t]{0,8}, [\n\t ]*, ' ?'"
        )
    if not allowed >= _JSON_WHITE:
        return TranslatedValue(None, {"grammar.compact_json": "true"})
    return TranslatedValue(None if text.endswith("*") else str(min(most, WHITESPACE_MAX)))


_MEBIBYTE = 1024**2


def _media_megabytes(text: str) -> TranslatedValue:
    """A limit of images and of videos, of the gateway and of encoders, which have their own."""
    if not text.isdecimal():
        return TranslatedValue(text)
    size = str(int(text) * _MEBIBYTE)
    others = ("media.video_bytes_max", "encoder.image_bytes_max", "encoder.video_bytes_max")
    return TranslatedValue(size, dict.fromkeys(others, size))


def _media_seconds(text: str) -> TranslatedValue:
    """A limit of images and of videos."""
    return TranslatedValue(text, {"media.video_fetch_timeout_s": text})


class _MediaLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Items of one request, by kind."""

    image: int | None = None
    video: int | None = None
    audio: int | None = None


def _images_limit(text: str) -> TranslatedValue:
    """The limits of images, videos and audio files."""
    try:
        limits = msgspec.json.decode(text, type=_MediaLimits)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"--limit-mm-data-per-request {text}: refused: {error}; must be a JSON object such as "
            '{"image": 4}'
        ) from error
    others = {"media.videos_max": limits.video, "media.audios_max": limits.audio}
    given = {name: str(limit) for name, limit in others.items() if limit is not None}
    return TranslatedValue(None if limits.image is None else str(limits.image), given)


class _ImageProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    min_pixels: int = 0
    max_pixels: int = 0


class _MediaProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How media are preprocessed, by kind."""

    image: _ImageProcess = _ImageProcess()


def _media_process(text: str) -> TranslatedValue:
    try:
        image = msgspec.json.decode(text, type=_MediaProcess).image
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"--mm-process-config {text}: refused: {error}; must be a JSON object with image, "
            "which may have min_pixels and max_pixels"
        ) from error
    return TranslatedValue(str(image.max_pixels), {"media.pixels_min": str(image.min_pixels)})


def _sizes(text: str) -> TranslatedValue:
    try:
        sizes = msgspec.json.decode(text, type=list[int])
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"--piecewise-cuda-graph-tokens {text}: refused: {error}; must be a JSON array such as "
            "[64, 256]"
        ) from error
    return TranslatedValue(" ".join(map(str, sizes)))


_TORCHAO = "torchao-"
_JSON_WHITE = frozenset({" ", r"\n", r"\r", r"\t"})
_WHITESPACE = re.compile(
    r"(?P<allowed>\[(?: |\\[nrts])+\]| |\\s)(?:\*|\?|\{0?,(?P<most>\d{1,9})\})"
)

TRANSLATIONS: Mapping[str, Translation] = {
    "": Translation(TranslatedValue),
    "algorithm": Translation(
        lambda text: TranslatedValue(text.lower()),
        lambda value: None if value == "none" else str(value).upper(),
    ),
    "attention": Translation(
        _renamed(torch_native="torch", intel_amx="cpu"),
        lambda value: {"torch": "torch_native", "cpu": "intel_amx"}.get(str(value), value),
    ),
    "cache_dtype": Translation(_renamed(bf16="bfloat16")),
    # The flag without a value compares with the model of the same name on the hub.
    "checksum": Translation(lambda text: TranslatedValue(text or "hub")),
    "chunk": Translation(_chunk),
    # SGLang's switch also sets a seed for requests without one.
    "default_at_0": Translation(lambda text: TranslatedValue(None if text == "0" else text)),
    "deterministic": Translation(
        _always("true", {"model.random_seed": "42"}), lambda value: value is True
    ),
    "dtype": Translation(_renamed(half="float16", float="float32")),
    "hidden_mode": Translation(
        _renamed(full="true"), lambda value: "full" if value is True else None
    ),
    # SGLang's name for its own layers means Antiphon's layers here.
    "images_limit": Translation(
        _images_limit, lambda value: msgspec.json.encode({"image": value}).decode()
    ),
    "impl": Translation(
        _renamed(sglang="antiphon"), lambda value: "sglang" if value == "antiphon" else value
    ),
    "lower": Translation(
        lambda text: TranslatedValue(text.lower()), lambda value: str(value).lower()
    ),
    "media_megabytes": Translation(_media_megabytes, lambda value: cast("int", value) // _MEBIBYTE),
    "media_seconds": Translation(_media_seconds),
    "media_process": Translation(
        _media_process,
        lambda value: msgspec.json.encode({"image": {"max_pixels": value}}).decode(),
    ),
    "never": Translation(_always(str(_NEVER)), lambda value: value == _NEVER),
    "none": Translation(_always("0"), lambda value: value == 0),
    "off": Translation(_always("false"), lambda value: value is False),
    "on": Translation(_always("true"), lambda value: value is True),
    "sampler": Translation(
        _renamed(pytorch="torch"), lambda value: "pytorch" if value == "torch" else value
    ),
    "sizes": Translation(_sizes, lambda value: f"[{', '.join(str(value).split())}]"),
    "torchao": Translation(
        lambda text: TranslatedValue(f"{_TORCHAO}{text}" if text else None),
        lambda value: str(value).removeprefix(_TORCHAO) if str(value).startswith(_TORCHAO) else "",
    ),
    # The draft model's quantization is never the served model's, which this value switches off.
    "unquant": Translation(lambda text: TranslatedValue(None if text == "unquant" else text)),
    "whitespace": Translation(_whitespace, lambda _: None),  # expressed by the limit
}
"""Translations of SGLang values, by the word after the path in `sglang_flags.tsv`."""


def shown(row: SglangArgument, value: Value) -> Value:
    """The argument's value for a setting's; for a rejected argument, one that has no effect."""
    if row.path is not None:
        return TRANSLATIONS[row.detail].back(value)
    if row.verdict == "settled":
        return row.takes == "switch" and row.detail not in (*PARTLY_HELD, "no_effect")
    if row.takes == "switch":
        return False
    if not row.neutral:
        return None
    neutral = row.neutral[-1]
    if row.takes.startswith(("text", "json")):
        return neutral  # `null` is text here: a mode of disaggregation
    return cast("Value", json.loads(neutral))


def _table(name: str) -> Iterator[list[str]]:
    text = resources.files("antiphon.config").joinpath(name).read_text("utf-8")
    for line in text.splitlines()[1:]:
        yield line.split("\t")


def _row(
    group: str, flags: str, takes: str, neutral: str, answer: str, would: str
) -> SglangArgument:
    verdict, _, detail = answer.partition(" ")
    accepted = tuple(neutral.split(",")) if neutral else ()
    return SglangArgument(group, tuple(flags.split()), takes, accepted, verdict, detail, would)


OUR_SHORT = {
    "--nats-url": "bus.url",
    "--nats-port": "supervisor.nats_port",
    "--metrics-port-base": "supervisor.metrics_port_base",
    "--allowed-local-media-path": "media.allowed_local_path",
}
"""Short forms that SGLang does not have."""


VLLM = {
    "--max-model-len": "--context-length",
    "--max-num-seqs": "--max-running-requests",
    "--max-num-batched-tokens": "--max-prefill-tokens",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--block-size": "--page-size",
    "--seed": "--random-seed",
    "--hf-overrides": "--json-model-override-args",
    "--generation-config": "--sampling-defaults",
    "--kv-cache-memory-bytes": "--cache-bytes-max",
    "--ssl-ca-cert": "--ssl-ca-certs",
}
"""vLLM's names of flags that have other names here."""


def other_names() -> Mapping[str, Sequence[str]]:
    """The alternative flags of each path, Antiphon's and SGLang's."""
    names: dict[str, list[str]] = {path: [flag] for flag, path in OUR_SHORT.items()}
    for row in rows():
        if row.path is not None:
            shown = [flag for flag in row.flags if flag != fields()[row.path].flag]
            names.setdefault(row.path, []).extend(shown)
    return names


def serve_parser(prog: str, description: str) -> Parser:
    """The parser of `antiphon serve`: Antiphon's flags, their short forms, and SGLang's flags."""
    parser = Parser(prog, description)
    parser.foreign = VLLM
    model_help = "the same as --model-path"
    parser.add_argument("model.path", nargs="?", metavar="MODEL", help=model_help, action=StoreText)
    config_help = "YAML file with Antiphon's groups, or with SGLang's flat keys"
    parser.add_argument("--config", metavar="FILE", help=config_help)
    add_settings(parser, also=other_names())
    for flag, path in OUR_SHORT.items():
        row = SglangArgument(group="", flags=(flag,), takes="text", neutral=(), verdict=path)
        _add(parser, row, row.flags)
    for row in rows():
        # `--model-path` is the same flag in both.
        parser.refused.update(dict.fromkeys(row.flags, row.refused_values))
        flags = [flag for flag in row.flags if flag not in parser.flags()]
        if flags:
            _add(parser, row, flags)
    return parser


class _Translate(argparse.Action):
    """Translates an SGLang flag to a setting, ignores it, or rejects it."""

    row: SglangArgument

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[str] | None,
        option_string: str | None = None,
    ) -> None:
        flag = option_string or self.row.flags[0]
        text = values if isinstance(values, str) else " ".join(values or ())
        given = translate(self.row, flag, text)
        for path, value in given.implied.items():
            setattr(namespace, f"{IMPLIED}{path}", TypedText(value, flag))
        if self.row.path is not None and given.text is not None:
            setattr(namespace, self.row.path, TypedText(given.text, flag))


def rows_by_key() -> Mapping[str, SglangArgument]:
    """The arguments by their keys in SGLang's YAML files: flags without leading dashes."""
    return {flag.removeprefix("--"): row for row in rows() for flag in row.flags}


def translate(row: SglangArgument, flag: str, text: str) -> TranslatedValue:
    """Translate the value of an SGLang argument; empty for a switch. `flag` is as typed."""
    if row.path is not None:
        if (reason := row.refused_values.get(text)) is not None:
            raise ConfigError(f"{flag} {text}: refused: {reason}")
        return TRANSLATIONS[row.detail].forward(text)
    if row.verdict == "refused" and not _neutral(row, text):
        # The value is shown only if another one would be accepted; some, like keys, are secret.
        typed = f"{flag} {text}".rstrip() if row.neutral else flag
        raise ConfigError(f"{typed}: refused: {row.reason}")
    return TranslatedValue(None)


def _add(parser: Parser, row: SglangArgument, flags: Sequence[str]) -> None:
    last = row.takes[-1]
    count = last if last in "+*?" else 0 if row.takes == "switch" else None
    dest = f"sglang:{row.flags[0]}"
    action = parser.add_argument(
        *flags, action=_Translate, dest=dest, nargs=count, help=argparse.SUPPRESS
    )
    assert isinstance(action, _Translate)
    action.row = row


def _neutral(row: SglangArgument, text: str) -> bool:
    if row.takes == "bool?":
        text = text or "true"  # the flag alone
    if not text and row.takes in ("text", "text*"):
        return True
    return any(_same(text, neutral) for neutral in row.neutral)


def _same(text: str, neutral: str) -> bool:
    """Compare as JSON values where both parse: `1.0` is `1`, and `{ }` is `{}`."""
    if text == neutral:
        return True
    try:
        return bool(json.loads(text) == json.loads(neutral))
    except ValueError:
        return False
