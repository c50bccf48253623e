"""Loading: folders and GGUF files, broken, wrong or on the Hub: nothing in them is run, and mistakes are worded."""

import json
import math
import shutil
import struct
import warnings
from pathlib import Path

import httpx2
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled
from safetensors.torch import load_file, save_file

from checkpoints import tiny_llama
from subtoken_train.artifact.hub import find_adapter, worded
from subtoken_train.cli.main import main
from subtoken_train.errors import SubTokenWarning
from subtoken_train.families import online
from subtoken_train.families.backbone_config import BackboneConfig, check_backbone
from subtoken_train.families.backbone_files import check_finite_weights
from subtoken_train.families.llava import LlavaFamily
from subtoken_train.families.load import check_weights, family_class, layout_family, load_family
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.resources import resource
from tests.support.helpers import make_batch, save_backbone
from tests.support.refusals import refuses
from tests.support.run_folders import Canary, put
from tests.support.sampling import sampled
from tests.support.text_families import TEMPLATE, text_family, write_gguf
from tests.support.tiny.qwen import qwen_family


@pytest.fixture
def folder(tiny_family, tmp_path):
    """The random tiny model, saved as users would save theirs."""
    return save_backbone(tiny_family, tmp_path / "backbone")


def test_a_saved_folder_gives_the_same_model(tiny_family, folder):
    loaded = load_family(BackboneConfig(str(folder)))
    assert isinstance(loaded, LlavaFamily)
    assert not loaded.model.training
    for name, tensor in tiny_family.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name
    batch = make_batch([(1, 9)])
    assert torch.equal(loaded.embed(batch), tiny_family.embed(batch))
    text = "<s>USER: <image> what"
    assert loaded.tokenizer(text).input_ids == tiny_family.tokenizer(text).input_ids
    layout = layout_family(BackboneConfig(str(folder)))
    shapes = {name: tensor.shape for name, tensor in layout.model.state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in loaded.model.state_dict().items()}
    assert {parameter.device.type for parameter in layout.model.parameters()} == {"meta"}


@sampled("dtype", ["float32", "bfloat16", "float16"], every=3)
def test_dtype_and_attention_are_what_was_asked(folder, dtype):
    family = load_family(BackboneConfig(str(folder), dtype=dtype, attention="eager"))
    assert {parameter.dtype for parameter in family.model.parameters()} == {getattr(torch, dtype)}
    assert family.decoder.config._attn_implementation == "eager"


def test_a_published_image_processor_is_read_whatever_class_it_names(tmp_path):
    """The Hub's file names a class that needs torchvision, and allows 16,384 visual tokens per image."""
    qwen_folder = save_backbone(qwen_family(), tmp_path / "qwen")
    published = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2}
    published |= {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"}
    (qwen_folder / "preprocessor_config.json").write_text(json.dumps({**published, "merge_size": 2}))
    family = load_family(BackboneConfig(str(qwen_folder)))
    assert (family.min_pixels, family.max_pixels) == (3136, 1_003_520)
    assert family.processor.image_processor.size["longest_edge"] == 12845056


@sampled("key", ["attn_implementation", "_attn_implementation"], every=2)
def test_a_backbone_names_no_attention_of_its_own(folder, key):
    """transformers would fetch a kernel, code, from the Hub."""
    path = folder / "config.json"
    content = json.loads(path.read_text())
    for part in (content, content["text_config"], content["vision_config"]):
        part[key] = "kernels-community/flash-attn2"
    path.write_text(json.dumps(content))
    for read in (layout_family, load_family):
        family = read(BackboneConfig(str(folder)))
        parts = (family.model.config, family.decoder.config, family.model.config.vision_config)
        assert {part._attn_implementation for part in parts} <= {"sdpa", "eager"}


CODE = {"auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
ORIGINAL = {"mm_vision_tower": "openai/clip-vit-large-patch14-336", "hidden_size": 64}
STATE = "_text with layers of linear_attention is not supported: they keep a state instead of keys and values"
KINDS = {
    "zebra": ({}, "zebra"),
    "vipllava": ({}, r"unknown backbone family \(model_type\) 'vipllava'.*'llava'"),
    **{kind: ({}, f"{kind} is not supported: tokens of an image attend in both") for kind in ("gemma3", "gemma4")},
    "qwen3_5": ({}, f"qwen3_5{STATE}"),
    "internvl_chat": (CODE, "its code is its authors' own and is not run; use the model in transformers' format"),
    **dict.fromkeys(("llava", "llava_mistral"), (ORIGINAL, "it is in the format of LLaVA's original code")),
}


@pytest.mark.parametrize("load", [load_family, layout_family])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_is_not_served_is_refused_before_its_weights(tmp_path, kind, load):
    own, words = KINDS[kind]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **own}))  # there are no weights
    refuses(words, lambda: load(BackboneConfig(str(tmp_path))))


NAMES = {
    "dtype": ({"dtype": "bfloat61"}, r"unknown dtype 'bfloat61'\. Did you mean 'bfloat16'\?"),
    "quantization": ({"quantization": "nf5"}, r"unknown quantization 'nf5'\. Did you mean 'nf4'\?"),
    "long": ({"path": "a/" + "é" * 128}, "holds a name of more than 255 bytes: look at it for a missing space"),
    "absent": ({"path": "no/such-model"}, r"'no/such-model' is neither a folder with .* 'subtoken-train data smollm2'"),
    "empty": ({"path": "."}, r"is neither a folder with a config\.json nor a mod.*, or take another: 'subtoken-train"),
    "cap": ({"max_pixels": 112_896}, "max_pixels=112896: llava scales images to sizes of its own; remove max_pixels"),
}


@pytest.mark.parametrize("load", [load_family, layout_family])
@pytest.mark.parametrize(("settings", "words"), NAMES.values(), ids=NAMES)
def test_settings_that_are_none_are_worded(folder, settings, words, load):
    refuses(words, lambda: load(BackboneConfig(**{"path": str(folder), **settings})))


@pytest.fixture
def asked(monkeypatch):
    """A machine without a network, as the client meets it: what it was asked for, in order."""
    requests: list[str] = []

    def refuse(self, request):
        requests.append(str(request.url).rstrip("/"))
        raise httpx2.ConnectError("no route")

    monkeypatch.setattr(httpx2.HTTPTransport, "handle_request", refuse)
    monkeypatch.setattr(online, "_reasons", [])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # given back afterwards
    return requests


def test_no_answer_is_asked_for_once_in_all_commands(asked):
    for call in (
        lambda: find_adapter("nobody/adapter"),
        lambda: find_adapter("nobody/other"),
        lambda: load_family(BackboneConfig(path="nobody/backbone")),
        lambda: layout_family(BackboneConfig(path="nobody/backbone")),
    ):
        refuses(r"no answer from .* \(ConnectError: no route\): check the net", call)
    assert asked == [constants.ENDPOINT]


def test_a_cached_answer_comes_with_one_warning(asked):
    said = "no route.*: the local cache is read; HF_HUB_OFFLINE=1 does not ask"
    with pytest.warns(SubTokenWarning, match=said), online.hub_asked():
        pass
    with warnings.catch_warnings(), online.hub_asked():
        warnings.simplefilter("error")


def test_who_said_offline_is_not_told_of_the_network(asked, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with online.hub_asked():
        pass
    assert asked == []
    assert "HF_HUB_OFFLINE is set" in worded(OfflineModeIsEnabled(), "user/name")


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(3)
    return tiny_llama.build_model(2).eval(), tiny_llama.build_tokenizer()


@pytest.fixture(scope="module")
def file(tiny, tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", *tiny)


def test_a_file_gives_the_model_that_it_was_made_of(tiny, file, tmp_path, capsys):
    model, tokenizer = tiny
    alone = shutil.copy(file, tmp_path / "model.gguf")
    for name in ("config.json", "adapter_config.json", "tokenizer_config.json"):  # of another model, beside it
        (tmp_path / name).write_text('{"model_type": "mamba", "base_model_name_or_path": "nobody/nothing"}')
    loaded = load_family(BackboneConfig(str(alone)))
    assert "GGUF tensors" not in capsys.readouterr().err  # a bar, which is no terminal's here
    assert loaded.model.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name
    assert loaded.tokenizer.chat_template == TEMPLATE
    text = "The code of baran is amber falcon."
    assert loaded.tokenizer(text, add_special_tokens=False).input_ids == tokenizer(text).input_ids[1:]
    assert not hasattr(loaded.model.config, "quantization_config")
    assert str(loaded.model.config.name_or_path) == str(alone)


def test_its_rounding_is_kept_in_the_dtype_that_is_asked_for(tiny, tmp_path):
    family = load_family(BackboneConfig(str(write_gguf(tmp_path / "q8.GGUF", *tiny, kind="Q8_0")), dtype="bfloat16"))
    weight, whole = (each.model.layers[0].mlp.up_proj.weight for each in (family.model, tiny[0]))
    assert weight.dtype == torch.bfloat16
    assert 1e-3 < (weight.float() - whole).abs().max() / whole.abs().max() < 1e-2


def test_a_header_is_enough_to_lay_it_out(file, monkeypatch):
    import gguf

    monkeypatch.setattr(gguf, "dequantize", lambda *_: pytest.fail("a weight was read"))
    config = BackboneConfig(str(file))
    assert check_weights(family_class(config), config).num_hidden_layers == 2
    assert layout_family(config).shape.num_kv_heads == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general__type": "adapter"}, "is not the whole model: a LoRA"),
        ({"split__count": 3}, "one of 3 parts .join them"),
        ({"architecture": "qwen2vl"}, "does not read architecture 'qwen2vl' from GGUF; use"),
        ({"architecture": "mamba"}, "mamba"),
        ({"llama__rope__scaling__type": "yarn"}, "scales its rotary positions"),
    ],
)
def test_what_is_not_read_is_said(tiny, tmp_path, changes, words):
    path = write_gguf(tmp_path / "model.gguf", *tiny, **changes)
    refuses(words, lambda: load_family(BackboneConfig(str(path))))


@pytest.mark.parametrize("layers", [2, 10**6])
def test_a_header_of_more_than_its_file_holds_is_no_model(tiny, tmp_path, monkeypatch, layers):
    monkeypatch.setattr(tiny[0].config, "num_hidden_layers", layers)
    if layers == 2:
        monkeypatch.setattr(tiny[0], "state_dict", dict)
    path = write_gguf(tmp_path / "model.gguf", *tiny)
    refuses(f"names {layers} layers and is not the whole model", lambda: family_class(BackboneConfig(str(path))))


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
        "gone/x.gguf": "does not exist; .* 'subtoken-train data smollm2' fetches a small one",
        str(file.parent): r"a folder of GGUF files; name one of them: .*model\.gguf",
        "someone/model-7B-GGUF": r"fetch one of them \('hf download",
    }.items():
        refuses(words, load_family, BackboneConfig(path))
    refuses("is read to float32; set it to none", lambda: check_backbone(BackboneConfig(str(file), quantization="nf4")))
    refuses("is for Hub ids", lambda: check_backbone(BackboneConfig(str(file), revision="main")))


def test_an_adapter_is_of_the_file_that_it_was_trained_on(tiny, file, tmp_path):
    recipe = ["--config", "tinylm_quest25_s16k12", "--output_dir", str(tmp_path / "run"), "--trainer.max_steps", "1"]
    recipe += ["--model.backbone.path", str(file), "--data.context_length", "256"]
    assert main(["check", *recipe, "--offline"]) == 0
    assert main(["fit", *recipe]) == 0
    adapter = str(tmp_path / "run/adapter")
    assert SubTokenModel.from_pretrained(adapter).backbone.bank is not None
    SubTokenModel.from_pretrained(adapter, backbone=str(shutil.copy(file, tmp_path / "moved.gguf")))
    other = str(write_gguf(tmp_path / "q8.gguf", *tiny, kind="Q8_0"))
    tiny[0].save_pretrained(tmp_path / "plain")
    tiny[1].save_pretrained(tmp_path / "plain")
    for backbone, found in ((other, "sha256-"), (str(tmp_path / "plain"), "no GGUF file")):
        with pytest.raises(ValueError, match=rf"trained on the GGUF file .* is not that file \({found}"):
            SubTokenModel.from_pretrained(adapter, backbone=backbone)
    merged = str(tmp_path / "merged")
    assert main(["export", adapter, merged, "--merge-lora"]) == 0
    SubTokenModel.from_pretrained(merged)


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
