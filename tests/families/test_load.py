"""Loading: a folder round-trips, wrong names are worded, layouts need no weights, and the Hub is asked once."""

from __future__ import annotations

import json
import warnings

import httpx2
import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled

from subtoken_train.artifact.hub import find_adapter, worded
from subtoken_train.engine.build import assemble
from subtoken_train.errors import SubTokenWarning
from subtoken_train.families import FAMILIES, online
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.llava import LlavaFamily
from subtoken_train.families.load import layout_family, load_family, with_processor
from subtoken_train.families.lora import LoraSettings
from subtoken_train.families.qwen_vl import Qwen25VLFamily
from subtoken_train.reducers import build_reducer
from subtoken_train.routing import RoutingConfig
from tests.support.helpers import make_batch, save_backbone
from tests.support.sampling import sampled
from tests.support.tiny.qwen import qwen_batch, qwen_family, qwen_records


@pytest.fixture
def folder(tiny_family, tmp_path):
    """The random tiny model, saved as users would save theirs."""
    return save_backbone(tiny_family, tmp_path)


def with_model_type(folder, name):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": name}))
    return BackboneConfig(str(folder))


@torch.no_grad()
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


@sampled("dtype", ["float32", "bfloat16", "float16"], every=3)
def test_dtype_and_attention_are_what_was_asked(folder, dtype):
    family = load_family(BackboneConfig(str(folder), dtype=dtype, attention="eager"))
    assert {parameter.dtype for parameter in family.model.parameters()} == {getattr(torch, dtype)}
    assert family.decoder.config._attn_implementation == "eager"


@pytest.mark.parametrize("load", [load_family, layout_family])
def test_an_unknown_dtype_names_the_nearest(folder, load):
    with pytest.raises(ValueError, match=r"unknown dtype 'bfloat61'\. Did you mean 'bfloat16'\?"):
        load(BackboneConfig(str(folder), dtype="bfloat61"))


@pytest.mark.parametrize("load", [load_family, layout_family])
def test_an_unknown_path_says_what_was_looked_for(load):
    with pytest.raises(ValueError, match="holds a name of more than 255 bytes: look at it for a missing space"):
        load(BackboneConfig("a/" + "é" * 128))
    with pytest.raises(ValueError, match=r"backbone 'no/such-model' is neither a folder with a config\.json nor a mod"):
        load(BackboneConfig("no/such-model"))


def test_a_folder_without_config_is_no_backbone(tmp_path):
    with pytest.raises(ValueError, match=r"is neither a folder with a config\.json"):
        load_family(BackboneConfig(str(tmp_path)))


def test_another_family_of_transformers_is_refused(folder):
    with pytest.raises(ValueError, match=r"unknown backbone family \(model_type\) 'vipllava'.*'llava'"):
        load_family(with_model_type(folder, "vipllava"))


@pytest.mark.slow
def test_layout_of_a_folder_has_the_loaded_models_shapes(folder):
    loaded, layout = (load(BackboneConfig(str(folder))) for load in (load_family, layout_family))
    shapes = {name: tensor.shape for name, tensor in layout.model.state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in loaded.model.state_dict().items()}
    assert {parameter.device.type for parameter in layout.model.parameters()} == {"meta"}


def test_llava_7b_counts_without_weights_or_network():
    """The paper's model: rank-16 LoRA on q and v, and one linear router of 16 groups per layer."""
    family = layout_family(BackboneConfig("llava-hf/llava-1.5-7b-hf", dtype="bfloat16"))
    routing = RoutingConfig(num_groups=16, kept_groups=4)
    with torch.device("meta"):
        compressed, _ = assemble(family, LoraSettings(rank=16), build_reducer("fastv", keep_ratio=0.25), routing)
    lora = sum(parameter.numel() for parameter in family.model.parameters() if parameter.requires_grad)
    routers = sum(parameter.numel() for parameter in compressed.bank.parameters())
    assert (lora, routers) == (8_388_608, 2_097_664)
    assert family.shape.token_bytes == 512 * 1024
    assert family.visual_tokens() == 576


@sampled(
    ("size", "total", "lora", "routers", "kibibytes"),
    [("3B", 3_754_622_976, 3_686_400, 1_180_224, 36), ("7B", 8_292_166_656, 5_046_272, 1_606_080, 56)],
    every=2,
)
def test_qwen25vl_counts_without_weights_or_network(size, total, lora, routers, kibibytes):
    family = layout_family(BackboneConfig(f"Qwen/Qwen2.5-VL-{size}-Instruct", dtype="bfloat16"))
    assert sum(parameter.numel() for parameter in family.model.parameters()) == total
    routing = RoutingConfig(num_groups=16, kept_groups=4)
    with torch.device("meta"):
        compressed, _ = assemble(family, LoraSettings(rank=16), build_reducer("fastv", keep_ratio=0.25), routing)
    assert sum(parameter.numel() for parameter in family.model.parameters() if parameter.requires_grad) == lora
    assert sum(parameter.numel() for parameter in compressed.bank.parameters()) == routers
    assert family.shape.token_bytes == kibibytes * 1024
    assert family.visual_tokens() == 144


@pytest.fixture
def qwen_folder(tmp_path):
    return save_backbone(qwen_family(), tmp_path / "qwen")


@torch.no_grad()
def test_a_qwen_folder_loads_without_its_video_processor(qwen_folder, tmp_path):
    original, loaded = qwen_family(), load_family(BackboneConfig(str(qwen_folder)))
    assert isinstance(loaded, Qwen25VLFamily)
    batch, other = (qwen_batch(family, qwen_records(tmp_path)) for family in (original, loaded))
    assert torch.equal(other.input_ids_BN, batch.input_ids_BN)
    assert torch.equal(loaded.embed(other), original.embed(batch))
    assert torch.equal(loaded.positions(other), original.positions(batch))


def test_a_published_image_processor_is_read_whatever_class_it_names(qwen_folder):
    """The Hub's file names a class that needs torchvision, and allows 16,384 visual tokens per image."""
    published = {
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
    }
    (qwen_folder / "preprocessor_config.json").write_text(json.dumps(published))
    family = load_family(BackboneConfig(str(qwen_folder)))
    assert (family.min_pixels, family.max_pixels) == (3136, 1_003_520)
    assert family.processor.image_processor.size["longest_edge"] == 12845056


@sampled("max_pixels", [None, 112_896], every=2)
def test_the_cap_reaches_every_way_to_build_a_family(qwen_folder, max_pixels):
    config = BackboneConfig(str(qwen_folder), max_pixels=max_pixels)
    layout = layout_family(config)
    families = [load_family(config), layout, with_processor(layout, config)]
    assert {family.max_pixels for family in families} == {max_pixels or 1_003_520}
    assert {family.visual_tokens((1000, 1000)) for family in families} == {144 if max_pixels else 1225}


@sampled("load", [load_family, layout_family], every=2)
def test_a_cap_for_a_family_of_one_size_is_refused(folder, load):
    with pytest.raises(ValueError, match="max_pixels=112896: llava scales every image to one size"):
        load(BackboneConfig(str(folder), max_pixels=112_896))


def test_a_model_type_that_nobody_knows_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "zebra"}')
    with pytest.raises(ValueError, match="zebra"):
        load_family(BackboneConfig(path=str(tmp_path)))


CODE = {"AutoConfig": "configuration_own.OwnConfig"}
STATE = "_text with layers of linear_attention is not supported: they keep a state instead of keys and values"


@pytest.mark.parametrize("load", [load_family, layout_family])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("gemma3", "gemma3 is not supported: an image's tokens attend in both directions in Gemma 3"),
        ("gemma4", "gemma4 is not supported: heads of its layers with full attention are wider"),
        ("gemma4_unified", "gemma4_unified is not supported: heads of its layers with full attention are wider"),
        ("qwen3_5", f"qwen3_5{STATE}"),
        ("qwen3_5_moe", f"qwen3_5_moe{STATE}"),
        ("llavaonevision1_5", "needs remote code; transformers has no model of this type, so use another backbone"),
    ],
)
def test_a_model_that_sees_images_and_is_not_served_is_refused_before_its_weights(tmp_path, kind, words, load):
    own = {"auto_map": CODE} if kind == "llavaonevision1_5" else {}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **own}))  # there are no weights
    with pytest.raises(ValueError, match=words):
        load(BackboneConfig(str(tmp_path)))


@pytest.mark.parametrize("missing", ["model.safetensors", "tokenizer_config.json"])
def test_a_folder_without_weights_or_tokenizer_is_a_worded_error(tiny_family, tmp_path, missing):
    folder = save_backbone(tiny_family, tmp_path / "backbone")
    for path in folder.glob("token*" if missing.startswith("token") else missing):
        path.unlink()
    with pytest.raises(ValueError, match=r"of backbone .* cannot be read"):
        load_family(BackboneConfig(path=str(folder)))


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


@pytest.mark.parametrize("load", [load_family, layout_family])
@pytest.mark.parametrize(
    ("kind", "taken"), [(kind, taken) for family in FAMILIES.values() for kind, taken in family.originals.items()]
)
def test_a_checkpoint_in_its_authors_own_format_names_the_one_to_take(tmp_path, kind, taken, load):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "auto_map": CODE}))
    words = rf"in its authors' own format .model_type '{kind}'., which needs remote code; use .*{taken}"
    with pytest.raises(ValueError, match=words):
        load(BackboneConfig(str(tmp_path)))


@pytest.fixture
def asked(monkeypatch):
    """A machine without a network, as the client meets it: what it was asked for, in order."""
    requests: list[str] = []

    def refuse(self, request):
        requests.append(str(request.url).rstrip("/"))
        raise httpx2.ConnectError("no route")

    monkeypatch.setattr(httpx2.HTTPTransport, "handle_request", refuse)
    monkeypatch.setattr(online, "_answer", online._Answer())
    monkeypatch.setattr(online, "_PAUSE", 0)
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
        with pytest.raises(ValueError, match=r"no answer from .* \(ConnectError: no route\): check the net"):
            call()
    assert asked == [constants.ENDPOINT] * 2


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


def test_any_answer_will_do(asked, monkeypatch):
    monkeypatch.setattr(
        httpx2.Client, "request", lambda self, method, url, **_: asked.append(url) or httpx2.Response(503)
    )
    for _ in range(2):
        with online.hub_asked():
            assert not constants.HF_HUB_OFFLINE
    assert asked == [constants.ENDPOINT]
