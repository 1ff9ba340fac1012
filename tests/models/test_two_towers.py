"""CLIP and SigLIP: vectors of texts and of images, against transformers."""

from __future__ import annotations

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from tests.models import families_judges
from tests.models.families import VOCABULARY
from tests.models.model_loop import LINEAR
from tests.models.parity import Saved, check_counted, check_counted_nearly, save
from tests.models.seeing_loop import SeeingLoop, medium
from tests.models.test_judges import check_absences, check_said, check_shared_beginning
from tests.support.llava import picture
from tests.support.models import change_config, change_tensors, open_model
from tests.support.towers import check_every_tensor, embedding, opened
from tests.support.two_towers import (
    CLIP_TOKENS,
    PROJECTION,
    SIGLIP_TOKENS,
    TwoTowers,
    write_clip,
    write_siglip,
)
from tests.support.worker import state

from antiphon.config.errors import ConfigError
from antiphon.model_card.card import read_card
from antiphon.model_card.pooling import read_pooling
from antiphon.model_card.vision.compared import ComparedImages
from antiphon.model_card.vision.vision_card import read_vision
from antiphon.model_worker.model.config_file import read_config
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.llama_parts import read_spec
from antiphon.model_worker.model.registry import find_family
from antiphon.tokenizer.encoding import EncodedPrompt, TextEncoder
from antiphon.tokenizer.model_tokenizer import read_model_tokenizer
from antiphon.wire.claim import PixelLimits
from antiphon.wire.codec import unpack_ids
from antiphon.wire.errors import EngineError, InvalidRequest, PromptTooLong
from antiphon.wire.ids import ModelName, RequestId
from antiphon.wire.media import Medium, MediumHeader
from antiphon.wire.namespaces import PageOrigin
from antiphon.wire.sampling import PoolParams, SamplingParams
from antiphon.wire.tokenize import EncodeRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from antiphon.model_worker.batching.plan import Floats

WRITERS: dict[str, Callable[[Path], Path]] = {"clip": write_clip, "siglip": write_siglip}
TEXTS = ["A cat.", "What is 12 + 30?", "A dog that runs. " * 3]
IMAGES = [picture(1), picture(2, 90, 31), picture(3, 20, 64, "JPEG")]
LIMIT = 2e-5


@pytest.fixture(scope="module", params=families_judges.TWO_TOWERS, ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    whole = save(request.param, tmp_path_factory.mktemp("model"))
    model: Any = whole.model
    return Saved(whole.row, whole.folder, model.text_model)


@pytest.mark.parametrize("linear", ["plain", LINEAR] if LINEAR != "plain" else ["plain"])
def test_streams_of_texts_are_those_of_transformers(saved: Saved, linear: str) -> None:
    check_said(saved, linear)


def test_a_beginning_that_is_cached_changes_nothing(saved: Saved) -> None:
    check_shared_beginning(saved)


def test_every_feature_and_every_tensor_is_missed(saved: Saved) -> None:
    check_absences(saved)


def test_the_plan_counts_the_bytes_of_the_tower_of_texts(saved: Saved) -> None:
    check_counted(saved)
    check_counted_nearly(saved)


@pytest.fixture(scope="module", params=WRITERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS[request.param](tmp_path_factory.mktemp(request.param))


class ComparingLoop(SeeingLoop):
    """Texts and images in, vectors out. The width of a medium is which of the images it is."""

    def __init__(self, folder: Path, images: Sequence[bytes], **values: Any) -> None:
        card = read_card(folder)
        pooling = read_pooling(folder, card)
        assert pooling is not None
        self._vision, self._images = opened(folder), images
        model = open_model(folder, dtype="float32", linear=LINEAR, pooling=pooling, pages=512)
        super().__init__(
            model,
            media_width=pooling.card.width,
            media_grids=False,
            pool_width=pooling.card.width,
            context_tokens=card.context_tokens,
            step_tokens_max=512,
            chunk_tokens=None,
            queue_max=100,
            **values,
        )

    def embedding(self, medium: Medium) -> Floats:
        return embedding(self._vision, self._images[medium.width])

    def vectors_of(self, prompts: Sequence[list[int] | int]) -> list[torch.Tensor]:
        """The vectors of texts, by their tokens, and of images, by their numbers."""
        sampling = SamplingParams(max_new_tokens=0, pool=PoolParams())
        requests = [
            state(
                prompt if isinstance(prompt, list) else [0],
                request_id=RequestId(str(number)),
                sampling=sampling,
                media=(_image(prompt),) if isinstance(prompt, int) else (),
            )
            for number, prompt in enumerate(prompts)
        ]
        vectors: list[torch.Tensor] = []
        for output in self.run(requests):
            (progress,) = output.progress
            assert output.finish.error is None
            vectors.append(torch.tensor(np.frombuffer(progress.details.pooled, "<f4")))
        return vectors


def _image(number: int) -> Medium:
    found = medium(0, 1, 1, number)
    return msgspec.structs.replace(found, span=msgspec.structs.replace(found.span, columns=0))


def test_vectors_of_texts_and_images_side_by_side_are_those_of_transformers(folder: Path) -> None:
    reference = TwoTowers(folder)
    texts = [reference.ids(text) for text in TEXTS]
    loop = ComparingLoop(folder, IMAGES, running_max=4)
    expected = [
        *(reference.of_ids(ids) for ids in texts),
        *(reference.of_image(image) for image in IMAGES),
    ]
    mixed = [texts[0], 0, 1, texts[1], texts[2], 2, 1, texts[0]]
    order = [0, 3, 4, 1, 2, 5, 4, 0]
    for ours, index in zip(loop.vectors_of(mixed), order, strict=True):
        assert ours.norm() == pytest.approx(1.0, abs=1e-5)
        assert float((ours - expected[index]).abs().max() / expected[index].std()) < LIMIT
    assert loop.loads == 4
    stacked = torch.stack(expected)
    others = (stacked @ stacked.T)[~torch.eye(len(expected), dtype=torch.bool)]
    assert others.max() < 0.999, "different inputs have different vectors"


@pytest.mark.parametrize("former", [False, True])
def test_the_first_end_token_of_a_text_has_its_vector(former: bool, tmp_path: Path) -> None:
    """Of CLIPs whose config has the former end token, the first token with the highest id."""
    folder = write_clip(tmp_path)
    if former:
        text = json.loads((folder / "config.json").read_text())["text_config"]
        change_config(folder, text_config={**text, "eos_token_id": 2})
    reference = TwoTowers(folder)
    begin, *words, end = reference.ids(TEXTS[1])
    texts = [
        [begin, *words, end],
        [begin, *words, *[end] * 9],
        [begin, *words[:3], end, *words, end],
        [*words, end, begin, *words],
        *([[*words, begin, *words, begin]] if former else []),
    ]
    loop = ComparingLoop(folder, [], running_max=4)
    for ids, ours in zip(texts, loop.vectors_of(texts), strict=True):
        theirs = reference.of_ids(ids)
        assert float((ours - theirs).abs().max() / theirs.std()) < LIMIT


@pytest.mark.skipif(LINEAR == "plain", reason="the CPU's own kernels are not built")
def test_an_image_changes_no_bit_of_a_text_beside_it(folder: Path) -> None:
    ids = TwoTowers(folder).ids(TEXTS[1])
    loop = ComparingLoop(folder, IMAGES, running_max=4)
    (alone,) = loop.vectors_of([ids])
    assert torch.equal(loop.vectors_of([0, ids, 1])[1], alone)


def test_every_tensor_of_the_tower_of_images_matters(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_every_tensor(folder, IMAGES[1], monkeypatch, unfelt=("k_proj.bias",))


class Words:
    """The tokenizer of a model."""

    def __init__(self, folder: Path) -> None:
        self.card = read_vision(folder)
        words = read_model_tokenizer(folder, vision=self.card)
        tokens = read_card(folder).context_tokens
        self._encoder = TextEncoder(words, PageOrigin(model_digest="m"), 10**6, tokens)

    def encode(
        self, prompt: str, media: Sequence[MediumHeader] = (), *, truncate: bool = False
    ) -> EncodedPrompt:
        request = EncodeRequest(
            request_id=RequestId("1"),
            model=ModelName("m"),
            prompt=prompt,
            media=tuple(media),
            truncate=truncate,
            deadline_unix_ms=0,
        )
        (made,) = self._encoder.encode([request])
        if isinstance(made, EngineError):
            raise made
        return made

    @cached_property
    def image(self) -> MediumHeader:
        return MediumHeader(digest=bytes(32), width=640, height=480)


def test_texts_are_padded_as_the_model_was_trained(folder: Path) -> None:
    reference, words = TwoTowers(folder), Words(folder)
    for text in TEXTS:
        assert list(unpack_ids(words.encode(text).token_ids)) == reference.ids(text)
    with pytest.raises(PromptTooLong, match=f"{CLIP_TOKENS}|{SIGLIP_TOKENS}"):
        words.encode("one " * 2000)
    whole = reference.all_ids("one " * 2000)
    made = words.encode("one " * 2000, truncate=True)
    most = made.untruncated_tokens and len(made.token_ids) // 4
    assert most in (CLIP_TOKENS, SIGLIP_TOKENS)
    assert list(unpack_ids(made.token_ids)) == [*whole[: most - 1], whole[-1]]


def test_an_image_is_a_prompt_of_one_token_with_a_key_of_its_own(folder: Path) -> None:
    words = Words(folder)
    made = words.encode("", [words.image])
    (span,) = made.media
    assert (span.start, span.tokens, span.rows, len(made.token_ids)) == (0, 1, 1, 4)
    other = msgspec.structs.replace(words.image, digest=bytes([1]) * 32)
    assert words.encode("", [other]).media[0].key != span.key


def test_what_is_no_image_alone_is_refused(folder: Path) -> None:
    words = Words(folder)
    image, low = words.image, PixelLimits(most=5000)
    for prompt, media in (("A cat", [image]), ("", [image, image])):
        with pytest.raises(InvalidRequest, match="a text or of an image, and of no more") as caught:
            words.encode(prompt, media)
        assert caught.value.param == "media.0"
    with pytest.raises(InvalidRequest, match="no min_pixels and max_pixels"):
        words.encode("", [msgspec.structs.replace(image, limits=low)])


def test_a_config_that_cannot_be_served_is_named(tmp_path: Path) -> None:
    clip = tmp_path / "clip"
    clip.mkdir()
    write_clip(clip)
    text = json.loads((clip / "config.json").read_text())["text_config"]
    change_config(clip, text_config={**text, "eos_token_id": [5, 6]})
    with pytest.raises(ConfigError, match=r"eos_token_id = \(5, 6\): must be one id"):
        read_pooling(clip, read_card(clip))
    folder = write_siglip(tmp_path)
    before = json.loads((folder / "config.json").read_text())
    for part, changes, complaint in (
        ("vision_config", {"vision_use_head": False}, "vision_use_head = false"),
        ("text_config", {"projection_size": 56}, "texts have 56 numbers, and those of images 48"),
    ):
        change_config(folder, **{part: {**before[part], **changes}})
        with pytest.raises(ConfigError, match=complaint):
            read_vision(folder)
        change_config(folder, **before)
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no pad_token"):
        Words(folder)
    change_tensors(
        folder, lambda all_: {name: t for name, t in all_.items() if "head.bias" not in name}
    )
    with pytest.raises(ModelLoadError, match=r"no tensor head\.bias"):
        ComparingLoop(folder, [])


PUBLISHED = {
    "google/siglip-base-patch16-224": (
        {
            "architectures": ["SiglipModel"],
            "model_type": "siglip",
            "text_config": {"model_type": "siglip_text_model"},
            "torch_dtype": "float32",
            "vision_config": {"model_type": "siglip_vision_model"},
        },
        (768, 12, 12, 3072, "gelu_tanh", 32000, 64),
        ComparedImages(placeholder=0, processing=b"", width=768, text_tokens=64),
    ),
    "openai/clip-vit-large-patch14": (
        {
            "architectures": ["CLIPModel"],
            "model_type": "clip",
            "projection_dim": 768,
            "text_config": {
                "hidden_act": "quick_gelu",
                "hidden_size": 768,
                "intermediate_size": 3072,
                "max_position_embeddings": 77,
                "model_type": "clip_text_model",
                "num_attention_heads": 12,
                "num_hidden_layers": 12,
                "projection_dim": 512,
                "vocab_size": 49408,
            },
            "vision_config": {"hidden_size": 1024, "patch_size": 14, "projection_dim": 512},
        },
        (768, 12, 12, 3072, "quick_gelu", 49408, 77),
        ComparedImages(placeholder=0, processing=b"", width=768),
    ),
    "a CLIP that says nothing": (
        {"architectures": ["CLIPModel"], "model_type": "clip", "text_config": {}},
        (512, 12, 8, 2048, "quick_gelu", 49408, 77),
        ComparedImages(placeholder=0, processing=b"", width=512),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_leave_out_what_their_classes_have(name: str, tmp_path: Path) -> None:
    config, shape, images = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    read, card = read_config(tmp_path), read_card(tmp_path)
    spec: Any = read_spec(find_family(read.architectures), read)
    layer = spec.layers[0]
    found = (spec.hidden, len(spec.layers), layer.mixer.query_heads, layer.feed_forward.width)
    found += (layer.feed_forward.activation, spec.vocabulary, spec.context_tokens)
    assert found == shape
    pooling, vision = read_pooling(tmp_path, card), read_vision(tmp_path)
    assert pooling is not None
    assert (pooling.card.width, pooling.card.images) == (images.width, True)
    clip = not images.text_tokens
    assert (card.causal, pooling.end_id) == (clip, 49407 if clip else None)
    assert vision is not None
    assert msgspec.structs.replace(vision, processing=b"") == images


def test_vectors_have_the_width_of_the_projection(tmp_path: Path) -> None:
    folder = write_clip(tmp_path)
    assert opened(folder).width == PROJECTION
    assert read_card(folder).vocabulary_size > VOCABULARY
