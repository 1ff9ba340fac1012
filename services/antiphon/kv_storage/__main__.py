"""`python -m antiphon.kv_storage`."""

from __future__ import annotations

from antiphon.kv_storage.service import KvStorageService
from antiphon.service.main import run

if __name__ == "__main__":
    run(KvStorageService)
