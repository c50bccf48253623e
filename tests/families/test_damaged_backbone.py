"""A backbone's folder is data: nothing in it is run, what is broken is worded, and NaN in its weights is said."""

import json
import math
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.backbone_files import check_finite_weights
from subtoken_train.families.load import check_weights, family_class, layout_family, load_family
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.resources import resource
from tests.support.helpers import save_backbone
from tests.support.refusals import refuses
from tests.support.run_folders import Canary, put
from tests.support.sampling import sampled
from tests.support.text_families import text_family


@pytest.fixture
def backbone(tmp_path, tiny_family) -> Path:
    return save_backbone(tiny_family, tmp_path / "backbone")


def refused(act, folder, words):
    said = refuses(words, act, BackboneConfig(str(folder)))
    assert len(said) < 500
    return said


def test_nothing_in_a_folder_is_run(backbone, tmp_path):
    (backbone / "code.py").write_text(f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()")
    put(backbone, "config.json", "auto_map", {"AutoConfig": "code.Config", "AutoModelForImageTextToText": "code.Model"})
    load_family(BackboneConfig(str(backbone)))
    (backbone / "model.safetensors").unlink()
    torch.save({"weight": Canary(tmp_path / "ran")}, backbone / "pytorch_model.bin")
    refused(load_family, backbone, r"the weights of backbone .* cannot be read")
    put(backbone, "config.json", "model_type", "own")
    refused(layout_family, backbone, r"its code is its authors' own and is not run")
    assert not (tmp_path / "ran").exists()


INDEX = "model.safetensors.index.json"
DAMAGED = [
    ("config.json", "[" * 99_999, "nested deeper"),
    ("config.json", "[]", "must be a group of keys"),
    ("config.json", '{"model_type": "llama", "hidden_size": "wide"}', "cannot be used"),
    ("config.json", '{"model_type": "llama", "num_hidden_layers": 100000000}', "must be 0 to 10,000"),
    ("config.json", f'{{"model_type": "llama", "hidden_size": {10**400}}}', "a number of many digits"),
    ("config.json", '{"model_type": 5}', "cannot be used|unknown backbone family"),
    ("adapter_config.json", "{}", "is a LoRA of peft"),
    (INDEX, '{"weight_map": {"a": "../x.safetensors"}}', "also names a file"),
    (INDEX, '{"weight_map": {"a": "x.safetensors"}}', "is incomplete"),
    (INDEX, '{"weight_map": 3}', "names no weights"),
    ("model.safetensors", "{}", "the weights of backbone"),
    ("tokenizer.json", "[1", "tokenizer or processor"),
    ("tokenizer.json", "\udcff", "a text that is not UTF-8"),
    ("processor_config.json", "[1", "invalid JSON"),
]


@pytest.mark.parametrize(("file", "content", "words"), DAMAGED)
def test_damaged_files_are_worded(backbone, file, content, words):
    (backbone / file).write_text(content, errors="surrogateescape")
    refused(load_family, backbone, words)


def fewer_layers(folder):
    inner = json.loads((folder / "config.json").read_text())["text_config"]
    put(folder, "config.json", "text_config", {**inner, "num_hidden_layers": 1})


def pickled(folder):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def weights(content: bytes):
    return lambda folder: (folder / "model.safetensors").write_bytes(content)


ABSURD = b'{"a":{"dtype":"F32","shape":[1099511627776],"data_offsets":[0,4398046511104]}}'
NOT_WHOLE = "cannot be read: .*model.safetensors is not a whole safetensors file"
UNFIT = {
    "cut off": (lambda own: weights((own / "model.safetensors").read_bytes()[:-4])(own), NOT_WHOLE),
    "empty": (weights(b""), f"{NOT_WHOLE} .*: a header of 0 in 0"),
    "header of exabytes": (weights(struct.pack("<Q", 2**60) + b"{}"), "a header of 1,152,921,504,606,846,976 in 10 b"),
    "tensor of terabytes": (weights(struct.pack("<Q", len(ABSURD)) + ABSURD), "is not a whole safetensors file"),
    "pickle": (pickled, "pytorch_model.bin is a pickle, which may hold code and is not read"),
    "none": (lambda folder: (folder / "model.safetensors").unlink(), "there is no model.safetensors in it"),
    "no text_config": (
        lambda folder: put(folder, "config.json", "text_config", {}),
        r"do not fit its config.json: \d+ tensors have another sh",
    ),
    "another family": (
        lambda folder: put(folder, "config.json", "model_type", "llama"),
        "it has a text_config, but its model_type 'llama'",
    ),
    "a layer": (fewer_layers, r"they hold layer 1 \(model.language_model.layers.1.* which it leaves out"),
    "head_dim": (
        lambda folder: put(
            folder, "config.json", "text_config", {"model_type": "llama", "hidden_size": 64, "head_dim": -1}
        ),
        "the configuration of .* cannot be (used|read): ",
    ),
}


@pytest.mark.parametrize(("spoil", "words"), UNFIT.values(), ids=UNFIT)
def test_check_and_load_refuse_weights_in_the_same_words(backbone, spoil, words):
    spoil(backbone)
    said = [refused(look, backbone, words) for look in (lambda own: check_weights(family_class(own), own), load_family)]
    assert said[0] == said[1]


GENERATION, TOKENIZER, PICTURES = "generation_config.json", "tokenizer_config.json", "processor_config.json"
ILL_TYPED = [
    (GENERATION, "temperature", "hot", f"{GENERATION}: temperature is 'hot'; it must be a number, or true or false"),
    (GENERATION, "eos_token_id", {}, "eos_token_id is .*; it must be a number"),
    (TOKENIZER, "model_max_length", [], "a value in it is missing or has the wrong type"),
    (TOKENIZER, "chat_template", 5, f"{TOKENIZER}: chat_template is 5; it must be"),
    (PICTURES, "image_processor", {"crop_size": {"height": 10**9, "width": 96}}, "it must be 0 to 16,384"),
]


@pytest.mark.parametrize(("file", "key", "value", "words"), ILL_TYPED)
def test_ill_typed_settings_are_worded(backbone, file, key, value, words):
    put(backbone, file, key, value)
    refused(load_family, backbone, words)


def test_what_published_models_write_is_taken(backbone):
    put(backbone, TOKENIZER, "model_max_length", 10**30)
    put(backbone, GENERATION, "pad_token_id", -1)
    put(backbone, GENERATION, "eos_token_id", [2, 3])
    put(backbone, GENERATION, "bos_token_id", 128_000)  # a class's default, beyond this vocabulary
    sizes = {"size": {"shortest_edge": 3136, "longest_edge": 12_845_056}}  # Qwen's, in pixels
    (backbone / "preprocessor_config.json").write_text(json.dumps(sizes))
    layout_family(BackboneConfig(str(backbone)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool])
def test_weights_of_whole_numbers_are_refused(tmp_path, dtype):
    folder = shutil.copytree(resource("checkpoints/tiny-llama"), tmp_path / "tiny-llama")
    config, name = BackboneConfig(str(folder)), "model.layers.1.mlp.up_proj.weight"
    check_weights(family_class(config), config)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, name: tensors[name].to(dtype)}, folder / "model.safetensors")
    words = f"{name} is of type {str(dtype).removeprefix('torch.')}, but its config.json names no quantisation"
    refused(lambda own: check_weights(family_class(own), own), folder, words)


WORDS = r"the weights of backbone .* hold NaN or infinity in {} tensors, first {}; download it again, or choose"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@sampled("dtype", ["float32", "bfloat16", "float16"], every=3)
def test_one_number_of_millions_is_found(tmp_path, tiny_family, value, dtype):
    """In the last place of a late tensor, of the tower too; the first by name is said."""
    model = tiny_family.model
    names = [name for name, _ in model.named_parameters()]
    broken = next(n for n in names if "vision" in n and n.endswith("fc2.weight")), "lm_head.weight"
    with torch.no_grad():
        for name in broken:
            model.get_parameter(name).view(-1)[-1] = value
    save_backbone(tiny_family, tmp_path)
    refuses(WORDS.format(2, min(broken, key=names.index)), load_family, BackboneConfig(str(tmp_path), dtype=dtype))
    refuses(WORDS.format(2, ".*"), SubTokenModel, model, tiny_family.processor)


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_a_quantised_weight_says_it_by_its_scales(tmp_path, quantization):
    pytest.importorskip("bitsandbytes")
    family = text_family(layers=2)
    save_backbone(family, tmp_path / "whole")
    load_family(BackboneConfig(str(tmp_path / "whole"), quantization=quantization))
    with torch.no_grad():
        family.decoder.layers[1].self_attn.q_proj.weight[3, 5] = math.nan
    save_backbone(family, tmp_path / "broken")
    with pytest.raises(ValueError, match=WORDS.format(1, r"model\.layers\.1\.self_attn\.q_proj\.weight")):
        load_family(BackboneConfig(str(tmp_path / "broken"), quantization=quantization))


def test_large_numbers_are_numbers():
    """Whose sum is none, in any dtype; and buffers may be infinite (a mask)."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        part = torch.nn.Linear(64, 64).to(dtype)
        part.weight.data.fill_(torch.finfo(dtype).max)
        part.register_buffer("mask", torch.full((4,), -math.inf))
        part.register_buffer("places", torch.arange(4))
        part.register_parameter("absent", torch.nn.Parameter(torch.empty(0)))
        check_finite_weights(part, "x")
    part.mask[0] = math.nan
    refuses(WORDS.format(1, "mask"), check_finite_weights, part, "x")
