"""Fetches media: `data:` URLs, http and https URLs, base64, files below one folder, and claims.

A URL comes from a client and must not reach what only this machine reaches. So names are resolved
here, every address is checked, and the connection is made to a checked address: a name whose
address changes in between changes nothing. Redirects are followed by hand, each checked anew.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import socket
import urllib.parse
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from antiphon.service.tenant_slots import TenantSlots
from antiphon.transfer.blobs import fetch as fetch_blob
from antiphon.wire.claim import Claim
from antiphon.wire.errors import InvalidRequest, Unavailable
from antiphon.wire.frames import FRAMES_MAX, pack_frames
from antiphon.wire.ids import DEFAULT_TENANT

if TYPE_CHECKING:
    from antiphon.config.gateway import MediaConfig
    from antiphon.gateway.media.room import MediumRoom
    from antiphon.wire.ids import TenantId

REDIRECTS_MAX = 5
URL_CHARACTERS_MAX = 8192
_SHOWN = 100
_NOT_BELOW = "the file is not below the allowed folder"
_CHUNK_BYTES = 64 * 1024
_STEP_BYTES = 1024**2
"""Steps in which room is taken for what has no announced length."""
_SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".mp4", ".mov", ".m4v"),
    *(".wav", ".flac", ".mp3", ".ogg", ".opus", ".webm", ".m4a"),
)
"""Ends of what is a path without a scheme, as in SGLang."""
_SUFFIX_CHARACTERS = max(map(len, _SUFFIXES))
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CARRIER_NAT = ipaddress.ip_network("100.64.0.0/10")
_PROTOCOLS = ipaddress.ip_network("192.0.0.0/24")
"""RFC 6890's, of which Python before 3.12.4 calls most global. A cloud has its metadata among them.
"""
_METADATA = ipaddress.ip_address("168.63.129.16")
"""Azure's host, which has secrets of its machines, at an address like a public one."""
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_UNICAST = ipaddress.ip_network("2000::/3")
"""All IPv6 addresses that are routed (RFC 4291). Those that NAT64 translates are not among them."""


def claim_networks(config: MediaConfig) -> tuple[Network, ...]:
    """The networks that claims of NATS clients may name addresses of.

    Raises:
        ValueError: One is not in CIDR notation.
    """
    names = config.claim_networks.replace(",", " ").split()
    return tuple(ipaddress.ip_network(name) for name in names)


class AddressRefused(OSError):
    """No address of a host may be connected to."""


def is_public(address: str) -> bool:
    """Whether an IP address is one of the public internet, whichever way it is written."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if inner is not None:
            return is_public(str(inner))
        return ip in _UNICAST and ip.is_global and ip.teredo is None
    special = ip.is_multicast or ip in _CARRIER_NAT or ip in _PROTOCOLS or ip == _METADATA
    return ip.is_global and not special


class PublicResolver(AbstractResolver):
    """Resolves names to public addresses only; hosts that are allowed by name to any.

    aiohttp connects to what this returns, and to nothing else. It resolves in `threads`: a name
    whose servers do not answer takes one for half a minute, and uvloop has two for all names.
    """

    def __init__(self, allowed: frozenset[str], threads: Executor) -> None:
        self._allowed = allowed
        self._threads = threads

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        ask = partial(socket.getaddrinfo, host, port, family=family, type=socket.SOCK_STREAM)
        found = await loop.run_in_executor(self._threads, ask)
        results = [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=int(address[1]),
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST,
            )
            for kind, _, protocol, _, address in found
            if host.lower() in self._allowed or is_public(str(address[0]))
        ]
        if not results:
            raise AddressRefused(f"{host} has no public address")
        return results

    async def close(self) -> None:
        pass


class MediaFetcher:
    """Fetches the bytes of media, a limited number at a time, until `close`.

    Images do not wait behind videos, nor those of a tenant behind all of another.
    """

    def __init__(self, config: MediaConfig) -> None:
        self._config = config
        self._domains = frozenset(config.allowed_domains.lower().replace(",", " ").split())
        self._networks = claim_networks(config)
        self._images = TenantSlots(config.fetches_max)
        self._videos = TenantSlots(config.fetches_max)
        self._resolving = ThreadPoolExecutor(2 * config.fetches_max, thread_name_prefix="resolve")
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        self._resolving.shutdown(wait=False, cancel_futures=True)
        if self._session is not None:
            await self._session.close()

    async def fetch(
        self,
        source: str | bytes | bytearray | Claim,
        room: MediumRoom,
        tenant: TenantId = DEFAULT_TENANT,
        *,
        video: bool = False,
    ) -> bytes | bytearray:
        """Return the bytes that a URL or a claim names, or that are given, as base64 or as bytes.

        Room for them is taken before they come. A `data:` URL of a video may have a list of images.

        Raises:
            InvalidRequest: The URL is not allowed, not readable, or was not fetched in time.
            RequestTooLarge: There are too many bytes.
            Overloaded: There is no room for them.
        """
        if isinstance(source, bytes | bytearray):
            room.check(len(source))
            await room.take(len(source))
            return source
        if isinstance(source, Claim):
            return await self._fetch_claim(source, room, tenant, video=video)
        scheme = source[: source.find(":")].lower() if ":" in source[:16] else ""
        match scheme:
            case "data":
                return await _decode(source, room, video=video)
            case "http" | "https":
                return await self._download(source, room, tenant, video=video)
            case "file":
                return await self._read_file(source, room)
            case "" if source[-_SUFFIX_CHARACTERS:].lower().endswith(_SUFFIXES):  # not base64
                return await self._read_file(source, room)
            case _:
                return await _decode(source, room)

    # Files.

    async def _read_file(self, source: str, room: MediumRoom) -> bytes:
        path, size = await asyncio.to_thread(self._allowed_file, source)
        room.check(size)
        await room.take(size)
        try:
            return await asyncio.to_thread(_read, path, size)
        except OSError as error:
            raise InvalidRequest(_NOT_BELOW) from error

    def _allowed_file(self, source: str) -> tuple[Path, int]:
        """The file that a source names, and its size."""
        allowed = self._config.allowed_local_path
        if not allowed:
            raise InvalidRequest(
                "files are disabled; start the gateway with --allowed-local-media-path"
            )
        name = source
        try:
            if source[:5].lower() == "file:":
                parts = urllib.parse.urlsplit(source)
                if parts.netloc not in ("", "localhost"):
                    raise InvalidRequest("a file URL must name a file of this machine")
                name = urllib.parse.unquote(parts.path)
            root = Path(allowed).expanduser().resolve(strict=True)
            path = (root / name).resolve(strict=True)
            if not path.is_relative_to(root) or not path.is_file():
                raise InvalidRequest(_NOT_BELOW)
            return path, path.stat().st_size
        # A RuntimeError: links in a circle, before Python 3.13.
        except (OSError, RuntimeError, ValueError) as error:
            raise InvalidRequest(_NOT_BELOW) from error

    # The network.

    def _limits(self, *, video: bool) -> tuple[TenantSlots, float]:
        """Slots and time of a fetch."""
        if video:
            return self._videos, self._config.video_fetch_timeout_s
        return self._images, self._config.fetch_timeout_s

    async def _fetch_claim(
        self, claim: Claim, room: MediumRoom, tenant: TenantId, *, video: bool
    ) -> bytearray:
        """Fetch what a NATS client serves. Nothing is resolved: it names an address."""
        room.check(claim.size_bytes)
        address = claim.address.rpartition(":")[0]
        try:
            ip = ipaddress.ip_address(address.strip("[]"))
        except ValueError as error:
            raise InvalidRequest("a claim must name an IP address and a port") from error
        if not any(ip in network for network in self._networks):
            raise InvalidRequest(
                f"claims are not fetched from {ip}; start the gateway with --media-claim-networks"
            )
        slots, timeout_s = self._limits(video=video)
        try:
            async with slots.held(tenant):
                await room.take(claim.size_bytes)
                return await fetch_blob(claim, timeout_s=timeout_s, bytes_max=room.bytes_max)
        except Unavailable as error:
            raise InvalidRequest(error.message) from error

    async def _download(
        self, source: str, room: MediumRoom, tenant: TenantId, *, video: bool
    ) -> bytearray:
        if len(source) > URL_CHARACTERS_MAX:
            raise InvalidRequest(f"a URL has at most {URL_CHARACTERS_MAX} characters")
        slots, timeout_s = self._limits(video=video)
        try:
            async with slots.held(tenant), asyncio.timeout(timeout_s) as limit:
                return await self._follow(source, room, limit)
        except TimeoutError as error:
            text = f"{source[:_SHOWN]} was not fetched within {timeout_s:g} s"
            raise InvalidRequest(text) from error
        # yarl 1.25 has an IndexError for http://[]@: a user with brackets, and no host.
        except (aiohttp.ClientError, OSError, ValueError, IndexError) as error:
            # No detail: it would show what is to be reached from here.
            raise InvalidRequest(f"{source[:_SHOWN]} could not be fetched") from error

    async def _follow(self, source: str, room: MediumRoom, limit: asyncio.Timeout) -> bytearray:
        url = URL(source)
        for _ in range(REDIRECTS_MAX + 1):
            self._check_url(url)
            async with self._opened().get(url, allow_redirects=False) as response:
                if response.status in _REDIRECTS and "Location" in response.headers:
                    url = url.join(URL(response.headers["Location"]))
                    continue
                if response.status != 200:
                    text = f"{source[:_SHOWN]} answered with status {response.status}"
                    raise InvalidRequest(text)
                return await _receive(response, room, limit)
        raise InvalidRequest(f"{source[:_SHOWN]} redirects more than {REDIRECTS_MAX} times")

    def _check_url(self, url: URL) -> None:
        host = url.host
        if url.scheme not in ("http", "https") or not host:
            raise InvalidRequest("only http and https URLs are fetched")
        if url.user or url.password:
            raise InvalidRequest("a URL must not contain a user")
        if self._domains:
            if host.lower() not in self._domains:
                raise InvalidRequest(f"{host[:_SHOWN]} is not one of the allowed domains")
        # aiohttp does not ask the resolver for what looks like an address to it.
        elif _looks_like_address(host) and not is_public(host):
            raise InvalidRequest(f"{host[:_SHOWN]} is not a public address")

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                resolver=PublicResolver(self._domains, self._resolving),
                use_dns_cache=False,
                force_close=True,  # a kept connection would outlive the check of its address
                limit=0,  # there are slots
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                timeout=aiohttp.ClientTimeout(),  # none beside that of a fetch
                trust_env=False,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept-Encoding": "identity", "User-Agent": "antiphon"},
            )
        return self._session


# Bytes in the URL itself.


async def _decode(source: str, room: MediumRoom, *, video: bool = False) -> bytes:
    padding = source.endswith("=") + source.endswith("==")
    size = (len(source) - source.find(",") - 1) * 3 // 4 - padding
    room.check(size)
    await room.take(len(source) if video else size)  # frames have their lengths beside them
    decode = _decode_frames if video else _decode_data
    return await asyncio.to_thread(
        decode if source[:5].lower() == "data:" else _decode_base64, source
    )


def _decode_data(source: str) -> bytes:
    head, comma, text = source.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidRequest("a data URL must have the form data:<type>;base64,<data>")
    return _decode_base64(text)


def _decode_frames(source: str) -> bytes:
    """Decode a video, or its frames, as vLLM's clients send them: base64, between commas."""
    head, _, text = source.partition(",")
    if not head.lower().startswith("data:video/jpeg;"):
        return _decode_data(source)
    return pack_frames([_decode_base64(each) for each in text.split(",", FRAMES_MAX)])


def _decode_base64(source: str) -> bytes:
    try:
        return base64.b64decode(source, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest("neither an http, https, file or data URL, nor base64 data") from error


def _read(path: Path, size_bytes: int) -> bytes:
    """Read a file, as far as room was taken for it."""
    with path.open("rb") as file:
        return file.read(size_bytes)


async def _receive(
    response: aiohttp.ClientResponse, room: MediumRoom, limit: asyncio.Timeout
) -> bytearray:
    """Receive a body. Without an announced length its room grows as it comes."""
    size = response.content_length
    if size is not None:
        room.check(size)
        await _take(size, room, limit)
    data = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        end = len(data) + len(chunk)
        room.check(end)
        if end > room.taken:
            step = min(_STEP_BYTES, room.bytes_max - room.taken)
            await _take(max(step, end - room.taken), room, limit)
        data += chunk
    return data


async def _take(size_bytes: int, room: MediumRoom, limit: asyncio.Timeout) -> None:
    """Take room. The time that a fetch waits for it is not time of the fetch."""
    now = asyncio.get_running_loop().time
    due, began = limit.when(), now()
    limit.reschedule(None)
    await room.take(size_bytes)
    limit.reschedule(None if due is None else due + now() - began)


def _looks_like_address(host: str) -> bool:
    """Whether a host is an IP address in any form that a C library reads, 127.1 among them."""
    last = host.rstrip(".").rpartition(".")[2].lower()
    return ":" in host or last.isdecimal() or last.startswith("0x")
