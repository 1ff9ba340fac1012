"""Settings of speculative decoding."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta

from antiphon.config.model import LoadFormat
from antiphon.config.quantization import QuantizationMethod
from antiphon.config.schema import Config, Tokens

TokensToVerify = Annotated[int, Meta(ge=2, extra={"unit": "tokens"})]
Depth = Annotated[int, Meta(ge=2, extra={"unit": "tokens"})]
Breadth = Annotated[int, Meta(ge=1)]
CorpusDrafts = Annotated[int, Meta(ge=0, extra={"unit": "tokens"})]


class MatchType(StrEnum):
    """Which continuations of a match a draft is made of."""

    BFS = "BFS"
    """The most recent ones, breadth first."""
    PROB = "PROB"
    """The most frequent ones, the most probable path first."""


class SpeculationConfig(Config):
    """Speculative decoding: tokens are drafted, and a decode step verifies several of a request."""

    algorithm: Literal["none", "ngram", "standalone", "eagle3"] = "none"
    """Source of draft tokens: none disables speculative decoding; ngram drafts what followed the
    same tokens in earlier prompts and outputs of the same tenant and cache salt; standalone drafts
    with the small model draft_model; eagle3 drafts with draft_model, a draft head of EAGLE-3 that
    was trained for the served model."""
    verify_tokens: TokensToVerify = 8
    """Maximum number of tokens of a request in one decode step: its last token and the draft tokens
    after it."""
    draft_model: str = ""
    """Path or name of the draft model, as in model.path: a small model with the vocabulary of the
    served one, whose layers all attend to the whole context; or a draft head for it. Required by
    standalone and eagle3, and refused with any other algorithm."""
    draft_steps: Tokens | None = None
    """Maximum number of tokens that the draft model drafts for a request in one step; a decode step
    then verifies one more, whatever verify_tokens is. Unset: verify_tokens - 1."""
    draft_revision: str = ""
    """Branch, tag or commit of a draft model of the Hugging Face hub; empty: main."""
    draft_format: LoadFormat | None = None
    """Format of the draft model's weights, as in load.format; unset: load.format."""
    draft_quantization: QuantizationMethod | None = None
    """Quantization method of the draft model, as in model.quantization; unset: from its
    checkpoint."""
    ngram_match: MatchType = MatchType.BFS
    """Order in which continuations of a match are tried: the most recent first (BFS), or the most
    frequent first (PROB)."""
    ngram_window_min: Tokens = 1
    """Minimum length of a match, in tokens."""
    ngram_window_max: Tokens = 12
    """Maximum length of a match, in tokens, and at most ngram_depth - 1."""
    ngram_breadth_min: Breadth = 1
    """Minimum number of continuations tried after a long match, with BFS."""
    ngram_breadth_max: Breadth = 10
    """Maximum number of continuations tried after a token; with BFS it decreases to
    ngram_breadth_min with the length of the match and of the draft."""
    ngram_depth: Depth = 18
    """Maximum length of a match and its draft together, in tokens."""
    ngram_capacity: Tokens = 1_000_000
    """Maximum number of tokens of prompts and outputs kept for drafts, about 70 bytes each; the
    oldest are evicted."""
    corpus_draft_tokens: CorpusDrafts = 0
    """Maximum number of draft tokens from an external corpus; 0 disables external corpora."""
    corpus_tokens_max: Tokens = 10_000_000
    """Maximum number of tokens of all external corpora, about 70 bytes each."""

    def __post_init__(self) -> None:
        drafts = self.algorithm in ("standalone", "eagle3")
        if drafts and not self.draft_model:
            raise ValueError(
                f"algorithm = {self.algorithm} drafts with a model: set draft_model "
                "(--speculative-draft-model-path)"
            )
        if self.draft_model and not drafts:
            raise ValueError(
                f"draft_model (--speculative-draft-model-path) is not used by algorithm = "
                f"{self.algorithm}: set algorithm = standalone "
                "(--speculative-algorithm STANDALONE) or eagle3 (EAGLE3), or leave draft_model "
                "unset"
            )
        window_max = min(self.ngram_window_max, self.ngram_depth - 1)
        if self.ngram_window_min > window_max:
            raise ValueError(
                f"ngram_window_min = {self.ngram_window_min} exceeds the longest match of "
                f"{window_max} tokens, by ngram_window_max and ngram_depth - 1"
            )
        if self.ngram_breadth_min > self.ngram_breadth_max:
            raise ValueError(
                f"ngram_breadth_min = {self.ngram_breadth_min} exceeds ngram_breadth_max = "
                f"{self.ngram_breadth_max}"
            )
        if self.corpus_draft_tokens >= self.verify_tokens:
            raise ValueError(
                f"corpus_draft_tokens = {self.corpus_draft_tokens} exceeds the longest draft, "
                f"verify_tokens - 1 = {self.verify_tokens - 1}"
            )
