"""Reads a model folder's tokenizer, special tokens and templates, and detects their formats."""

# ruff: noqa: RUF001  # these bars are part of some markers

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import jinja2
import msgspec
from tokenizers import Tokenizer

from antiphon.config.errors import ConfigError
from antiphon.config.model import TEMPLATES, CompletionTemplate, read_template
from antiphon.config.parsing import ReasoningParser, ToolParser
from antiphon.model_card.audio import PromptAudio
from antiphon.model_card.chat_templates import TOKENIZER_CONFIG, TemplateSources, choose_templates
from antiphon.model_card.config_json import read_json
from antiphon.model_card.tokenizer_file import open_tokenizer
from antiphon.model_card.vision.compared import ComparedImages
from antiphon.model_card.vision.vision_card import VideosCard, VisionCard, videos_of
from antiphon.tokenizer.template import ChatTemplate

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


P = TypeVar("P")


class AddedToken(msgspec.Struct, frozen=True):
    content: str


class SpecialTokens(msgspec.Struct, frozen=True):
    """The special tokens in special_tokens_map.json and tokenizer_config.json."""

    bos_token: str | AddedToken | None = None
    eos_token: str | AddedToken | None = None
    unk_token: str | AddedToken | None = None
    sep_token: str | AddedToken | None = None
    pad_token: str | AddedToken | None = None
    cls_token: str | AddedToken | None = None
    mask_token: str | AddedToken | None = None


class ModelTokenizer(msgspec.Struct, frozen=True):
    """The tokenizer of a model with its templates.

    `completion` is the fill-in-the-middle template, or None if it is unknown. `token_characters` is
    the length of the longest token; byte tokens are stored with one character per byte, so no token
    decodes to more. `vision` says how the model takes images, if it does, and `audio` how it takes
    audio in prompts.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    size: int
    template_formats: TemplateFormats
    completion: CompletionTemplate | None = None
    token_characters: int = 0
    vision: VisionCard | None = None
    audio: PromptAudio | None = None

    @property
    def placeholder(self) -> str:
        """The text of the placeholder of an image; empty if the model takes none."""
        if self.vision is None:
            return ""
        return self.tokenizer.id_to_token(self.vision.placeholder) or ""

    @property
    def image_marker(self) -> str:
        """What stands for an image in a rendered template; empty if the model takes none."""
        return self.placeholder if self.vision is None else self.vision.marker or self.placeholder

    @property
    def audio_marker(self) -> str:
        """What stands for audio in a rendered template; empty if the model takes none."""
        if self.audio is None:
            return ""
        return self.tokenizer.id_to_token(self.audio.placeholder) or ""

    @property
    def videos(self) -> VideosCard | None:
        """How the model takes videos, if it does."""
        return videos_of(self.vision)


def read_model_tokenizer(
    folder: Path,
    template_file: str = "",
    completion_template: str = "",
    template_name: str = "",
    vision: VisionCard | None = None,
    audio: PromptAudio | None = None,
) -> ModelTokenizer:
    """Load a folder's tokenizer and chat template.

    Args:
        folder: Holds tokenizer.json and, mostly, tokenizer_config.json.
        template_file: A template that replaces the folder's own; empty: none.
        completion_template: Name or file of the fill-in-the-middle template; empty: detect it.
        template_name: The folder's template for all conversations; empty: chosen by whether a
            conversation has tools.
        vision: How the model takes images; its placeholder must be a special token, unless images
            are prompts by themselves.
        audio: How the model takes audio in prompts; likewise.

    Raises:
        ConfigError: A file is missing or malformed, there is no such template, or a marker is not a
            token; the message names it.
    """
    special = _special(folder)
    tokenizer = open_tokenizer(folder)
    sources = _sources(folder, template_file, template_name)
    template = None
    try:
        if sources is not None:
            template = ChatTemplate(sources.source, special, tool_source=sources.tool_source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if isinstance(vision, ComparedImages):
        _pad(tokenizer, vision.text_tokens, special.get("pad_token"))
    elif vision is not None and vision.placeholder not in tokenizer.get_added_tokens_decoder():
        raise ConfigError(f"the placeholder of images, {vision.placeholder}, is no added token")
    videos = videos_of(vision)
    if videos is not None and videos.placeholder not in tokenizer.get_added_tokens_decoder():
        raise ConfigError(f"the placeholder of videos, {videos.placeholder}, is no added token")
    if audio is not None and audio.placeholder not in tokenizer.get_added_tokens_decoder():
        raise ConfigError(f"the placeholder of audio, {audio.placeholder}, is no added token")
    completion = choose_completion_template(tokenizer, completion_template)
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=0)
    formats = _formats(sources)
    return ModelTokenizer(tokenizer, template, size, formats, completion, longest, vision, audio)


def _pad(tokenizer: Tokenizer, tokens: int, padding: str | None) -> None:
    """Pad texts to so many tokens, where the model was trained on such texts; 0: it was not."""
    if not tokens:
        return
    token_id = None if padding is None else tokenizer.token_to_id(padding)
    if padding is None or token_id is None:
        raise ConfigError("the tokenizer has no pad_token, to which this model's texts are padded")
    tokenizer.enable_padding(  # pyright: ignore[reportUnknownMemberType]
        length=tokens, pad_id=token_id, pad_token=padding
    )


def _formats(sources: TemplateSources | None) -> TemplateFormats:
    """The formats in the templates: tool calls by the tool template, reasoning by the plain one."""
    if sources is None:
        return TemplateFormats()
    plain, tools = detect_formats(sources.source), detect_formats(sources.tool_source or "")
    return TemplateFormats(
        tools=tools.tools or plain.tools,
        reasoning=plain.reasoning or tools.reasoning,
        reranks=plain.reranks,
    )


def _special(folder: Path) -> Mapping[str, str]:
    """The special tokens by their names in templates.

    Older folders have them in a separate file; tokenizer_config.json takes precedence.
    """
    files = (folder / TOKENIZER_CONFIG, folder / "special_tokens_map.json")
    newer, older = (read_json(f, SpecialTokens) if f.exists() else SpecialTokens() for f in files)
    special: dict[str, str] = {}
    for name in SpecialTokens.__struct_fields__:
        token: str | AddedToken | None = getattr(newer, name) or getattr(older, name)
        if token is not None:
            special[name] = token.content if isinstance(token, AddedToken) else token
    return special


def _sources(folder: Path, file: str, name: str) -> TemplateSources | None:
    if not file:
        return choose_templates(folder, name)
    try:
        return TemplateSources(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template: {error}") from error


def choose_completion_template(
    tokenizer: Tokenizer, name_or_file: str
) -> CompletionTemplate | None:
    """Return the configured template, or the only one whose markers are all special tokens here.

    Text is never split within a special token.

    Raises:
        ConfigError: The template cannot be read, or this tokenizer lacks one of its markers.
    """
    tokens = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    if name_or_file:
        template = read_template(name_or_file)
        missing = [mark for mark in template.marks if mark not in tokens]
        if missing:
            text = f"the tokenizer has no token {', '.join(missing)}"
            raise ConfigError(f"model.completion_template: {template.name}: {text}")
        return template
    found = [template for template in TEMPLATES if tokens.issuperset(template.marks)]
    return found[0] if len(found) == 1 else None


class TemplateFormats(msgspec.Struct, frozen=True):
    """The tool-call and reasoning formats; None where the template does not show a unique one.

    With `reranks` the template asks whether a document answers a query, yes or no.
    """

    tools: ToolParser | None = None
    reasoning: ReasoningParser | None = None
    reranks: bool = False


def detect_formats(template: str) -> TemplateFormats:
    """Detect the formats in a template's source by markers that only one format has."""
    plain = template.replace("\\", "").lower()
    return TemplateFormats(
        tools=_only(template, _TOOLS),
        reasoning=_only(template, _REASONING),
        reranks=all(mark in plain for mark in _RERANKING),
    )


def _only(template: str, rows: Sequence[tuple[P, tuple[str, ...], tuple[str, ...]]]) -> P | None:
    found = [
        parser
        for parser, marks, others in rows
        if all(mark in template for mark in marks) and not any(mark in template for mark in others)
    ]
    return found[0] if len(found) == 1 else None


_ELEMENTS = ("<function=", "<arg_key>", "<invoke ")
_TOOLS = (
    (ToolParser.HERMES, ("<tool_call>", '"name"'), _ELEMENTS),
    (ToolParser.QWEN3_CODER, ("<tool_call>", "<function="), ("<arg_key>",)),
    (ToolParser.GLM45, ("<tool_call>", "<arg_key>"), ("<function=", "<tool_sep>")),
    (ToolParser.HUNYUAN, ("<tool_call>", "<tool_sep>", "<arg_key>"), ()),
    (ToolParser.COHERE_COMMAND4, ("<|START_ACTION|>",), ()),
    (ToolParser.MINICPM5, ('<function name="', '<param name="'), ()),
    (ToolParser.LLAMA3, ("<|python_tag|>",), ()),
    (ToolParser.MISTRAL, ("[TOOL_CALLS]",), ()),
    (ToolParser.DEEPSEEKV3, ("<｜tool▁call▁begin｜>", "```json"), ()),
    (ToolParser.DEEPSEEKV31, ("<｜tool▁call▁begin｜>",), ("```json",)),
    (ToolParser.DEEPSEEKV32, ("｜DSML｜", "function_calls"), ()),
    (ToolParser.KIMI_K2, ("<|tool_calls_section_begin|>",), ()),
    (ToolParser.KIMI_K3, ("<|open|>", "<|sep|>"), ()),
    (ToolParser.GPT_OSS, ("<|channel|>", "<|constrain|>"), ()),
    (ToolParser.MINIMAX_M2, ("<minimax:tool_call>",), ()),
    (ToolParser.LFM2, ("<|tool_call_start|>",), ()),
    (ToolParser.APERTUS2509, ("<|tools_prefix|>",), ()),
    (ToolParser.STEP3, ("<steptml:invoke",), ()),
)
"""Parser, markers that must be present, markers that must be absent."""

_RERANKING = ("answer can only be", '"yes"', '"no"')
"""Phrases in the template of a reranking decoder, such as Qwen3's."""

_OTHER_THINKING = (
    *("<|channel|>", "[THINK]", "◁think▷", "<|inner_prefix|>", "<mm:think>"),
    "<|START_THINKING|>",
)
_REASONING = (
    # Whether an answer begins with reasoning shows at the end of the prompt: one name suffices.
    (ReasoningParser.QWEN3, ("<think>", "</think>"), _OTHER_THINKING),
    (ReasoningParser.KIMI, ("◁think▷",), ()),
    (ReasoningParser.MISTRAL, ("[THINK]", "[/THINK]"), ()),
    (ReasoningParser.APERTUS2509, ("<|inner_prefix|>",), ()),
    (ReasoningParser.GPT_OSS, ("<|channel|>", "analysis"), ()),
    (ReasoningParser.MINIMAX_M3, ("<mm:think>",), ()),
    (ReasoningParser.KIMI_K3, ("<|open|>", "<|sep|>"), ()),
    (ReasoningParser.COHERE_COMMAND4, ("<|START_THINKING|>",), ()),
)
