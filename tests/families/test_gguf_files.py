"""GGUF files as backbones: read to the model that they were made of, and refused in words before a weight is read."""

from __future__ import annotations

import shutil

import pytest
import torch

from checkpoints import tiny_llama
from subtoken_train import SubTokenModel
from subtoken_train.cli.main import main
from subtoken_train.families.backbone_config import BackboneConfig, check_backbone
from subtoken_train.families.load import check_weights, family_class, layout_family, load_family
from tests.support.gguf_tiny import TEMPLATE, write_gguf


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(3)
    return tiny_llama.build_model(2).eval(), tiny_llama.build_tokenizer()


@pytest.fixture(scope="module")
def file(tiny, tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", *tiny)


@torch.no_grad()
def test_a_file_gives_the_model_that_it_was_made_of(tiny, file, tmp_path):
    model, tokenizer = tiny
    alone = shutil.copy(file, tmp_path / "model.gguf")
    for name in ("config.json", "adapter_config.json", "tokenizer_config.json"):  # of another model, beside it
        (tmp_path / name).write_text('{"model_type": "mamba", "base_model_name_or_path": "nobody/nothing"}')
    loaded = load_family(BackboneConfig(str(alone)))
    assert loaded.model.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name
    assert loaded.tokenizer.chat_template == TEMPLATE
    text = "The code of baran is amber falcon."
    assert loaded.tokenizer(text, add_special_tokens=False).input_ids == tokenizer(text).input_ids[1:]
    assert not hasattr(loaded.model.config, "quantization_config")
    assert str(loaded.model.config.name_or_path) == str(alone)


@torch.no_grad()
def test_its_rounding_is_kept_in_the_dtype_that_is_asked_for(tiny, tmp_path):
    rounded = write_gguf(tmp_path / "q8.GGUF", *tiny, kind="Q8_0")
    family = load_family(BackboneConfig(str(rounded), dtype="bfloat16"))
    weight, whole = (each.model.layers[0].mlp.up_proj.weight for each in (family.model, tiny[0]))
    assert weight.dtype == torch.bfloat16
    error = (weight.float() - whole).abs().max() / whole.abs().max()
    assert 1e-3 < error < 1e-2


def test_a_header_is_enough_to_lay_it_out(file, monkeypatch):
    import gguf

    monkeypatch.setattr(gguf, "dequantize", lambda *_: pytest.fail("a weight was read"))
    config = BackboneConfig(str(file))
    assert check_weights(family_class(config), config).num_hidden_layers == 2
    assert layout_family(config).shape.num_kv_heads == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "clip"}, "vision tower of a model that sees"),
        ({"general__type": "mmproj"}, "vision tower of a model that sees"),
        ({"general__type": "adapter"}, "is a LoRA, not a model"),
        ({"split__count": 3}, "one of 3 parts; join them"),
        ({"architecture": "qwen2vl"}, "architecture 'qwen2vl', which transformers does not read from GGUF; use"),
        ({"architecture": "mamba"}, "mamba"),
        ({"llama__rope__scaling__type": "yarn"}, "scales its rotary positions"),
    ],
)
def test_what_is_not_read_is_said(tiny, tmp_path, changes, words):
    path = write_gguf(tmp_path / "model.gguf", *tiny, **changes)
    with pytest.raises(ValueError, match=words):
        load_family(BackboneConfig(str(path)))


@pytest.mark.parametrize("layers", [2, 10**6])
def test_a_header_of_more_than_its_file_holds_is_no_model(tiny, tmp_path, monkeypatch, layers):
    monkeypatch.setattr(tiny[0].config, "num_hidden_layers", layers)
    if layers == 2:
        monkeypatch.setattr(tiny[0], "state_dict", dict)
    path = write_gguf(tmp_path / "model.gguf", *tiny)
    with pytest.raises(ValueError, match=f"names {layers} layers and holds the weights of fewer; download it again"):
        family_class(BackboneConfig(str(path)))


def test_damaged_files_are_refused(file, tmp_path, capsys):
    whole = file.read_bytes()
    for number, content in enumerate((b"", b"GGUF", b"PK" + whole[2:], whole[:2000], whole[:-64])):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"not a GGUF file, or is damaged or cut off .* download it again"):
            family_class(BackboneConfig(str(path)))
    assert main(["generate", "--backbone", str(path), "--prompt", "hi"]) == 2
    assert "cut off" in capsys.readouterr().err


def test_names_that_are_no_file(tmp_path, file):
    for path, words in {
        "gone/x.gguf": "does not exist",
        str(file.parent): r"a folder of GGUF files; name one of them: .*model\.gguf",
        "someone/model-7B-GGUF": r"fetch one of them \('hf download",
    }.items():
        with pytest.raises(ValueError, match=words):
            load_family(BackboneConfig(path))
    with pytest.raises(ValueError, match="is read to float32; set it to none"):
        check_backbone(BackboneConfig(str(file), quantization="nf4"))
    with pytest.raises(ValueError, match="is for Hub ids"):
        check_backbone(BackboneConfig(str(file), revision="main"))


def test_a_missing_package_names_the_extra(file, monkeypatch):
    monkeypatch.setattr("subtoken_train.errors.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install 'subtoken_train\[gguf\]'"):
        load_family(BackboneConfig(str(file)))


def test_an_adapter_is_of_the_file_that_it_was_trained_on(tiny, file, tmp_path):
    recipe = ["--config", "tinylm_quest25_s16k12", "--output_dir", str(tmp_path / "run"), "--trainer.max_steps", "1"]
    recipe += ["--model.backbone.path", str(file), "--data.context_length", "256"]
    assert main(["check", *recipe, "--offline"]) == 0
    assert main(["fit", *recipe]) == 0
    adapter = str(tmp_path / "run/adapter")
    assert SubTokenModel.from_pretrained(adapter).backbone.bank is not None
    moved = str(shutil.copy(file, tmp_path / "moved.gguf"))
    SubTokenModel.from_pretrained(adapter, backbone=moved)
    other = str(write_gguf(tmp_path / "q8.gguf", *tiny, kind="Q8_0"))
    tiny[0].save_pretrained(tmp_path / "plain")
    tiny[1].save_pretrained(tmp_path / "plain")
    for backbone, found in ((other, "sha256-"), (str(tmp_path / "plain"), "no GGUF file")):
        with pytest.raises(ValueError, match=rf"trained on the GGUF file .* is not that file \({found}"):
            SubTokenModel.from_pretrained(adapter, backbone=backbone)
    merged = str(tmp_path / "merged")
    assert main(["export", adapter, merged, "--merge-lora"]) == 0
    SubTokenModel.from_pretrained(merged)
