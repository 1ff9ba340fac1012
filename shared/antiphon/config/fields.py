"""All settings as `SettingField`s, from which flags, environment, YAML and reference are built."""

from __future__ import annotations

import ast
import functools
import inspect as source
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, cast, get_args, get_type_hints

import msgspec
from msgspec import inspect

from antiphon.config.schema import Secret
from antiphon.config.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping


class SettingField(msgspec.Struct, frozen=True):
    config: type[msgspec.Struct]
    group: str
    name: str
    annotation: object
    """The type for `msgspec.convert`, with bounds."""
    default: str | int | float | bool | None
    kind: str
    """The type as text: integer, number, text, boolean or one of a set."""
    choices: tuple[str, ...] = ()
    unit: str = ""
    bounds: str = ""
    optional: bool = False
    secret: bool = False

    @property
    def path(self) -> str:
        return f"{self.group}.{self.name}"

    @property
    def flag(self) -> str:
        return f"--{self.group}-{self.name}".replace("_", "-")

    @property
    def variable(self) -> str:
        return f"ANTIPHON_{self.group}__{self.name}".upper()

    @property
    def help(self) -> str:
        return help_texts(self.config.__module__)[self.config.__name__, self.name]


class Group(msgspec.Struct, frozen=True):
    name: str
    title: str
    """First line of the struct's docstring."""
    fields: tuple[SettingField, ...]


@functools.cache
def groups() -> tuple[Group, ...]:
    return tuple(_group(member.name, member.type) for member in msgspec.structs.fields(Settings))


@functools.cache
def help_texts(module: str) -> Mapping[tuple[str, str], str]:
    """The docstring below each field of a module's structs, by the names of both.

    Python does not keep them, so they are read from the source as vLLM does it: only for help and
    for the OpenAPI document, since it takes a hundredth of a second.
    """
    statements = ast.parse(source.getsource(sys.modules[module])).body
    texts: dict[tuple[str, str], str] = {}
    for config in (one for one in statements if isinstance(one, ast.ClassDef)):
        for pair in pairwise(config.body):
            match pair:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    texts[config.name, name] = " ".join(text.split())
                case _:
                    pass
    return texts


@functools.cache
def fields() -> Mapping[str, SettingField]:
    return {field.path: field for group in groups() for field in group.fields}


def value_at(settings: Settings, field: SettingField) -> str | int | float | bool | None:
    return msgspec.to_builtins(getattr(getattr(settings, field.group), field.name))


def _group(name: str, config: type[msgspec.Struct]) -> Group:
    hints = get_type_hints(config, include_extras=True)
    title = (config.__doc__ or "").partition("\n")[0]
    members = msgspec.structs.fields(config)
    rows = (_field(config, name, member, hints[member.name]) for member in members)
    return Group(name=name, title=title, fields=tuple(rows))


def _field(
    config: type[msgspec.Struct], group: str, member: msgspec.structs.FieldInfo, annotation: object
) -> SettingField:
    type_, unit, optional = _unwrap(annotation)
    return SettingField(
        config=config,
        group=group,
        name=member.name,
        annotation=annotation,
        default=msgspec.to_builtins(member.default),
        kind=_KINDS[type(type_)],
        choices=_choices(type_),
        unit=unit,
        bounds=_bounds(type_),
        optional=optional,
        secret=any(isinstance(extra, Secret) for extra in get_args(annotation)),
    )


def _unwrap(annotation: object) -> tuple[inspect.Type, str, bool]:
    """The type of the value, its unit, and whether it may be None."""
    type_, unit, optional = inspect.type_info(annotation), "", False
    while True:
        match type_:
            case inspect.UnionType(types=members):
                type_ = next(one for one in members if not isinstance(one, inspect.NoneType))
                optional = True
            case inspect.Metadata(type=value):
                extra = cast("Mapping[str, object]", type_.extra or {})  # pyright: ignore[reportUnknownMemberType]
                type_, unit = value, unit or str(extra.get("unit", ""))
            case _:
                return type_, unit, optional


_KINDS: Mapping[type[inspect.Type], str] = {
    inspect.IntType: "integer",
    inspect.FloatType: "number",
    inspect.StrType: "text",
    inspect.BoolType: "boolean",
    inspect.EnumType: "choice",
    inspect.LiteralType: "choice",
}
"""The types that a flag can carry."""


def _choices(type_: inspect.Type) -> tuple[str, ...]:
    match type_:
        case inspect.EnumType(cls=enum):
            return tuple(str(member.value) for member in enum)
        case inspect.LiteralType(values=values):
            return tuple(str(value) for value in values)
        case _:
            return ()


def _bounds(type_: inspect.Type) -> str:
    limits: dict[str, object] = {}
    if isinstance(type_, inspect.IntType | inspect.FloatType):
        limits = {">": type_.gt, ">=": type_.ge, "<": type_.lt, "<=": type_.le}
    elif isinstance(type_, inspect.StrType):
        limits = {
            "of length >=": type_.min_length,
            "of length <=": type_.max_length,
            "matching": type_.pattern,
        }
    return ", ".join(
        # 0 and 0.0 are the same bound: typing caches whichever was imported first.
        f"{sign} {limit:g}" if isinstance(limit, float) else f"{sign} {limit}"
        for sign, limit in limits.items()
        if limit is not None
    )
