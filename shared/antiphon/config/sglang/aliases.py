"""SGLang's flags on the command line of `antiphon serve`, in addition to Antiphon's."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from antiphon.config.errors import ConfigError
from antiphon.config.fields import fields
from antiphon.config.flags import IMPLIED, Parser, TypedText, add_settings
from antiphon.config.sglang.arguments import TRANSLATIONS, SglangArgument, TranslatedValue, rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

OUR_SHORT = {
    "--nats-url": "bus.url",
    "--nats-port": "supervisor.nats_port",
    "--metrics-port-base": "supervisor.metrics_port_base",
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
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="the same as --model-path", action=_ModelArgument
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file with Antiphon's groups, or with SGLang's flat keys",
    )
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


class _ModelArgument(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[str] | None,
        option_string: str | None = None,
    ) -> None:
        del parser, option_string
        if isinstance(values, str):
            path = "model.path"
            if hasattr(namespace, path):
                raise ConfigError(
                    f"{values}: --model-path already sets the model; give one of them"
                )
            setattr(namespace, path, TypedText(values, "MODEL"))


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
        reason = row.refused_values.get(text)
        if reason is not None:
            raise ConfigError(f"{flag} {text}: refused: {reason}")
        return TRANSLATIONS[row.detail].forward(text)
    if row.verdict == "refused" and not _neutral(row, text):
        # The value is shown only if another one would be accepted; some, like keys, are secret.
        typed = f"{flag} {text}".rstrip() if row.neutral else flag
        raise ConfigError(f"{typed}: refused: {row.reason}")
    return TranslatedValue(None)


def _add(parser: Parser, row: SglangArgument, flags: Sequence[str]) -> None:
    count = {"+": "+", "*": "*", "?": "?"}.get(row.takes[-1], 0 if row.takes == "switch" else None)
    action = parser.add_argument(
        *flags,
        action=_Translate,
        dest=f"sglang:{row.flags[0]}",
        nargs=count,
        help=argparse.SUPPRESS,
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
