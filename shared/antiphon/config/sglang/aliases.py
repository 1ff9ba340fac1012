"""SGLang's flags on the command line of `antiphon serve`, beside ours."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from antiphon.config.errors import ConfigError
from antiphon.config.fields import fields
from antiphon.config.flags import IMPLIED, Parser, TypedText, add_settings
from antiphon.config.sglang.arguments import SglangArgument, rows
from antiphon.config.sglang.values import TRANSLATIONS, TranslatedValue

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
"""Names that vLLM has for what has another one here."""


def other_names() -> Mapping[str, Sequence[str]]:
    """The other flags of each path, ours and SGLang's."""
    names: dict[str, list[str]] = {path: [flag] for flag, path in OUR_SHORT.items()}
    for row in rows():
        if row.path is not None:
            shown = [flag for flag in row.flags if flag != fields()[row.path].flag]
            names.setdefault(row.path, []).extend(shown)
    return names


def serve_parser(prog: str, description: str) -> Parser:
    """The command line of `antiphon serve`: our flags, their short forms, and all of SGLang's."""
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
        row = SglangArgument(group="", flags=(flag,), takes="text", neutral=(), answer=path)
        _add(parser, row, row.flags)
    for row in rows():
        # `--model-path` is ours as well, and the same.
        parser.refused.update(dict.fromkeys(row.flags, row.refused_values))
        flags = [flag for flag in row.flags if flag not in parser.flags()]
        if flags:
            _add(parser, row, flags)
    return parser


class _ModelArgument(argparse.Action):
    """Takes the model before or behind the flags, as vLLM's users write it."""

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
    """Turns a typed SGLang flag into our setting, nothing, or a refusal."""

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
    """The arguments by their keys in SGLang's YAML files: flags without the leading dashes."""
    return {flag.removeprefix("--"): row for row in rows() for flag in row.flags}


def translate(row: SglangArgument, flag: str, text: str) -> TranslatedValue:
    """Write the value of an SGLang argument as ours.

    Args:
        row: The argument.
        flag: How it was spelled, for messages.
        text: Its value; empty for a switch.

    Raises:
        ConfigError: The argument or this value of it is refused; says why.
    """
    if row.path is not None:
        reason = row.refused_values.get(text)
        if reason is not None:
            raise ConfigError(f"{flag} {text}: refused: {reason}")
        return TRANSLATIONS[row.detail](text)
    if row.verdict == "refused" and not _neutral(row, text):
        # The value is of interest only where another would pass; some, like keys, are secret.
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
    """Whether a value of a refused argument changes nothing."""
    if row.takes == "bool?":
        text = text or "true"  # the flag alone
    if not text and row.takes in ("text", "text*"):
        return True
    return any(_same(text, neutral) for neutral in row.neutral)


def _same(text: str, neutral: str) -> bool:
    """Compare as values where both are: `1.0` is `1`, and `{ }` is `{}`."""
    if text == neutral:
        return True
    try:
        return bool(json.loads(text) == json.loads(neutral))
    except ValueError:
        return False
