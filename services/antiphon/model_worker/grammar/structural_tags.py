"""Structural tags: free text with tags inside, whose content follows a grammar of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.model_worker.grammar.schema import DEPTH_MAX, PATTERN_MAX, prepare_schema, read_json
from antiphon.wire.errors import InvalidRequest

if TYPE_CHECKING:
    from antiphon.wire.schemas import Json

RULES_MAX = 32_768
"""Longest text of rules, for the reason of `PATTERN_MAX`."""

_OF_TOKENS = frozenset(
    {"token", "exclude_token", "any_tokens", "token_triggered_tags", "token_dispatch"}
)


def parse_structural_tag(text: str, whitespace_max: int) -> Json:
    """Parse a structural tag; one of `structures` and `triggers` is converted to the newer form.

    Args:
        text: JSON.
        whitespace_max: Maximum white space between JSON tokens, where the tag does not set it.

    Raises:
        InvalidRequest: It is not a structural tag, or a schema in it cannot be enforced.
    """
    tag = read_json(text)
    if not isinstance(tag, dict):
        raise InvalidRequest("grammar: a structural tag is a JSON object", param="grammar")
    format_ = _triggered(tag) if "structures" in tag else tag.get("format")
    return {"type": "structural_tag", "format": _node(format_, whitespace_max, 0)}


def _triggered(tag: dict[str, Json]) -> Json:
    """The older form: free text until a trigger, then one of the tags that begin with it."""
    structures = tag["structures"]
    if not isinstance(structures, list):
        raise InvalidRequest("grammar: structures is a list", param="grammar")
    tags: list[Json] = [_tag(structure) for structure in structures]
    return {"type": "triggered_tags", "triggers": tag.get("triggers", []), "tags": tags}


def _tag(structure: Json) -> Json:
    if not isinstance(structure, dict):
        raise InvalidRequest("grammar: a structure is a JSON object", param="grammar")
    return {
        "type": "tag",
        "begin": structure.get("begin"),
        "content": {"type": "json_schema", "json_schema": structure.get("schema", {})},
        "end": structure.get("end"),
    }


def _node(node: Json, whitespace_max: int, depth: int) -> Json:
    if depth > DEPTH_MAX:
        raise InvalidRequest("grammar: nested too deep", param="grammar")
    if isinstance(node, list):
        return [_node(part, whitespace_max, depth + 1) for part in node]
    if not isinstance(node, dict):
        return node
    kind = node.get("type")
    if kind == "json_schema":
        return _content(node, whitespace_max)
    if isinstance(kind, str) and kind in _OF_TOKENS:
        # The tokens of tags are mostly special tokens, which have no text.
        message = f"grammar: {kind} is not supported; tags are found in the text"
        raise InvalidRequest(message, param="grammar")
    for word, characters_max in (("pattern", PATTERN_MAX), ("grammar", RULES_MAX)):
        length = len(str(node.get(word, "")))
        if length > characters_max:
            message = f"grammar: {word} has {length} characters; the limit is {characters_max}"
            raise InvalidRequest(message, param="grammar")
    return {word: _node(part, whitespace_max, depth + 1) for word, part in node.items()}


def _content(node: dict[str, Json], whitespace_max: int) -> Json:
    """JSON of a schema. The other styles are notations of certain models, with no free space."""
    if node.get("style", "json") != "json":
        return node
    prepare_schema(node.get("json_schema"))
    return {"max_whitespace_cnt": whitespace_max, **node}
