"""KV pages beyond the workers: the settings of this service."""

from __future__ import annotations

from typing import Annotated

from antiphon.config.schema import Bytes, Config, Help, Host, Port, Seconds


class KvStorageConfig(Config):
    """KV pages beyond the workers."""

    ram_bytes_max: Annotated[Bytes, Help("Pages kept in memory.")] = 1024**3
    disk_path: Annotated[str, Help("Folder for pages that leave memory; empty: none.")] = ""
    disk_bytes_max: Annotated[Bytes, Help("Pages kept on disk.")] = 8 * 1024**3
    page_bytes_max: Annotated[Bytes, Help("Largest page that is accepted.")] = 64 * 1024**2
    lease_s_max: Annotated[Seconds, Help("Longest lease that is granted.")] = 60.0
    host: Annotated[Host, Help("Address to listen on for those who fetch pages.")] = "127.0.0.1"
    advertise_host: Annotated[
        str, Help("Host that they are told; empty: `host`, or this machine's name for 0.0.0.0.")
    ] = ""
    port: Annotated[Port, Help("Port that pages are fetched from; 0 takes any.")] = 0
