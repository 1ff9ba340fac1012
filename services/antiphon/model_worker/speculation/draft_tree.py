"""The tree of continuations of a context, and the path through it that becomes the draft."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from antiphon.config.speculation import MatchType, SpeculationConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from antiphon.model_worker.speculation.text_index import NgramLevel, NgramMatch


def best_path(
    levels: Iterator[NgramLevel], config: SpeculationConfig, tokens_max: int
) -> list[int]:
    """Return the path through a draft tree with the most tokens that are expected to be accepted.

    The share of a token among the continuations of a node is taken as its probability, so that the
    expectation is the sum of the probabilities of the path's nodes. Of equal paths the first one is
    returned: that of the more recent continuation (BFS), or of the more frequent one, and among
    equally frequent ones of the more recent one (PROB).

    A tree has at most `tokens_max` nodes, like one that is verified as a whole. A context that had
    one continuation gets a draft of `tokens_max` tokens, and one that had many a shorter draft,
    which saves rows of the step that would likely be rejected.

    Only the longest match is continued. A shorter one has less context, and more continuations: it
    only makes a path longer where the longest match ends, with its text or at the maximum depth.
    """
    tree = DraftTree(levels, config)
    if (node := tree.root()) is None:
        return []
    if (only := tree.only_continuation(node, tokens_max)) is not None:
        return list(only)
    best = node
    by_probability = config.ngram_match is MatchType.PROB
    queue: list[tuple[float, int, DraftNode]] = []
    grown = 0
    for remaining in range(tokens_max, 0, -1):
        # Breadth first, children wait for the whole queue: no more are made than can be reached.
        if by_probability or len(queue) < remaining:
            for child in tree.children(node):
                heappush(queue, (-child.probability if by_probability else 0.0, grown, child))
                grown += 1
        if not queue:
            break
        node = heappop(queue)[-1]
        if node.expected > best.expected:
            best = node
    return list(best.path)


@dataclass(slots=True, eq=False)
class DraftNode:
    """A node of a draft tree.

    Attributes:
        path: The tokens up to this one, without the context.
        level: Index of the level that its matches are of.
        matches: The matches of that level that continue with the path, newest first.
        probability: Product of the shares of its tokens, each among the siblings of the token.
        expected: Sum of the probabilities along the path.
    """

    path: tuple[int, ...]
    level: int
    matches: list[NgramMatch]
    probability: float
    expected: float


class DraftTree:
    """Makes the nodes of a tree from the levels of a context, which are read as they are needed."""

    def __init__(self, levels: Iterator[NgramLevel], config: SpeculationConfig) -> None:
        self._unread = levels
        self._levels: list[NgramLevel] = []
        self._config = config
        self._longest = 0

    def root(self) -> DraftNode | None:
        if (level := self._level(0)) is None:
            return None
        self._longest = level.longest
        return DraftNode((), 0, level.matches, 1.0, 0.0)

    def only_continuation(self, root: DraftNode, tokens_max: int) -> tuple[int, ...] | None:
        """The path of a tree without a branch: that of most contexts with a long match."""
        first = root.matches[0].continuation
        if len(first) < tokens_max or self._levels[0].width + tokens_max > self._config.ngram_depth:
            return None
        return first if all(match.continuation == first for match in root.matches) else None

    def children(self, node: DraftNode) -> Iterator[DraftNode]:
        depth = len(node.path)
        context_max = self._config.ngram_depth - 1 - depth
        index, matches = self._continuing(node, context_max)
        longest = min(max([match.length for match in matches], default=0), context_max)
        counts: dict[int, int] = {}  # in the order of the matches: the most recent first
        for match in matches:
            if match.length >= longest:
                token = match.continuation[depth]
                counts[token] = counts.get(token, 0) + 1
        tokens = list(counts)
        if self._config.ngram_match is MatchType.PROB:
            tokens.sort(key=lambda token: -counts[token])
        del tokens[self._breadth(depth) :]
        total = sum(counts[token] for token in tokens)
        for token in tokens:
            probability = node.probability * (counts[token] / total)
            yield DraftNode(
                (*node.path, token),
                index,
                [match for match in matches if match.continuation[depth] == token],
                probability,
                node.expected + probability,
            )

    def _breadth(self, depth: int) -> int:
        """Maximum number of children of a node of this depth.

        Most probable first it is `ngram_breadth_max`, for all nodes. Breadth first only a node
        without context has so many; the limit falls evenly with each token of the match and of the
        path, to `ngram_breadth_min` for a node with `ngram_depth - 1` tokens of context.
        """
        config = self._config
        if config.ngram_match is MatchType.PROB:
            return config.ngram_breadth_max
        context_max = config.ngram_depth - 1
        context = min(self._longest + depth, context_max)
        span = config.ngram_breadth_max - config.ngram_breadth_min
        return config.ngram_breadth_max + -context * span // context_max  # rounded down

    def _continuing(self, node: DraftNode, context_max: int) -> tuple[int, list[NgramMatch]]:
        """The first level with matches that continue after the path, and these matches."""
        depth, index, matches = len(node.path), node.level, node.matches
        while (level := self._level(index)) is not None:
            if level.width <= context_max:
                continuing = [match for match in matches if len(match.continuation) > depth]
                if continuing:
                    return index, continuing
            index += 1
            if (below := self._level(index)) is not None:
                matches = [m for m in below.matches if m.continuation[:depth] == node.path]
        return index, []

    def _level(self, index: int) -> NgramLevel | None:
        while len(self._levels) <= index:
            if (level := next(self._unread, None)) is None:
                return None
            self._levels.append(level)
        return self._levels[index]
