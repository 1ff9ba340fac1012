"""Writes the generated pages of the documentation: `python -m tests.support.pages`."""

from __future__ import annotations

from tests.support import (
    bus_page,
    config_page,
    formats_page,
    http_page,
    kernels_page,
    metrics_page,
    models_page,
    status_page,
)

PAGES = (
    *(config_page, bus_page, metrics_page, http_page, models_page, formats_page, status_page),
    kernels_page,
)

if __name__ == "__main__":
    for module in PAGES:
        module.PAGE.write_text(module.page(), encoding="utf-8")
