"""Models that see, of which the model of text is served: rows as in `families`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import transformers
from tests.models.families import ROWS as TEXT
from tests.models.families import Row, long_rope
from tests.models.families_moe import ROWS as TEXT_MOE
from tests.support.gemma3n import Gemma3nForConditionalGeneration
from tests.support.gemma3n import write_published as write_gemma3n
from tests.support.kimi_k25 import write_published
from tests.support.phi4 import HEARING

if TYPE_CHECKING:
    from collections.abc import Mapping

BY_NAME = {row.name: row for row in TEXT + TEXT_MOE}
VISION: Mapping[str, object] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
INTERLEAVED = (6, 5, 5)


def seeing(
    text: str,
    architecture: type[transformers.PreTrainedModel],
    own: Mapping[str, object] | None = None,
    **vision: object,
) -> Row:
    """The row of a model whose text part is that of another row, but for its own fields."""
    row = BY_NAME[text]
    within = {"model_type": row.config.model_type, **row.sizes, **row.fields, **(own or {})}
    return replace(
        row,
        name=f"{text} that sees",
        architecture=architecture,
        again=True,
        sizes={},
        fields={
            "text_config": within,
            "vision_config": {**VISION, **vision},
            "tie_word_embeddings": row.made().tie_word_embeddings,
            "mm_tokens_per_image": 16,
        },
    )


def with_audio(text: str, architecture: type[transformers.PreTrainedModel]) -> Row:
    """The row of a model that takes audio, whose text part is that of another row."""
    row = BY_NAME[text]
    tower = {
        "d_model": 32,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 32,
        "num_mel_bins": 8,
        "max_source_positions": 20,
    }
    within = {"model_type": row.config.model_type, **row.sizes, **row.fields}
    fields = {"text_config": within, "audio_config": tower, "tie_word_embeddings": False}
    return replace(
        row,
        name=f"{text} with audio",
        architecture=architecture,
        again=True,
        sizes={},
        fields=fields,
    )


def with_axes(
    name: str,
    architecture: type[transformers.PreTrainedModel],
    text: str = "qwen2",
    sections: tuple[int, ...] = (2, 3, 3),
    turned: tuple[str, ...] = (),
    part: float = 1.0,
    without: tuple[str, ...] = (),
    **vision: object,
) -> Row:
    """The row of a Qwen whose positions have axes."""
    row = BY_NAME[text]
    rope = {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": list(sections),
        "partial_rotary_factor": part,
    }
    fields = {k: v for k, v in {**row.sizes, **row.fields}.items() if k not in without}
    return replace(
        row,
        name=name,
        architecture=architecture,
        sizes={},
        fields={
            "text_config": {**fields, "rope_parameters": rope},
            "vision_config": {"depth": 1, "num_heads": 2, "hidden_size": 64, **vision},
            "tie_word_embeddings": False,
        },
        turned=turned,
    )


ROWS = (
    seeing("gemma3", transformers.Gemma3ForConditionalGeneration, image_size=56),
    *(
        seeing(
            text,
            transformers.Llama4ForConditionalGeneration,
            vision_output_dim=32,
            projector_input_dim=32,
            projector_output_dim=32,
        )
        for text in ("llama4", "llama4 with two experts a token and no norms of heads")
    ),
    replace(
        # The eps is that of the row with experts, for the same reason.
        seeing("qwen3.5", transformers.MiniCPMV4_6ForConditionalGeneration, {"rms_norm_eps": 1e-3}),
        name="qwen3.5 that sees slices, in minicpm-v",
    ),
    replace(
        seeing("deepseek-v3", transformers.Kimi_K25ForConditionalGeneration),
        name="deepseek-v3 that sees, in kimi-k2.5",
        write=write_published,
    ),
    with_axes("qwen2-vl", transformers.Qwen2VLForConditionalGeneration, embed_dim=32),
    with_axes(
        "qwen2.5-vl",
        transformers.Qwen2_5_VLForConditionalGeneration,
        hidden_size=32,
        intermediate_size=48,
        out_hidden_size=64,
    ),
    with_axes(
        "qwen3-vl",
        transformers.Qwen3VLForConditionalGeneration,
        "qwen3",
        INTERLEAVED,
        out_hidden_size=64,
        deepstack_visual_indexes=[0],
    ),
    with_axes(
        "qwen3-vl with experts",
        transformers.Qwen3VLMoeForConditionalGeneration,
        "qwen3-moe",
        INTERLEAVED,
        turned=("experts.gate_up_proj", "experts.down_proj"),
        out_hidden_size=64,
        deepstack_visual_indexes=[0],
    ),
    *(
        with_axes(
            f"{text} that sees",
            architecture,
            text,
            (2, 1, 1),
            part=0.25,
            out_hidden_size=64,
        )
        for text, architecture in (
            ("qwen3.5", transformers.Qwen3_5ForConditionalGeneration),
            ("qwen3.5 with experts", transformers.Qwen3_5MoeForConditionalGeneration),
        )
    ),
    seeing("llama", transformers.LlavaForConditionalGeneration, model_type="clip_vision_model"),
    Row(
        "phi4-multimodal",
        transformers.Phi4MultimodalForCausalLM,
        {**long_rope(trained=8), "vision_config": {**VISION}, "audio_config": {**HEARING}},
        again=True,
    ),
    replace(
        BY_NAME["gemma3n"],
        name="gemma3n as published",
        architecture=Gemma3nForConditionalGeneration,
        again=True,
        sizes={},
        fields={"text_config": {**BY_NAME["gemma3n"].sizes, **BY_NAME["gemma3n"].fields}},
        write=write_gemma3n,
    ),
    with_audio("qwen2", transformers.Qwen2AudioForConditionalGeneration),
    with_axes(
        "glm4v",
        transformers.Glm4vForConditionalGeneration,
        "glm4",
        (1, 1, 2),
        part=0.5,
        without=("head_dim",),
        out_hidden_size=64,
        image_size=28,
    ),
    with_axes(
        "glm4v with experts",
        transformers.Glm4vMoeForConditionalGeneration,
        "glm4-moe",
        (2, 3, 3),
        part=0.5,
        out_hidden_size=64,
        image_size=28,
    ),
    with_axes(
        "paddleocr-vl",
        transformers.PaddleOCRVLForConditionalGeneration,
        "qwen3",
        (4, 6, 6),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=28,
    ),
    replace(
        seeing(
            "mistral",
            transformers.LlavaNextForConditionalGeneration,
            model_type="clip_vision_model",
        ),
        name="mistral that sees tiles, in llava-next",
    ),
    replace(
        seeing(
            "qwen2",
            transformers.LlavaOnevisionForConditionalGeneration,
            model_type="siglip_vision_model",
        ),
        name="qwen2 that sees tiles, in llava-onevision",
    ),
    replace(
        seeing("qwen2", transformers.InternVLForConditionalGeneration),
        name="qwen2 that sees tiles, in internvl",
    ),
    *(
        replace(
            seeing("llama", architecture, model_type=f"{kind}_vision"),
            name=f"llama that sees tiles, in {kind}",
        )
        for kind, architecture in (
            ("idefics3", transformers.Idefics3ForConditionalGeneration),
            ("smolvlm", transformers.SmolVLMForConditionalGeneration),
        )
    ),
    seeing(
        "mistral", transformers.Mistral3ForConditionalGeneration, model_type="pixtral", head_dim=16
    ),
)

AREAS = (
    seeing(
        "gemma4",
        transformers.Gemma4ForConditionalGeneration,
        head_dim=16,
        num_key_value_heads=2,
        position_embedding_size=4,
    ),
)
"""`test_area_images` compares prompts with images and without; features are those of the text."""
