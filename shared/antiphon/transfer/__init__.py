"""Bytes too large for the broker: handed over by claim check, over direct TCP.

The holder puts them on a shelf and sends the claim over the bus; whoever needs them fetches them
and verifies size and checksum. A connection opens with `HELLO`; then each request is a 16-byte
token, answered with the size as 8 little-endian bytes and the content, or with `GONE`.
"""
