"""What the n-gram drafter must answer, by a counted trie that is built anew for each question."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from antiphon.config.speculation import MatchType

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.config.speculation import SpeculationConfig

Path = tuple[int, ...]


@dataclass(eq=False)
class Text:
    """Tokens in the order of the text, with their numbers in the order of all texts."""

    namespace: bytes
    tokens: list[int] = field(default_factory=list[int])
    numbers: list[int] = field(default_factory=list[int])


@dataclass(eq=False)
class TrieNode:
    """A sequence of tokens, and the windows that begin with it: the numbers of their tokens."""

    windows: list[list[int]] = field(default_factory=list[list[int]])
    children: dict[int, TrieNode] = field(default_factory=dict[int, "TrieNode"])


class TrieDrafter:
    """Keeps all tokens for ever, and reads those that would be left."""

    def __init__(self, config: SpeculationConfig) -> None:
        self.config = config
        self.now = 0
        self.texts: list[Text] = []

    def begin(self, namespace: bytes) -> Text:
        self.texts.append(Text(namespace))
        return self.texts[-1]

    def extend(self, text: Text, ids: list[int]) -> None:
        text.tokens += ids
        text.numbers += range(self.now, self.now + len(ids))
        self.now += len(ids)

    @property
    def tokens(self) -> int:
        return sum(len(list(self.left(text))) for text in self.texts)

    def left(self, text: Text) -> Iterator[tuple[int, int]]:
        """The tokens of a text that are not evicted, with their numbers."""
        for pair in zip(text.tokens, text.numbers, strict=True):
            if pair[1] >= self.now - self.config.ngram_capacity:
                yield pair

    def propose(self, namespace: bytes, context: list[int], drafts_max: int) -> list[int]:
        root = self._trie(namespace)
        widest = min(len(context), self.config.ngram_window_max, self.config.ngram_depth - 1)
        lengths = range(widest, self.config.ngram_window_min - 1, -1)
        suffixes = [tuple(context[len(context) - length :]) for length in lengths]
        matched = [suffix for suffix in suffixes if self._node(root, suffix).children]
        if not matched:
            return []
        best: Path = ()
        paths: dict[Path, tuple[float, float]] = {best: (1.0, 0.0)}
        waiting: list[Path] = [best]
        for _ in range(drafts_max + 1):
            if not waiting:
                break
            path = waiting[0]
            if self.config.ngram_match is MatchType.PROB:
                path = max(waiting, key=lambda path: paths[path][0])
            waiting.remove(path)
            probability, expected = paths[path]
            if expected > paths[best][1]:
                best = path
            for token, share in self._children(root, matched, path):
                paths[*path, token] = probability * share, expected + probability * share
                waiting.append((*path, token))
        return list(best)

    def _trie(self, namespace: bytes) -> TrieNode:
        root = TrieNode()
        for text in self.texts:
            left = list(self.left(text)) if text.namespace == namespace else []
            for start in range(len(left)):
                window = left[start : start + self.config.ngram_depth]
                node = root
                for token, _ in window:
                    node = node.children.setdefault(token, TrieNode())
                    node.windows.append([number for _, number in window])
        return root

    def _node(self, root: TrieNode, path: Path) -> TrieNode:
        for token in path:
            root = root.children.get(token, TrieNode())
        return root

    def _children(
        self, root: TrieNode, matched: list[Path], path: Path
    ) -> Iterator[tuple[int, float]]:
        config = self.config
        for suffix in matched:
            node = self._node(root, (*suffix, *path))
            if node.children and len(suffix) + len(path) < config.ngram_depth:
                break
        else:
            return

        def newest(token: int) -> int:
            return max(numbers[len(suffix) - 1] for numbers in node.children[token].windows)

        counts = {token: len(child.windows) for token, child in node.children.items()}
        tokens = sorted(counts, key=newest, reverse=True)
        breadth = config.ngram_breadth_max
        if config.ngram_match is MatchType.PROB:
            tokens.sort(key=lambda token: counts[token], reverse=True)
        else:
            context = min(len(matched[0]) + len(path), config.ngram_depth - 1)
            span = config.ngram_breadth_max - config.ngram_breadth_min
            breadth = math.floor(
                config.ngram_breadth_max - context * span / (config.ngram_depth - 1)
            )
        tokens = tokens[:breadth]
        for token in tokens:
            yield token, counts[token] / sum(counts[token] for token in tokens)
