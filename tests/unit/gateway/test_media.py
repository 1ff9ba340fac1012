"""Images of requests: their headers, and what the gateway connects to for them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import random
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import numpy as np
import pytest
from aiohttp import web
from PIL import Image, ImageOps
from tests.simulation.owner_world import submission
from tests.support.clock import ManualClock
from tests.support.wait import until

from antiphon.config.gateway import MediaConfig
from antiphon.config.settings import EncoderConfig
from antiphon.config.tenants import TenantConfig
from antiphon.gateway.access.limits import QuotaReservation, Tenant
from antiphon.gateway.media import fetch, room, stored
from antiphon.gateway.media import intake as intakes
from antiphon.gateway.media.fetch import (
    AddressRefused,
    MediaFetcher,
    PublicResolver,
    is_public,
)
from antiphon.gateway.media.header import PIECES_MAX, read_header
from antiphon.gateway.media.intake import MediaIntake, NamedMedia
from antiphon.gateway.media.room import RequestRoom
from antiphon.gateway.owner.actions import Ended
from antiphon.gateway.requests.generation_request import MediumSource
from antiphon.gateway.stream.stream import RequestStream
from antiphon.service.startup import bind
from antiphon.telemetry.tracing import span
from antiphon.transfer.blobs import BlobServer, BlobStore, part_digests
from antiphon.wire.base import Usage
from antiphon.wire.claim import Claim, PixelLimits
from antiphon.wire.errors import GatewayLost, InvalidRequest, Overloaded
from antiphon.wire.ids import TenantId
from antiphon.wire.media import EmbeddingForm, MediumSpan

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path


def image(kind: str, width: int = 37, height: int = 21, **options: Any) -> bytes:
    colours = np.random.default_rng(3).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).save(file, kind, **options)
    return file.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


IMAGES = {
    "png": image("PNG"),
    "turned png": image("PNG", exif=turned(6)),
    "jpeg": image("JPEG"),
    "progressive jpeg": image("JPEG", progressive=True),
    "turned jpeg": image("JPEG", exif=turned(8)),
    "mirrored jpeg": image("JPEG", exif=turned(2)),
    "webp": image("WEBP"),
    "lossless webp": image("WEBP", lossless=True),
    "turned webp": image("WEBP", exif=turned(5)),
    "gif": image("GIF"),
    "bmp": image("BMP"),
}


@pytest.mark.parametrize("data", IMAGES.values(), ids=IMAGES)
def test_header_has_the_size_that_the_decoder_comes_to(data: bytes) -> None:
    header = read_header(data)
    with Image.open(io.BytesIO(data)) as opened:
        upright = ImageOps.exif_transpose(opened)
        assert header is not None
        assert (header.format.upper(), header.width, header.height) == (
            opened.format,
            *upright.size,
        )


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_header_is_no_image_or_has_a_size_and_never_an_exception(seed: int) -> None:
    draw = random.Random(seed)
    for data in IMAGES.values():
        for _ in range(10):
            damaged = bytearray(data[: draw.randrange(len(data))])
            for _ in range(draw.randrange(8)):
                if damaged:
                    damaged[draw.randrange(min(64, len(damaged)))] = draw.randrange(256)
            header = read_header(bytes(damaged))
            assert header is None or header.width * header.height > 0


@pytest.mark.parametrize(
    ("head", "piece", "known"),
    [
        (IMAGES["png"][:33], bytes(4) + b"tEXt" + bytes(4), False),
        (b"\xff\xd8", b"\xff\xe0\0\2", False),
        (b"\xff\xd8", b"\xff\x01", False),
        (b"\xff\xd8", b"\xff", False),
        (b"\xff\xd8\xff", b"\0", False),
        (b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0" + bytes(10), b"junk\0\0\0\0", True),
    ],
)
def test_what_is_read_of_a_header_does_not_grow_with_the_file(
    head: bytes, piece: bytes, *, known: bool
) -> None:
    """It is read in the event loop: so many pieces at most, however many a file has."""
    seen: list[object] = []

    def trace(_frame: object, event: str, _arg: object) -> Any:
        if event == "line":
            seen.append(event)
        return trace

    sys.settrace(trace)
    try:
        header = read_header(head + 200_000 * piece)
    finally:
        sys.settrace(None)
    assert (header is not None) == known
    assert len(seen) < 20 * PIECES_MAX


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0"),
        *("100.64.0.1", "224.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1"),
        *("::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "2002:7f00:1::1"),
        *("64:ff9b::7f00:1", "64:ff9b:1::a00:1", "2001:0:4136:e378:8000:63bf:3fff:fdd2"),
        *("fec0::1", "5f00::1", "64:ff9b::808:808", "127.1", "0x7f000001", "2130706433"),
        *(
            "168.63.129.16",
            "100.100.100.200",
            "fd00:ec2::254",
            "2002:a83f:8110::",
            *("192.0.0.192", "::ffff:192.0.0.192", "2002:c000:c0::", "192.0.0.10"),
            "::ffff:0:7f00:1",
        ),
        *("no address", ""),
    ],
)
def test_address_is_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    ["93.184.216.34", "2606:2800:220:1:248:1893:25c8:1946", "::ffff:93.184.216.34"],
)
def test_address_is_public(address: str) -> None:
    assert is_public(address)


class Fetching:
    """A fetcher with room for all."""

    def __init__(self, fetcher: MediaFetcher) -> None:
        self._fetcher = fetcher

    async def fetch(self, source: str) -> bytes | bytearray:
        store = BlobStore("a:1", 10**6, ManualClock())
        try:
            with RequestRoom(store).medium(10**6) as taken:
                return await self._fetcher.fetch(source, taken)
        finally:
            assert store.bytes_held == 0


@asynccontextmanager
async def fetching(**config: Any) -> AsyncGenerator[Fetching]:
    fetcher = MediaFetcher(MediaConfig(**config))
    try:
        yield Fetching(fetcher)
    finally:
        await fetcher.close()


async def test_no_limit_of_the_library_lies_below_the_settings() -> None:
    fetcher = MediaFetcher(MediaConfig())
    session = fetcher._opened()
    assert session.timeout == aiohttp.ClientTimeout()
    assert session.connector is not None
    assert session.connector.limit == 0
    await fetcher.close()


@asynccontextmanager
async def serving(*routes: web.RouteDef, host: str = "127.0.0.1") -> AsyncGenerator[int]:
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, host, 0)
    await site.start()
    try:
        (address,) = runner.addresses
        yield address[1]
    finally:
        await runner.cleanup()


async def _picture(_: web.Request) -> web.Response:
    return web.Response(body=IMAGES["png"])


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "localhost", "localhost.", "127.1", "2130706433", "0x7f.1", "0x7f000001"),
        *("[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "①②⑦.⓪.⓪.①", "0", "0.0.0.0"),
    ],
)
async def test_nothing_on_this_machine_is_reached_whatever_it_is_called(host: str) -> None:
    asked: list[str] = []

    async def note(request: web.Request) -> web.Response:
        asked.append(request.path)
        return await _picture(request)

    async with serving(web.get("/a.png", note)) as port, fetching() as fetcher:
        with pytest.raises(InvalidRequest):
            await fetcher.fetch(f"http://{host}:{port}/a.png")
    assert asked == []


async def test_redirects_are_followed_and_checked_anew() -> None:
    def to(target: str) -> Any:
        async def redirect(_: web.Request) -> web.Response:
            return web.Response(status=302, headers={"Location": target})

        return redirect

    async with (
        serving(
            web.get("/a.png", _picture),
            web.get("/near", to("/a.png")),
            web.get("/loop", to("/loop")),
            web.get("/file", to("file:///etc/passwd")),
            web.get("/loopback", to("http://127.0.0.1/a.png")),
            web.get("/brackets", to("http://[]@/a.png")),
        ) as port,
        fetching(allowed_domains="localhost") as fetcher,
    ):
        at = f"http://localhost:{port}"
        assert await fetcher.fetch(f"{at}/near") == IMAGES["png"]
        for path, reason in (
            ("/loop", "redirects more than"),
            ("/file", "only http and https"),
            ("/loopback", "not one of the allowed domains"),
            ("/none", "status 404"),
            ("/brackets", "could not be fetched"),
        ):
            with pytest.raises(InvalidRequest, match=reason):
                await fetcher.fetch(at + path)
        for source in ("http://[]@", "http://[", "http://", "http://a:b:c", "http://a:70000/"):
            with pytest.raises(InvalidRequest):
                await fetcher.fetch(source)


@pytest.fixture
def near_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.2 counts as an address of the internet."""
    monkeypatch.setattr(fetch, "is_public", lambda ip: ip == "127.0.0.2" or is_public(ip))


def redirect_to(target: str) -> Any:
    async def redirect(request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": target.format(request.url.port)})

    return redirect


@pytest.mark.usefixtures("near_is_public")
async def test_a_redirect_from_a_public_address_reaches_nothing_on_this_machine() -> None:
    asked: list[str] = []

    async def note(request: web.Request) -> web.Response:
        asked.append(request.path)
        return await _picture(request)

    async with serving(web.get("/{name}.png", note)) as inside:
        targets = {
            "address": f"http://127.0.0.1:{inside}/a.png",
            "name": f"http://localhost:{inside}/a.png",
            "mapped": f"http://[::ffff:127.0.0.1]:{inside}/a.png",
            "relative": f"//127.0.0.1:{inside}/a.png",
            "user": f"http://127.0.0.2@127.0.0.1:{inside}/a.png",
            "file": "file:///etc/passwd",
        }
        routes = [web.get(f"/{name}", redirect_to(target)) for name, target in targets.items()]
        routes += [web.get("/a.png", _picture), web.get("/own", redirect_to("/a.png"))]
        async with serving(*routes, host="127.0.0.2") as port, fetching() as fetcher:
            at = f"http://127.0.0.2:{port}"
            assert await fetcher.fetch(f"{at}/own") == IMAGES["png"]
            for name in targets:
                with pytest.raises(InvalidRequest):
                    await fetcher.fetch(f"{at}/{name}")
    assert asked == []


@pytest.mark.usefixtures("near_is_public")
async def test_a_name_is_resolved_anew_behind_each_redirect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is public at first, and its own redirect leads to where it has moved."""
    asked: list[str] = []

    async def note(request: web.Request) -> web.Response:
        asked.append(request.path)
        return await _picture(request)

    async with serving(web.get("/a.png", note)) as inside:
        target = f"http://rebinding.example:{inside}/a.png"
        async with serving(web.get("/", redirect_to(target)), host="127.0.0.2") as port:
            answers = iter([("127.0.0.2", port), ("127.0.0.1", inside)])

            def getaddrinfo(*_: object, **__: object) -> list[object]:
                return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", next(answers))]

            async with fetching() as fetcher:
                with monkeypatch.context() as patched:
                    patched.setattr(socket, "getaddrinfo", getaddrinfo)
                    with pytest.raises(InvalidRequest, match="could not be fetched"):
                        await fetcher.fetch(f"http://rebinding.example:{port}/")
    assert [*answers] == [], "it was resolved twice"
    assert asked == []


async def test_proxies_of_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(web.get("/a.png", _picture)) as port:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:1")
        async with fetching(allowed_domains="localhost") as fetcher:
            assert await fetcher.fetch(f"http://localhost:{port}/a.png") == IMAGES["png"]


async def test_only_the_hosts_that_are_allowed_are_asked() -> None:
    async with (
        serving(web.get("/a.png", _picture)) as port,
        fetching(allowed_domains="LOCALHOST, cdn.example") as fetcher,
    ):
        assert await fetcher.fetch(f"http://LocalHost:{port}/a.png") == IMAGES["png"]
        for host, reason in (
            ("127.0.0.1", "not one of the allowed domains"),
            ("localhost.", "not one of the allowed domains"),
            ("localhost.evil.example", "not one of the allowed domains"),
            ("a.localhost", "not one of the allowed domains"),
            ("localhost@evil.example", "must not contain a user"),
        ):
            with pytest.raises(InvalidRequest, match=reason):
                await fetcher.fetch(f"http://{host}:{port}/a.png")


async def test_a_file_is_below_the_folder_after_its_links_are_resolved(tmp_path: Path) -> None:
    folder = tmp_path / "media"
    folder.mkdir()
    for place in (tmp_path, folder):
        (place / "a.png").write_bytes(IMAGES["png"])
    (folder / "out.png").symlink_to(tmp_path / "a.png")
    (folder / "in.png").symlink_to(folder / "a.png")
    (folder / "circle.png").symlink_to(folder / "circle.png")
    async with fetching(allowed_local_path=str(folder)) as fetcher:
        for source in (
            f"file://{folder}/a.png",
            "a.png",
            "in.png",
            f"file://localhost{folder}/a.png",
        ):
            assert await fetcher.fetch(source) == IMAGES["png"]
        for source in (
            *(f"file://{folder}/out.png", "out.png", "../a.png", f"file://{folder}/%2e%2e/a.png"),
            *(f"file://{tmp_path}/a.png", f"file://{folder}", "none.png", "file:///dev/zero.png"),
            *("file://[a.png", "file://localhost]/a.png", "circle.png", "a\0.png"),
        ):
            with pytest.raises(InvalidRequest, match="not below the allowed folder"):
                await fetcher.fetch(source)
        with pytest.raises(InvalidRequest, match="a file of this machine"):
            await fetcher.fetch("file://elsewhere/a.png")
    async with fetching() as fetcher:
        with pytest.raises(InvalidRequest, match="--allowed-local-media-path"):
            await fetcher.fetch(f"file://{folder}/a.png")


async def test_a_name_that_changes_its_address_is_connected_to_where_it_was_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = iter(["93.184.216.34", "127.0.0.1"])

    def getaddrinfo(*_: object, **__: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers), 80))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with ThreadPoolExecutor(1) as threads:
        resolver = PublicResolver(frozenset(), threads)
        (found,) = await resolver.resolve("rebinding.example", 80)
        assert found["host"] == "93.184.216.34"
        assert found["flags"] & socket.AI_NUMERICHOST
        with pytest.raises(AddressRefused):
            await resolver.resolve("rebinding.example", 80)


async def test_names_that_are_not_answered_hold_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More of them than the event loop has threads."""
    asked, answered, real = list[str](), threading.Event(), socket.getaddrinfo

    def getaddrinfo(host: str, *rest: Any, **named: Any) -> list[Any]:
        if host != "slow.example":
            return real(host, *rest, **named)
        asked.append(host)
        answered.wait(20)
        raise socket.gaierror("no answer")

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    slow = 40

    async def unanswered(fetcher: Fetching) -> None:
        with pytest.raises(InvalidRequest, match="could not be fetched"):
            await fetcher.fetch("http://slow.example/a.png")

    async with (
        serving(web.get("/a.png", _picture)) as port,
        fetching(allowed_domains="localhost, slow.example", fetches_max=slow + 1) as fetcher,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(slow):
            group.create_task(unanswered(fetcher))
        try:
            await until(lambda: len(asked) == slow)
            assert await fetcher.fetch(f"http://localhost:{port}/a.png") == IMAGES["png"]
        finally:
            answered.set()


async def test_bytes_beyond_the_limit_are_not_read() -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while True:
                await response.write(bytes(4096))
        except ConnectionError:
            return response

    async with serving(web.get("/a", endless)) as port:
        store = BlobStore("a:1", 10**6, ManualClock())
        config = MediaConfig(allowed_domains="localhost", file_bytes_max=100_000)
        intake = MediaIntake(config, store, EncoderConfig(pixels_max=100))
        try:
            for source in (f"http://localhost:{port}/a", "A" * 400_000):
                with pytest.raises(InvalidRequest, match="the limit is 100000 bytes") as refused:
                    await intake.open([MediumSource(source, "here")], 1.0)
                assert refused.value.param == "here"
            with pytest.raises(InvalidRequest, match="777 pixels; the limit is 100"):
                await intake.open([MediumSource(_data("png"), "here")], 1.0)
        finally:
            await intake.close()
    assert store.bytes_held == 0


def _data(name: str) -> str:
    return "data:;base64," + base64.b64encode(IMAGES[name]).decode()


async def test_media_are_held_until_they_are_discarded_each_once() -> None:
    store = BlobStore("a:1", 10**6, ManualClock())
    intake = MediaIntake(MediaConfig(), store, EncoderConfig(pixels_max=10**6))
    sources = [MediumSource(_data(name), str(n)) for n, name in enumerate(("png", "jpeg", "png"))]
    held = await intake.open(sources, 1.0)
    assert [(header.width, header.height) for header in held.headers] == [(37, 21)] * 3
    assert store.bytes_held > 0
    assert store.bytes_held == len(IMAGES["png"]) + len(IMAGES["jpeg"])
    held.discard()
    assert store.bytes_held == 0


async def test_bytes_count_while_other_images_of_their_request_are_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = asyncio.Event()
    answered = asyncio.Event()

    async def late(_: web.Request) -> web.Response:
        asked.set()
        await answered.wait()
        return web.Response(status=404)

    monkeypatch.setattr(room, "WAIT_S", 0.01)
    store = BlobStore("a:1", len(IMAGES["png"]), ManualClock())
    async with serving(web.get("/a", late)) as port:
        intake = MediaIntake(
            MediaConfig(allowed_domains="localhost"), store, EncoderConfig(pixels_max=10**6)
        )
        sources = [MediumSource(each, "") for each in (_data("png"), f"http://localhost:{port}/a")]

        async def refused() -> None:
            with pytest.raises(InvalidRequest, match="404"):
                await intake.open(sources, 1.0)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(refused())
                await asked.wait()
                await until(lambda: store.bytes_held == len(IMAGES["png"]))
                with pytest.raises(Overloaded):
                    await intake.open([MediumSource(_data("jpeg"), "")], 1.0)
                answered.set()
        finally:
            await intake.close()
    assert store.bytes_held == 0


async def test_detail_limits_each_image_of_a_picture_that_is_fetched_once() -> None:
    store = BlobStore("a:1", 10**6, ManualClock())
    intake = MediaIntake(MediaConfig(pixels_max=900), store, EncoderConfig(pixels_max=10**6))
    try:
        sources = [
            MediumSource(_data("png"), detail or "", detail=detail)
            for detail in (None, "auto", "low", "high")
        ]
        held = await intake.open(sources, 1.0)
        assert [each.limits for each in held.headers] == [
            PixelLimits(most=900),
            PixelLimits(most=900),
            PixelLimits(most=900, low=True),
            None,
        ]
        assert store.bytes_held == len(IMAGES["png"])
        held.discard()
        given = PixelLimits(least=100, most=800)
        held = await intake.open(sources[2:], 1.0, given)
        expected = [msgspec.structs.replace(given, low=True), given]
        assert [each.limits for each in held.headers] == expected
        held.discard()
    finally:
        await intake.close()
    assert store.bytes_held == 0


NUMBERS = (np.arange(12, dtype="<f4").reshape(4, 3) - 5) / 4
FORM = EmbeddingForm(rows=4, width=3)
AS_BYTES = {
    "float32": NUMBERS.tobytes(),
    "float16": NUMBERS.astype("<f2").tobytes(),
    "bfloat16": (NUMBERS.view("<u4") >> 16).astype("<u2").tobytes(),
}


async def test_an_embedding_of_any_type_is_stored_as_encoders_store_theirs() -> None:
    store = BlobStore("a:1", 10**8, ManualClock())
    intake = MediaIntake(MediaConfig(), store, EncoderConfig(pixels_max=1))
    sources = [
        MediumSource(data, kind, embedding=msgspec.structs.replace(FORM, dtype=kind))
        for kind, data in AS_BYTES.items()
    ]
    encoded = base64.b64encode(AS_BYTES["float32"]).decode()
    sized = msgspec.structs.replace(FORM, patches=(4, 4), size=(7, 9))
    sources.append(MediumSource(encoded, "base64", embedding=sized))
    try:
        held = await intake.open([*sources, *sources], 1.0, width=3)
        assert {each.digest for each in held.headers} == {
            hashlib.sha256(NUMBERS.tobytes()).digest()
        }
        assert store.bytes_held == 4 * NUMBERS.nbytes, "the same ones are stored once"
        header = held.headers[3]
        assert (header.rows, header.patches, header.width, header.height) == (4, (4, 4), 7, 9)
        spans = [MediumSpan(start=4 * n, tokens=4, key=bytes(32)) for n in range(8)]
        for medium in held.placed(spans):
            assert medium.embedded
            assert store.get(medium.claim.token) == NUMBERS.tobytes()
            assert not medium.claim.part_bytes
        held.discard()
        assert store.bytes_held == 0
        large = np.ones((3000, 1001), "<f4")  # three parts
        form = EmbeddingForm(rows=3000, width=1001)
        held = await intake.open(
            [MediumSource(large.tobytes(), "", embedding=form)], 1.0, width=1001
        )
        (medium,) = held.placed([MediumSpan(start=0, tokens=3000, key=bytes(32))])
        assert medium.claim.part_bytes % (4 * 1001) == 0
        assert medium.claim.part_digests == part_digests(large.tobytes(), medium.claim.part_bytes)
        assert len(medium.claim.part_digests) == 3 * 32
    finally:
        await intake.close()


@pytest.mark.parametrize(
    ("data", "form", "reason"),
    [
        (
            AS_BYTES["float32"],
            EmbeddingForm(rows=4, width=4),
            "rows of 4 numbers; this model has 3",
        ),
        (
            "http://localhost/a.bin",  # it is not fetched
            EmbeddingForm(rows=4, width=4),
            "rows of 4 numbers; this model has 3",
        ),
        (AS_BYTES["float32"][1:], FORM, "has 47 bytes; 4 x 3 numbers in float32 have 48"),
        (AS_BYTES["float16"], FORM, "has 24 bytes"),
        (np.full_like(NUMBERS, np.nan).tobytes(), FORM, "not finite"),
        (bytes(201), FORM, "the embedding has 201 bytes; the limit is 200 bytes"),
    ],
)
async def test_an_embedding_that_is_not_what_it_says_is_refused(
    data: str | bytes, form: EmbeddingForm, reason: str
) -> None:
    store = BlobStore("a:1", 10**6, ManualClock())
    intake = MediaIntake(MediaConfig(file_bytes_max=200), store, EncoderConfig(pixels_max=1))
    with pytest.raises(InvalidRequest, match=reason) as caught:
        await intake.open([MediumSource(data, "part", embedding=form)], 1.0, width=3)
    assert caught.value.param == "part"
    assert store.bytes_held == 0
    await intake.close()


async def test_claims_are_fetched_from_networks_that_are_allowed_and_from_no_others() -> None:
    data, clock = IMAGES["png"], ManualClock()
    with bind("127.0.0.1", 0) as bound:
        port = bound.getsockname()[1]
        client = BlobStore(f"127.0.0.1:{port}", 10**6, clock)
        store = BlobStore("a:1", 10**6, clock)
        async with asyncio.TaskGroup() as group:
            server = group.create_task(BlobServer(bound, client).run())
            claim = client.put(data, 60)

            async def opened(networks: str, claim: Claim, most: int = 10**6) -> bytes:
                config = MediaConfig(claim_networks=networks, file_bytes_max=most)
                intake = MediaIntake(config, store, EncoderConfig(pixels_max=10**6))
                try:
                    held = await intake.open([MediumSource(claim, "media[0]")], 1.0)
                finally:
                    await intake.close()
                held.discard()
                return held.headers[0].digest

            assert await opened("10.0.0.0/8, 127.0.0.0/8", claim) == hashlib.sha256(data).digest()
            elsewhere = [
                f"{host}:{port}" for host in ("::ffff:127.0.0.1", "[::1]", "169.254.169.254")
            ]
            named = [msgspec.structs.replace(claim, address=each) for each in elsewhere]
            host = msgspec.structs.replace(claim, address=f"localhost:{port}")
            gone = msgspec.structs.replace(claim, token="00" * 16)
            other = msgspec.structs.replace(claim, digest=bytes(32))
            for networks, refused, reason in (
                ("", claim, "not fetched from 127.0.0.1; start the gateway with --media-claim"),
                *(("127.0.0.0/8", each, "claims are not fetched from") for each in named),
                ("127.0.0.0/8", host, "must name an IP address"),
                ("127.0.0.0/8", gone, "has it no longer"),
                ("127.0.0.0/8", other, "another checksum"),
            ):
                with pytest.raises(InvalidRequest, match=reason) as caught:
                    await opened(networks, refused)
                assert caught.value.param == "media[0]"
            with pytest.raises(InvalidRequest, match="the limit is 9 bytes"):
                await opened("127.0.0.0/8", claim, 9)
            server.cancel()
    assert store.bytes_held == 0


async def test_a_named_image_is_sent_again_by_its_name_alone() -> None:
    store = BlobStore("a:1", 10**6, ManualClock())
    size = len(IMAGES["png"])
    intake = MediaIntake(
        MediaConfig(named_bytes_max=2 * size), store, EncoderConfig(pixels_max=10**6)
    )
    tenants = TenantId("one"), TenantId("two")

    async def digest(source: str, name: str, tenant: int = 0) -> bytes:
        held = await intake.open([MediumSource(source, "part", name)], 1.0, tenant=tenants[tenant])
        held.discard()
        return held.headers[0].digest

    try:
        # Within a request, too.
        sources = [MediumSource("", "part", "x"), MediumSource(_data("png"), "part", "x")]
        held = await intake.open(sources, 1.0)
        assert held.headers[0] == held.headers[1]
        held.discard()
        png = await digest(_data("png"), "a")
        assert await digest("", "a") == png
        for name, tenant in (("b", 0), ("a", 1)):
            with pytest.raises(InvalidRequest, match=f"no image with the uuid '{name}'") as caught:
                await digest("", name, tenant)
            assert caught.value.param == "part"
        with pytest.raises(InvalidRequest):
            await digest("%", "b")  # what cannot be used is not kept
        with pytest.raises(InvalidRequest, match="no image with"):
            await digest("", "b")
        assert await digest(_data("png"), "c", 1) == png
        assert await digest("", "a") == png
        await digest(_data("png"), "d")  # evicts the one that was not used for longest
        with pytest.raises(InvalidRequest, match="no image with"):
            await digest("", "c", 1)
        other = await digest(_data("gif"), "a")
        assert other != png
        assert await digest("", "a") == other
    finally:
        await intake.close()
    assert store.bytes_held == 0


async def test_a_name_stands_for_a_medium_of_its_kind() -> None:
    """Else an image could be a video, of which a request may have fewer."""
    store = BlobStore("a:1", 10**6, ManualClock())
    intake = MediaIntake(MediaConfig(), store, EncoderConfig(pixels_max=10**6))
    frame = base64.b64encode(IMAGES["png"]).decode()
    sources = [
        MediumSource(f"data:video/jpeg;base64,{frame},{frame}", "video", "x", video=True),
        MediumSource("", "image", "x"),
    ]
    try:
        with pytest.raises(InvalidRequest) as refused:
            await intake.open(sources, 1.0)
        assert refused.value.param == "image"
    finally:
        await intake.close()
    assert store.bytes_held == 0


def test_names_are_bounded_however_small_their_images_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intakes, "NAMES_MAX", 2)
    named, tenant = NamedMedia(10**6), TenantId("one")
    for name in "abc":
        named.put(tenant, name, b"x")
    assert [named.get(tenant, name) for name in "abc"] == [None, b"x", b"x"]
    assert named.bytes_held == 2


@pytest.mark.parametrize("error", [None, GatewayLost("the stream was resumed at another gateway")])
async def test_media_of_a_stream_that_goes_on_elsewhere_are_held_until_they_are_there(
    error: GatewayLost | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "HANDOVER_S", 0.01)
    clock = ManualClock()
    store = BlobStore("a:1", 10**6, clock)
    intake = MediaIntake(MediaConfig(), store, EncoderConfig(pixels_max=10**6))
    quota = QuotaReservation(Tenant(TenantConfig(), 0.0))
    stream = RequestStream(
        submission("r", clock), span("t", None), quota, api="chat", received_at=0, submitted_at=0
    )
    stream.media = await intake.open([MediumSource(_data("png"), "part")], 1.0)
    await intake.close()
    stream.put(Ended(Usage(), error), 0.0)
    assert (store.bytes_held > 0) == (error is not None)
    await until(lambda: not store.bytes_held)
