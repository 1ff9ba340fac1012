"""`python -m antiphon.kv_storage`."""

from __future__ import annotations

from antiphon.kv_storage.service import KvStorageService
from antiphon.service.main import run
from antiphon.wire.base import Role

if __name__ == "__main__":
    run(Role.KV_STORAGE, KvStorageService)
