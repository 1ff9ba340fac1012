"""Losses of tokens under llama.cpp: run by the Python of its own environment.

    python -P llama_cpp_reader.py FILE THREADS < WINDOWS > LOSSES

Reads lists of token ids, each of them a text from an empty cache, and writes for each the loss in
nats of all tokens but the first. Both are JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import numpy as np


def losses(model: Any, ids: list[int]) -> list[float]:
    model.reset()
    model.eval(ids)
    logits = np.array(model.scores[: len(ids) - 1], dtype=np.float64)
    most = logits.max(axis=1)
    totals = np.log(np.exp(logits - most[:, None]).sum(axis=1)) + most
    return (totals - logits[np.arange(len(ids) - 1), ids[1:]]).tolist()


def main() -> None:
    texts: list[list[int]] = json.load(sys.stdin)
    longest = max(map(len, texts))
    package: Any = importlib.import_module("llama_cpp")
    model = package.Llama(
        sys.argv[1],
        n_ctx=longest,
        n_batch=longest,
        n_threads=int(sys.argv[2]),
        n_threads_batch=int(sys.argv[2]),
        logits_all=True,
        verbose=False,
    )
    json.dump([losses(model, ids) for ids in texts], sys.stdout)


if __name__ == "__main__":
    main()
