"""Tokens a step of n-gram drafts, verified as one path and as a tree of at most as many tokens.

Texts are replayed without a model: each step drafts from what was written before it, and accepts
what the text says next. So only the form of the drafts differs. The trees are those that SGLang
verifies, of the continuations that `best_path` chooses its path from.

    python -m tests.bench.draft_trees
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tests.bench.models import CACHE, fetched
from tests.bench.speculation import chat, passage
from tests.bench.summary import Measurement, arguments, here, report, single

from antiphon.config.speculation import MatchType, SpeculationConfig
from antiphon.model_card.served_model import tokenizer_folder
from antiphon.model_card.tokenizer_file import open_tokenizer
from antiphon.model_worker.speculation.draft_tree import DraftNode, DraftTree, best_path
from antiphon.model_worker.speculation.text_index import NgramLevel, TextIndex
from antiphon.wire.digests import TOKEN_BYTES

MODEL = "smollm2"
DRAFTS = (4, 7, 16, 32)
"""Tokens that a step verifies besides the last one; production verifies up to 7."""
TOKENS = 800
"""Of each document at most."""
DOCUMENTS = 40
"""Of each folder."""
NAMESPACE = b"bench"


class Text(NamedTuple):
    """What a client asks with, and what it gets."""

    prompt: Sequence[int]
    output: Sequence[int]


Paths = list[tuple[int, ...]]
"""The path to each node of a tree that is verified."""
Form = Callable[[Iterator[NgramLevel], SpeculationConfig, int], Paths]


def path(levels: Iterator[NgramLevel], config: SpeculationConfig, tokens_max: int) -> Paths:
    """What production verifies."""
    tokens = best_path(levels, config, tokens_max)
    return [tuple(tokens[: end + 1]) for end in range(len(tokens))]


def tree(levels: Iterator[NgramLevel], config: SpeculationConfig, tokens_max: int) -> Paths:
    """The first nodes in the order of the setting: breadth first, or the most probable first."""
    grows = DraftTree(levels, config)
    if (node := grows.root()) is None:
        return []
    by_probability = config.ngram_match is MatchType.PROB
    queue: list[tuple[float, int, DraftNode]] = []
    paths, grown = Paths(), 0
    while len(paths) < tokens_max:
        for child in grows.children(node):
            heappush(queue, (-child.probability if by_probability else 0.0, grown, child))
            grown += 1
        if not queue:
            break
        node = heappop(queue)[-1]
        paths.append(node.path)
    return paths


FORMS: tuple[Form, ...] = (path, tree)


class Replay:
    """Steps through texts, of which each one is found by those after it."""

    def __init__(self, form: Form, drafts: int, match: MatchType) -> None:
        self.steps = self.generated = self.verified = 0
        self._form, self._drafts = form, drafts
        self._config = SpeculationConfig(
            algorithm="ngram", verify_tokens=drafts + 1, ngram_match=match
        )
        widest = min(self._config.ngram_window_max, self._config.ngram_depth - 1)
        self._tail = widest * TOKEN_BYTES
        self._index = TextIndex(
            capacity=self._config.ngram_capacity,
            width_min=self._config.ngram_window_min,
            width_max=widest,
        )

    def read(self, text: Text) -> None:
        indexed = self._index.begin(NAMESPACE)
        known, output = _packed(text.prompt), list(text.output)
        self._index.extend(indexed, known)
        at = 0
        while at < len(output):
            longest = self._config.ngram_depth - self._config.ngram_window_min
            tokens_max = min(self._drafts, longest, len(output) - at)
            levels = self._index.levels(NAMESPACE, known[-self._tail :], tokens_max)
            drafts = self._form(levels, self._config, self._drafts)
            right = max((len(one) for one in drafts if _is_next(one, output, at)), default=0)
            new = output[at : at + right + 1]
            self.steps += 1
            self.generated += len(new)
            self.verified += 1 + len(drafts)
            at += len(new)
            self._index.extend(indexed, _packed(new))
            known = (known + _packed(new))[-self._tail :]
        self._index.end(indexed)


def _is_next(draft: Sequence[int], output: Sequence[int], at: int) -> bool:
    return list(draft) == output[at : at + len(draft)]


def _packed(ids: Sequence[int]) -> bytes:
    return np.array(ids, "<i4").tobytes()


def texts(encode: Callable[[str], Sequence[int]]) -> dict[str, list[Text]]:
    """By name: what repeats much, and what little."""

    def documents(folder: str, kind: str) -> list[Text]:
        paths = sorted(Path(folder).rglob(kind))[:DOCUMENTS]
        return [Text([], encode(each.read_text())[:TOKENS]) for each in paths]

    asked = encode(
        chat(f"Copy this text, but write 'the router' for 'the scheduler':\n\n{passage()}")
    )
    edited = encode(passage().replace("the scheduler", "the router"))
    return {
        "edited prose": [Text(asked, edited)],
        "documents": documents("docs", "*.md"),
        "code": documents("services", "*.py"),
    }


def main() -> None:
    parser = arguments(description=__doc__)
    parser.add_argument("--cache", type=Path, default=CACHE, help="where the tokenizer lives")
    given = parser.parse_args()
    tokenizer = open_tokenizer(tokenizer_folder(fetched(MODEL, given.cache, stderr=False)))
    found = texts(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
    rows: list[Measurement] = []
    for (name, read), match, drafts, form in product(found.items(), MatchType, DRAFTS, FORMS):
        replay = Replay(form, drafts, match)
        for text in read:
            replay.read(text)
        case, arm = f"{name}, {drafts} drafts, {match}", form.__name__
        rows += [
            single("tokens a step", replay.generated / replay.steps, case=case, arm=arm),
            single("verified a step", replay.verified / replay.steps, case=case, arm=arm),
        ]
    report(here("draft trees", {"tokenizer": MODEL}, rows), given.json)


if __name__ == "__main__":
    main()
