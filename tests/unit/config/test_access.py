"""Settings of who may ask: refused where they could never work."""

from __future__ import annotations

import pytest

from antiphon.config.errors import ConfigError
from antiphon.config.gateway import AccessConfig
from antiphon.config.load import load


def test_origins_are_origins() -> None:
    one = AccessConfig(allowed_origins="https://a.example, http://localhost:8080,")
    assert one.origins == {"https://a.example", "http://localhost:8080"}
    assert AccessConfig().origins == frozenset()
    for bad in ("https://a.example/", "a.example", "https://a.example/x", "*.example"):
        with pytest.raises(ConfigError, match="not an origin"):
            load(environ={"ANTIPHON_ACCESS__ALLOWED_ORIGINS": bad})


def test_a_key_that_fits_no_header_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        load(environ={"ANTIPHON_ACCESS__API_KEY": "two words"})
    assert "two words" not in str(caught.value)
