"""Settings of the KV storage service."""

from __future__ import annotations

from typing import Annotated

from antiphon.config.schema import Bytes, Config, Help, Host, Port, Seconds


class KvStorageConfig(Config):
    """Storage of KV pages outside the workers."""

    ram_bytes_max: Annotated[Bytes, Help("Maximum size of pages in memory, in bytes.")] = 1024**3
    disk_path: Annotated[str, Help("Folder for pages evicted from memory; empty: none.")] = ""
    disk_bytes_max: Annotated[Bytes, Help("Maximum size of pages on disk, in bytes.")] = 8 * 1024**3
    page_bytes_max: Annotated[Bytes, Help("Maximum size of a stored page, in bytes.")] = (
        64 * 1024**2
    )
    lease_s_max: Annotated[Seconds, Help("Maximum duration of a lease, in seconds.")] = 60.0
    host: Annotated[Host, Help("Address of the port that pages are fetched from.")] = "127.0.0.1"
    advertise_host: Annotated[
        str,
        Help(
            "Host name announced to clients that fetch pages; empty: `host`, or this machine's "
            "name if it is 0.0.0.0."
        ),
    ] = ""
    port: Annotated[Port, Help("Port that pages are fetched from; 0 takes any free port.")] = 0
