"""Settings of every test: one thread a process, since the tests run in two of them."""

from __future__ import annotations

import os

import hypothesis

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Operations of bitsandbytes would compile themselves, for longer than a test may take.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# No deadline for an example: beside a neighbour it is the machine's speed that would be tested.
hypothesis.settings.register_profile("antiphon", deadline=None)
hypothesis.settings.load_profile("antiphon")
