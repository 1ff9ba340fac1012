"""A folder that cannot be served says so precisely, before anything runs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.models import change_config, load, open_model, take_tensors

from antiphon.config.errors import ConfigError
from antiphon.kernels.op import KernelUnavailable
from antiphon.model_card.card import read_card
from antiphon.model_card.files import find_files
from antiphon.model_worker.model.errors import ModelLoadError
from antiphon.model_worker.model.transformers_backend.model import TransformersDecoder
from antiphon.model_worker.model.weights import Checkpoint
from antiphon.model_worker.startup.loading import kernel_choices
from antiphon.wire.command import KernelChoice


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(llama, tmp_path / "broken"))


def shard_with(folder: Path, name: str) -> Path:
    return Checkpoint.open(folder).tensors[name].file


def change_tensor(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    file = shard_with(folder, name)
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors | ({} if tensor is None else {name: tensor}), file)


NORM = "model.layers.1.input_layernorm.weight"


def test_the_checkpoint_is_in_several_files(llama: Path) -> None:
    assert len({tensor.file for tensor in Checkpoint.open(llama).tensors.values()}) > 1


def test_an_unknown_architecture_names_those_that_are_known(folder: Path) -> None:
    change_config(folder, architectures=["GrandioseForCausalLM"])
    with pytest.raises(ModelLoadError, match=r"GrandioseForCausalLM.*LlamaForCausalLM"):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_parameters": {"rope_type": "spiral"}}, "'spiral'.*default, linear, dynamic"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "0 factors for 8 pairs"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window: 0"),
        ({"num_key_value_heads": 3}, "4 attention heads.*3 key-value heads"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"dtype": "float8"}, "float8"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -2.0}}, r"> 0\.0.*factor"),
        ({"rope_parameters": {"rope_theta": 0}}, r"> 0\.0.*rope_theta"),
        ({"partial_rotary_factor": 1.5}, r"<= 1\.0.*partial_rotary_factor"),
        ({"auto_map": "modeling_grand.Grand"}, r"Expected `object`.*auto_map"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_config_that_would_be_served_wrongly_is_refused(folder, fields, message) -> None:
    change_config(folder, **fields)
    with pytest.raises(ModelLoadError, match=message):
        load(folder)


def test_a_config_with_other_names_for_its_shape_names_the_missing_ones(folder: Path) -> None:
    change_config(folder, "num_hidden_layers", model_type="mpt", n_layers=2)
    with pytest.raises(ModelLoadError, match="num_hidden_layers missing: models of type mpt"):
        load(folder)
    with pytest.raises(ConfigError, match="num_hidden_layers missing: models of type mpt"):
        read_card(folder)


def test_an_activation_that_only_transformers_has_is_left_to_its_modules(folder: Path) -> None:
    change_config(folder, hidden_act="mish")
    assert isinstance(load(folder).decoder, TransformersDecoder)
    with pytest.raises(ModelLoadError, match="hidden_act 'mish' is not supported"):
        load(folder, implementation="antiphon")
    change_config(folder, hidden_act="wish")
    with pytest.raises(ModelLoadError, match="'wish', which is not there"):
        load(folder)


def test_a_config_can_be_overridden_at_loading(llama: Path) -> None:
    assert load(find_files(llama, overrides='{"rms_norm_eps": 0.5}')).spec.norm.eps == 0.5
    with pytest.raises(ModelLoadError, match="hidden_act 'mish'"):
        load(find_files(llama, overrides='{"hidden_act": "mish"}'), implementation="antiphon")
    with pytest.raises(ModelLoadError, match=r"unexpected: model\.layers\.2\..* and 13 more"):
        load(find_files(llama, overrides='{"num_hidden_layers": 2}'))


CODE = {
    "AutoConfig": "configuration_grand.GrandConfig",
    "AutoModelForCausalLM": "modeling_grand.GrandForCausalLM",
    "AutoTokenizer": [None, "somebody/other--tokenization_grand.GrandTokenizer"],
}


def test_code_that_a_model_needs_is_named_and_not_run(folder: Path) -> None:
    change_config(folder, architectures=["GrandForCausalLM"], auto_map=CODE)
    with pytest.raises(ModelLoadError) as caught:
        load(folder)
    assert str(caught.value).endswith(
        "the folder's own code (configuration_grand.py:GrandConfig, "
        "modeling_grand.py:GrandForCausalLM, somebody/other/tokenization_grand.py:GrandTokenizer)"
        " is never run"
    )


def test_code_beside_a_model_that_we_know_is_left_alone(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change_config(folder, auto_map=CODE)
    with caplog.at_level("INFO"):
        assert load(folder).spec.layers[3:]
    assert "code of the model folder is not run" in caplog.messages


def test_a_backend_that_is_named_runs_or_says_why_not(llama: Path) -> None:
    opened = open_model(llama, pages=4, backends=("attention.paged:torch",))
    chosen = {choice.op: choice for choice in kernel_choices(opened)}
    assert chosen["attention.paged"] == KernelChoice(
        op="attention.paged",
        backend="torch",
        refused=dict.fromkeys(("cpu", "flashinfer", "triton"), "torch is forced"),
    )
    assert len(chosen) == len(opened.runner.choices)
    with pytest.raises(KernelUnavailable, match="'triton' cannot run here: it runs on CUDA only"):
        open_model(llama, pages=4, backends=("attention.paged:triton",))


def test_a_device_without_kernels_is_refused(llama: Path) -> None:
    with pytest.raises(
        KernelUnavailable, match=r"device meta: norm\.rmsnorm, which this model needs"
    ):
        open_model(llama, pages=4, device="meta")


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json: No such file"):
        load(tmp_path)


def test_a_folder_without_weights_and_files_without_a_tensor_are_refused(folder: Path) -> None:
    take_tensors(folder)
    with pytest.raises(ModelLoadError, match=r"no \.safetensors file"):
        load(folder)
    save_file({}, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match="no tensors"):
        load(folder)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (None, f"missing: {NORM}$"),
        (torch.ones(47), rf"{NORM} \(47,\), not \(48,\)"),
        (torch.ones(48, dtype=torch.float64), f"{NORM} is F64"),
    ],
    ids=["missing", "of another shape", "of a format that is not read"],
)
def test_a_tensor_that_does_not_fit_is_named(
    folder: Path, tensor: torch.Tensor | None, message: str
) -> None:
    change_tensor(folder, NORM, tensor)
    with pytest.raises(ModelLoadError, match=message):
        load(folder)


def test_an_unexpected_tensor_is_named(folder: Path) -> None:
    change_config(folder, num_hidden_layers=3)
    with pytest.raises(ModelLoadError, match=r"unexpected: model\.layers\.3\..* and 4 more"):
        load(folder)


def test_frequencies_that_old_checkpoints_carry_are_ignored(folder: Path) -> None:
    file = shard_with(folder, NORM)
    extra = {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(load_file(file) | extra, file)
    assert load(folder).spec.layers[3:]


@pytest.mark.parametrize("kept", [0, 4, 100, -1], ids=lambda kept: f"first {kept} bytes")
def test_a_file_that_was_cut_short_is_refused(folder: Path, kept: int) -> None:
    file = shard_with(folder, NORM)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelLoadError, match=f"{file.name}: (cut short|not a safetensors file)"):
        load(folder)


def test_a_file_of_the_index_that_is_none_or_missing_is_named(folder: Path) -> None:
    file = shard_with(folder, NORM)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelLoadError, match=f"{file.name}: not a safetensors file"):
        load(folder)
    file.unlink()
    with pytest.raises(ModelLoadError, match=f"{file.name}: No such file"):
        load(folder)
