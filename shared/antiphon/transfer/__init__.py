"""Transfer of payloads too large for the broker: by claim check, over direct TCP.

The holder puts bytes into a `BlobStore` and sends the claim over the bus; the receiver fetches them
and verifies size and checksum. A connection opens with `HELLO`; then each request is a 16-byte
token. The response is the size as 8 little-endian bytes and the content, or `GONE`.
"""
