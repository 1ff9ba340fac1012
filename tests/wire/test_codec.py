"""The bytes of messages: as they were committed, bounded and checked, and read by later code."""

from __future__ import annotations

import gc
import struct
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect
from tests.support.bus_page import every_message
from tests.wire import golden
from tests.wire.examples import ERROR, EVERY, EXAMPLES

from antiphon.wire import errors, ids
from antiphon.wire.claim import GetPages, LookupPages, PutPages
from antiphon.wire.codec import (
    MalformedMessage,
    decode,
    decode_reply,
    encode,
    encode_json,
    id_count,
    is_json,
    pack_ids,
    unpack_ids,
)
from antiphon.wire.command import CommandBatch, DrainWorker, FlushCache
from antiphon.wire.errors import EngineError, ErrorReply, Internal, InvalidRequest, Overloaded
from antiphon.wire.generate import GenerateRequest
from antiphon.wire.heartbeat import Heartbeat
from antiphon.wire.kv_events import KvReplayed
from antiphon.wire.sampling import TokenOutputParams
from antiphon.wire.submit import AbortRequests, CancelAccepted, SubmitRequest
from antiphon.wire.text import TextBatch
from antiphon.wire.token_outputs import (
    TokenOutputs,
    TokenOutputsBuffer,
    TokenOutputsChunk,
    join_token_outputs,
    pack_floats,
    unpack_floats,
)
from antiphon.wire.tokenize import EncodeRequest
from antiphon.wire.tokens import TokenBatch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.wire.base import Message


each_example = pytest.mark.parametrize("example", EVERY, ids=lambda one: type(one).__name__)
CARRIED = {*every_message(), ErrorReply}
ERRORS = sorted(errors._TYPES.values(), key=lambda error: error.code)


def altered(message: type[Message], path: str, value: object) -> bytes:
    """Encode the example of a message with one field replaced, or left out if `value` is ..."""
    fields = msgspec.msgpack.decode(encode(EXAMPLES[message]))
    *parents, last = path.split(".")
    place = fields
    for parent in parents:
        place = place[int(parent) if parent.isdigit() else parent]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return msgspec.msgpack.encode(fields)


@each_example
def test_field_of_a_later_version_is_ignored(example: Message) -> None:
    later = altered(type(example), "field_of_tomorrow", {"deep": [1, 2]})
    assert decode(later, (type(example),)) == example


@each_example
def test_garbage_collector_follows_no_message(example: Message) -> None:
    """It would be set off by long lists, and stop a worker for as long as several steps."""
    assert not gc.is_tracked(decode(encode(example), (type(example),)))


def test_field_left_out_takes_its_default() -> None:
    earlier = altered(SubmitRequest, "priority", ...)
    assert decode(earlier, (SubmitRequest,)) == msgspec.structs.replace(
        EXAMPLES[SubmitRequest], priority=0
    )


@pytest.mark.parametrize("write", [encode, encode_json])
def test_message_of_another_route_is_refused(write) -> None:
    with pytest.raises(InvalidRequest, match="FlushCache"):
        decode(write(FlushCache()), (DrainWorker, CancelAccepted))


@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b"\xc1", b'{"type": 3}', b"{}", b'{"type":"DrainWorker"', b"[1]", b"\x80"],
)
def test_what_is_no_message_is_refused(payload: bytes) -> None:
    with pytest.raises(InvalidRequest, match="malformed message"):
        decode(payload, (DrainWorker, FlushCache))


@each_example
def test_cut_message_is_refused(example: Message) -> None:
    payload = encode(example)
    for size in range(len(payload)):
        with pytest.raises(InvalidRequest):
            decode(payload[:size], (type(example),))


@pytest.mark.parametrize(
    ("message", "path", "value"),
    [
        (GenerateRequest, "temperature", -0.1),
        (GenerateRequest, "temperature", 100.5),
        (GenerateRequest, "top_p", 0.0),
        (GenerateRequest, "top_p", 1.1),
        (GenerateRequest, "top_k", -2),
        (GenerateRequest, "min_p", 1.01),
        (GenerateRequest, "max_tokens", -1),
        (GenerateRequest, "seed", 2**63),
        (GenerateRequest, "stop", ["x"] * 33),
        (GenerateRequest, "stop", [""]),
        (GenerateRequest, "stop_token_ids", [-1]),
        (GenerateRequest, "timeout_s", 0),
        (GenerateRequest, "key", ...),
        (GenerateRequest, "stream", "yes"),
        (EncodeRequest, "messages.0.role", ""),
        (EncodeRequest, "messages.0.role", "r" * 65),
        (EncodeRequest, "messages.0.content", 5),
        (SubmitRequest, "choices", 0),
        (SubmitRequest, "owner", "gateway-0"),
        (SubmitRequest, "sampling.max_new_tokens", -1),
        (GetPages, "lease_s", 601),
        (GetPages, "lease_s", 0),
        (LookupPages, "chain", [b"x" * 31]),
    ],
)
def test_value_out_of_bounds_is_refused(message: type[Message], path: str, value: object) -> None:
    field = path.rpartition(".")[2]
    with pytest.raises(InvalidRequest, match=field):
        decode(altered(message, path, value), (message,))


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.code)
def test_error_crosses_the_bus_whole(kind: type[EngineError]) -> None:
    error = kind("why", param="model", retry_after_s=2.5, details={"a": "1"})
    reply = encode(errors.encode_error(error))
    with pytest.raises(kind) as raised:
        decode_reply(reply, (CancelAccepted,))
    again = raised.value
    assert type(again) is kind
    assert (again.code, again.status) == (kind.code, kind.status)
    assert (again.message, str(again), again.param) == ("why", "why", "model")
    assert (again.retry_after_s, again.details) == (2.5, {"a": "1"})


def test_every_error_of_the_tree_has_a_code_of_its_own() -> None:
    def tree(kind: type[EngineError]) -> set[type[EngineError]]:
        return {kind}.union(*(tree(child) for child in kind.__subclasses__()))

    of_wire = {kind for kind in tree(EngineError) if kind.__module__ == errors.__name__}
    assert of_wire - {EngineError} == set(ERRORS)
    assert len({kind.code for kind in ERRORS}) == len(ERRORS)


def test_error_of_tomorrow_or_in_json_is_raised() -> None:
    reply = encode(ErrorReply(code="new", message="what is this"))
    with pytest.raises(Internal, match="what is this"):
        decode_reply(reply, (CancelAccepted,))
    with pytest.raises(Overloaded, match=ERROR.message):
        decode_reply(encode_json(ERROR), (CancelAccepted,))


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_ids_are_packed_without_loss(ids: list[int]) -> None:
    packed = pack_ids(ids)
    assert packed == b"".join(i.to_bytes(4, "little", signed=True) for i in ids)
    assert (list(unpack_ids(packed)), id_count(packed)) == (ids, len(ids))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_half_an_id_is_refused(size: int) -> None:
    with pytest.raises(InvalidRequest, match=f"{size} bytes"):
        unpack_ids(bytes(size))


@pytest.mark.parametrize(
    "payload",
    [
        b'{"type":"GenerateRequest","key":' + b"[" * 50_000,
        b'{"type":"GenerateRequest","seed":' + b"9" * 5000 + b"}",
        b"\x91" * 50_000,
    ],
    ids=["nested json", "long number", "nested msgpack"],
)
def test_bytes_that_no_parser_likes_are_the_senders_mistake(payload: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode(payload, (GenerateRequest,))


def test_bytes_are_packed_as_integers_and_not_as_packed_ones() -> None:
    assert list(unpack_ids(pack_ids(b"abcd"))) == list(b"abcd")


def leaves(kind: inspect.Type) -> Iterator[inspect.Type]:
    """What a type is made of: its structs and scalars, without unions, lists and mappings."""
    match kind:
        case inspect.UnionType():
            for part in kind.types:
                yield from leaves(part)
        case inspect.VarTupleType():
            yield from leaves(kind.item_type)
        case inspect.DictType():
            yield from leaves(kind.key_type)
            yield from leaves(kind.value_type)
        case inspect.Metadata():
            yield from leaves(kind.type)
        case _:
            yield kind


def structs() -> dict[str, inspect.StructType]:
    """Every struct that a message of the route table holds, by name."""
    found: dict[str, inspect.StructType] = {}
    waiting = [inspect.type_info(message) for message in CARRIED]
    while waiting:
        for leaf in leaves(waiting.pop()):
            if isinstance(leaf, inspect.StructType) and leaf.cls.__name__ not in found:
                found[leaf.cls.__name__] = leaf
                waiting += [field.type for field in leaf.fields]
    return found


STRUCTS = [pytest.param(struct, id=name) for name, struct in sorted(structs().items())]


@pytest.mark.parametrize("struct", STRUCTS)
def test_wire_numbers_have_bounds_on_both_sides(struct: inspect.StructType) -> None:
    found = [(field.name, leaf) for field in struct.fields for leaf in leaves(field.type)]
    for name, leaf in found:
        if isinstance(leaf, inspect.IntType):
            assert leaf.ge is not None or leaf.gt is not None, name
            assert leaf.le is not None or leaf.lt is not None, name
        if isinstance(leaf, inspect.FloatType):  # NaN fails every bound
            bounds = (leaf.ge, leaf.gt, leaf.le, leaf.lt)
            assert any(bound is not None for bound in bounds), name


@pytest.mark.parametrize("kind", ids.LENGTHS_MAX, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("length", [0, 1, -1])
def test_wire_name_is_neither_empty_nor_too_long(kind: object, length: int) -> None:
    longest = ids.LENGTHS_MAX[kind]  # pyright: ignore[reportArgumentType]  # a NewType
    text = {0: "", 1: "x" * longest, -1: "x" * (longest + 1)}[length]
    if length == 1:
        assert msgspec.convert(text, kind) == text  # pyright: ignore[reportArgumentType, reportCallIssue]
    else:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(text, kind)  # pyright: ignore[reportArgumentType, reportCallIssue]


@pytest.mark.parametrize(
    ("message", "path", "value"),
    [
        (TextBatch, "detokenizer.instance", ""),
        (TextBatch, "detokenizer.instance", "d" * 129),
        (TextBatch, "rows.0.choice", -1),
        (TextBatch, "rows.0.text_offset", -1),
        (TextBatch, "rows.0.usage.prompt_tokens", -1),
        (TokenBatch, "worker.incarnation", ""),
        (TokenBatch, "rows.0.offset", 2**40),
        (TokenBatch, "rows.0.stream.choices", 2**31),
        (TokenBatch, "rows.0.details.count", -1),
        (CommandBatch, "leader.number", 2**64 - 1),
        (CommandBatch, "commands.0.prompt_ids", b"abc"),
        (CommandBatch, "commands.0.choices", []),
        (CommandBatch, "commands.0.choices", [{"choice": 0}, {"choice": 0}]),
        (CommandBatch, "commands.0.detokenizer", ""),
        (SubmitRequest, "prompt_ids", b"abc"),
        (SubmitRequest, "choices", 2**31),
        (SubmitRequest, "deadline_unix_ms", -1),
        (Heartbeat, "worker.running_max", 0),
        (Heartbeat, "worker.page_tokens", 0),
        (Heartbeat, "worker.step_age_s", float("nan")),
        (Heartbeat, "streams", [{"receiver": "x", "seq": 1}] * 1025),
        (KvReplayed, "worker.instance", ""),
        (PutPages, "pages.0.claim.digest", b"short"),
        (AbortRequests, "prefix", "x" * 70_000),
        (ErrorReply, "retry_after_s", float("nan")),
        (TokenBatch, "columns.streams", b"12345678"),
        (TokenBatch, "columns.offsets", b""),
        (TokenBatch, "columns.token_ids", b"123456789"),
        (TokenBatch, "columns.logprobs", b"123456789abc"),
        (TokenBatch, "columns.logprobs", b"123"),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value else None,
)
def test_hostile_message_is_not_decoded(message: type[Message], path: str, value: object) -> None:
    assert decode(encode(EXAMPLES[message]), (message,))
    with pytest.raises(MalformedMessage):
        decode(altered(message, path, value), (message,))


def test_every_message_of_every_route_has_an_example_and_a_file() -> None:
    assert set(EXAMPLES) == CARRIED
    assert {path.stem for path in golden.FOLDER.iterdir()} == {m.__name__ for m in CARRIED}


@each_example
def test_example_and_committed_bytes_are_the_same(example: Message) -> None:
    committed = golden.path_of(type(example)).read_text()
    assert golden.dump(encode(example)) == committed
    assert decode(golden.load(committed), (type(example),)) == example


@each_example
def test_json_gives_the_same_message(example: Message) -> None:
    payload = encode_json(example)
    assert is_json(payload)
    assert not is_json(encode(example))
    assert decode(payload, (type(example),)) == example


@each_example
def test_example_sets_every_field(example: Message) -> None:
    unset = [
        f"{type(struct).__name__}.{field.name}"
        for struct in structs_in(example)
        for field in msgspec.structs.fields(struct)
        if getattr(struct, field.name) == default_of(field)
    ]
    assert not unset


@given(st.binary())
def test_golden_text_loses_nothing(payload: bytes) -> None:
    assert golden.load(golden.dump(payload)) == payload


def default_of(field: msgspec.structs.FieldInfo) -> object:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return field.default


def structs_in(value: object) -> Iterator[msgspec.Struct]:
    if isinstance(value, msgspec.Struct):
        yield value
        for field in value.__struct_fields__:
            yield from structs_in(getattr(value, field))
    elif isinstance(value, tuple):
        items: tuple[Any, ...] = value
        for item in items:
            yield from structs_in(item)


def details(first: int, count: int) -> TokenOutputs:
    """Of tokens that are numbered, so that each number shows whose it is."""
    tokens = range(first, first + count)
    return TokenOutputs(
        count=count,
        token_ids=pack_ids([100 + t for t in tokens]),
        logprobs=pack_floats([-t / 4 for t in tokens]),
        top_ids=pack_ids([v for t in tokens for v in (t + 1, t + 2)]),
        top_logprobs=pack_floats([v for t in tokens for v in (-t / 2, -t)]),
        hidden=pack_floats([v for t in tokens for v in (t, 0.5, -t)]),
    )


def test_columns_are_little_endian_and_row_after_row() -> None:
    assert pack_floats([1.5, -2.0]) == struct.pack("<2f", 1.5, -2.0)
    assert list(unpack_floats(struct.pack("<2f", 1.5, -2.0))) == [1.5, -2.0]
    one, two = details(4, 2).iter_tokens()
    assert (one.token_id, one.logprob, one.named) == (104, -1.0, ())
    assert one.top == ((5, -2.0), (6, -4.0))
    assert list(two.hidden) == [5.0, 0.5, -5.0]
    assert details(4, 2).ids() == {104, 105, 5, 6, 7}


def test_token_outputs_omit_columns_not_requested() -> None:
    [one] = TokenOutputs(count=1, token_ids=pack_ids([-1])).iter_tokens()
    assert (one.token_id, one.logprob, one.top, list(one.hidden)) == (-1, None, (), [])
    assert TokenOutputs(count=1, token_ids=pack_ids([-1])).ids() == set()
    assert list(TokenOutputs().iter_tokens()) == []


@given(st.integers(-20, 5), st.lists(st.integers(0, 6), max_size=6), st.data())
def test_any_stretch_of_what_was_stored_can_be_taken(first: int, counts: list[int], data) -> None:
    store, at = TokenOutputsBuffer(first), first
    for count in counts:
        store.append(details(at, count) if count else TokenOutputs())
        at += count
    assert (store.first, store.end, len(store)) == (first, at, sum(counts))
    start, stop = (data.draw(st.integers(first - 2, at + 2)) for _ in range(2))
    tokens = range(max(start, first), min(stop, at))
    taken = store.read(start, stop)
    assert taken == (details(tokens.start, len(tokens)) if tokens else TokenOutputs())
    store.truncate(start)
    assert store.end == max(first, min(start, at))
    assert store.read(first, at).count == store.end - first
    more = details(store.end, 2)
    store.append(more)
    assert store.read(store.end - 2, store.end) == more


@given(st.integers(1, 9), st.data())
def test_cut_piece_and_what_came_before_make_the_whole(count: int, data) -> None:
    whole = details(0, count)
    at = data.draw(st.integers(1, count))
    store = TokenOutputsBuffer()
    store.append(whole)
    assert join_token_outputs([store.read(0, at), whole.drop_first(at)]) == whole
    piece = TokenOutputsChunk(offset=-3, details=whole)
    rest = piece.beyond(-3 + at)
    assert (rest.offset, rest.end, rest.details.count) == (-3 + at, piece.end, count - at)
    assert piece.beyond(-10) is piece


@pytest.mark.parametrize(
    ("start", "prompt_tokens", "entries"),
    [(-1, 10, 0), (0, 10, 9), (1, 10, 9), (4, 10, 6), (9, 10, 1), (10, 10, 0), (50, 10, 0)],
)
def test_prompt_entries_exclude_the_first_prompt_token(start, prompt_tokens, entries) -> None:
    params = TokenOutputParams(logprobs=True, prompt_start=start)
    assert params.prompt_entries(prompt_tokens) == entries
