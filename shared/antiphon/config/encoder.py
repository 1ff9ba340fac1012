"""Settings of the encoder service."""

from __future__ import annotations

from typing import Annotated

from antiphon.config.schema import Bytes, Config, Help, Host, Pixels, Port, Seconds


class EncoderConfig(Config):
    """Image embeddings."""

    model_path: Annotated[
        str,
        Help(
            "Folder of a CLIP or SigLIP vision model; empty: every call is rejected as "
            "`unsupported`."
        ),
    ] = ""
    cache_bytes_max: Annotated[
        Bytes,
        Help("Maximum size of the embedding cache, in bytes; entries are keyed by content hash."),
    ] = 256 * 1024**2
    image_bytes_max: Annotated[Bytes, Help("Maximum size of an encoded image, in bytes.")] = (
        32 * 1024**2
    )
    pixels_max: Annotated[
        Pixels, Help("Maximum size of an image before it is scaled down, in pixels.")
    ] = 64 * 1000 * 1000
    claims_bytes_max: Annotated[
        Bytes, Help("Maximum size of all results waiting to be fetched, in bytes.")
    ] = 1024**3
    claim_s: Annotated[Seconds, Help("Time for which a result can be fetched, in seconds.")] = 60.0
    host: Annotated[Host, Help("Address of the port that results are fetched from.")] = "127.0.0.1"
    advertise_host: Annotated[
        str,
        Help(
            "Host name announced to clients that fetch results; empty: `host`, or this machine's "
            "name if it is 0.0.0.0."
        ),
    ] = ""
    port: Annotated[Port, Help("Port that results are fetched from; 0 takes any free port.")] = 0
