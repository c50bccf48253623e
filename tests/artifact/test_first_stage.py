"""Stage 2 starts from a token-only adapter of its backbone and LoRA settings, in one of three named readings."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch
from safetensors.torch import load_file

from subtoken_train.artifact.folder import LORA_ONLY, MATCHED_ANCHOR, SAME_TOKENS, read_first_stage
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import layout_family, load_family
from subtoken_train.families.lora import LoraSettings, add_lora
from subtoken_train.reducers import build_reducer
from subtoken_train.routing import RoutingConfig
from tests.support.helpers import made_adapter, save_backbone
from tests.support.sampling import sampled

LORA = LoraSettings(rank=4, alpha=8, dropout=0.1)
REDUCER = build_reducer("fastv", keep_ratio=0.25)
ROUTING = RoutingConfig(num_groups=16, kept_groups=4)


@pytest.fixture
def source(tmp_path, tiny_family):
    return BackboneConfig(path=str(save_backbone(tiny_family, tmp_path / "backbone")))


def write(folder, source, routing=None, reducer=REDUCER):
    return made_adapter(folder, source.path, reducer, routing, LORA)[0]


@pytest.fixture
def adapter(tmp_path, source):
    return write(tmp_path / "adapter", source)


@sampled("layout", [False, True], every=2)
def test_the_right_one(adapter, source, layout):
    """Its settings are read, and its tensors fit a loaded model as well as one on the meta device."""
    first = read_first_stage(adapter, REDUCER, ROUTING, None)
    assert (first.config.lora, first.reading) == (LORA, SAME_TOKENS)
    assert read_first_stage(adapter, REDUCER, ROUTING, LORA) == first
    family = layout_family(source) if layout else load_family(source)
    tensors = first.tensors(family, source, add_lora(family, LORA))
    on_disk = load_file(adapter / "adapter_model.safetensors")
    assert tensors.keys() == on_disk.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in on_disk.items())


@pytest.mark.slow
def test_the_digest_is_that_of_the_tensors(adapter):
    first = read_first_stage(adapter, REDUCER, ROUTING, None)
    before = first.digest()
    (adapter / "README.md").write_text("other words")
    assert first.digest() == before
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    assert first.digest() != before


def anchor(keep_ratio, name="fastv", **options):
    return build_reducer(name, keep_ratio, round_up=True, **options)


FEWER_GROUPS = RoutingConfig(num_groups=8, kept_groups=4)
READINGS = [
    (build_reducer("none"), ROUTING, LORA_ONLY),
    (build_reducer("none"), None, LORA_ONLY),
    (build_reducer("fastv", 1.0), ROUTING, LORA_ONLY),
    (anchor(0.15625), ROUTING, MATCHED_ANCHOR),
    (anchor(0.15625, matches=0.25), ROUTING, MATCHED_ANCHOR),
    (anchor(0.15625, matches=0.2), ROUTING, None),  # of another arm
    (anchor(0.1568), ROUTING, MATCHED_ANCHOR),  # rounded up to whole tokens
    (anchor(0.1875), FEWER_GROUPS, MATCHED_ANCHOR),
    (anchor(0.15625, stage="decoder"), ROUTING, None),
    (anchor(0.15625, "visionzip"), ROUTING, None),
    (anchor(0.15624), ROUTING, None),  # fewer bytes than stage 2
    (anchor(0.18), ROUTING, None),
    (anchor(0.15625), FEWER_GROUPS, None),
    (anchor(0.15625), None, None),
    (build_reducer("fastv", 0.15625), ROUTING, None),  # not rounded up: an arm of its own
]


def test_the_other_readings_are_named(adapter):
    """LoRA without a reducer, and the anchor with stage 2's bytes, are taken by name; all else is refused."""
    record = json.loads((adapter / "subtoken_config.json").read_text())
    for trained, routing, reading in READINGS:
        (adapter / "subtoken_config.json").write_text(json.dumps({**record, "reducer": asdict(trained)}))
        if reading is not None:
            assert read_first_stage(adapter, REDUCER, routing, LORA).reading == reading
            continue
        with pytest.raises(ValueError, match="was trained with reducer") as refused:
            read_first_stage(adapter, REDUCER, routing, LORA)
        said = str(refused.value).replace(str(adapter), "")
        assert said.endswith("; stage 1 has the recipe's reducer, or none (lora_only), or is the matched anchor")
        assert len(said) < 300


def test_a_contradicting_lora(adapter):
    with pytest.raises(ValueError, match=r"lora.rank 4 \(the recipe has 16\), lora.alpha 8 \(the recipe has 32\)"):
        read_first_stage(adapter, REDUCER, ROUTING, LoraSettings(dropout=0.1))


@pytest.mark.parametrize("selector", ["linear", "value_norm"])
def test_a_routed_adapter(tmp_path, source, selector):
    folder = write(tmp_path / "routed", source, RoutingConfig(selector=selector, num_groups=8, kept_groups=2))
    with pytest.raises(ValueError, match=rf"routed already routes \(S8K2 {selector}\)"):
        read_first_stage(folder, REDUCER, ROUTING, None)


def test_no_folder_and_no_adapter_folder(tmp_path):
    with pytest.raises(ValueError, match=r"stage2.adapter .*absent does not exist; train the token-only recipe"):
        read_first_stage(tmp_path / "absent", REDUCER, ROUTING, None)
    with pytest.raises(ValueError, match="not an adapter folder"):
        read_first_stage(tmp_path, REDUCER, ROUTING, None)


def test_another_backbone(adapter, source, tmp_path):
    config = json.loads((tmp_path / "backbone" / "config.json").read_text())
    config["text_config"]["intermediate_size"] += 2
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config))
    elsewhere = BackboneConfig(path=str(other))
    family = layout_family(elsewhere)
    with pytest.raises(ValueError, match=r"was trained on .*backbone' .*but the backbone is .*other"):
        read_first_stage(adapter, REDUCER, ROUTING, None).tensors(family, elsewhere, add_lora(family, LORA))
