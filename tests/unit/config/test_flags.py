"""Every field has a flag, and a flag says what the field then holds."""

from __future__ import annotations
