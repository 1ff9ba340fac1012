"""Images to embeddings: the settings of this service."""

from __future__ import annotations

from typing import Annotated

from antiphon.config.schema import Bytes, Config, Help, Host, Pixels, Port, Seconds


class EncoderConfig(Config):
    """Images to embeddings."""

    model_path: Annotated[
        str, Help("Folder of a CLIP or SigLIP vision model; empty: every call is `unsupported`.")
    ] = ""
    cache_bytes_max: Annotated[Bytes, Help("Embeddings kept by content hash.")] = 256 * 1024**2
    image_bytes_max: Annotated[Bytes, Help("Largest encoded image.")] = 32 * 1024**2
    pixels_max: Annotated[Pixels, Help("Largest image, in pixels, before it is scaled down.")] = (
        64 * 1000 * 1000
    )
    claims_bytes_max: Annotated[Bytes, Help("Results that wait to be fetched, all together.")] = (
        1024**3
    )
    claim_s: Annotated[Seconds, Help("How long a result waits to be fetched.")] = 60.0
    host: Annotated[Host, Help("Address to listen on for those who fetch results.")] = "127.0.0.1"
    advertise_host: Annotated[
        str, Help("Host that they are told; empty: `host`, or this machine's name for 0.0.0.0.")
    ] = ""
    port: Annotated[Port, Help("Port that results are fetched from; 0 takes any.")] = 0
