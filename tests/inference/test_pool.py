"""Several arms on one loaded backbone are those that are loaded alone, and leave nothing behind."""

from __future__ import annotations

import warnings

import pytest
import torch

from checkpoints.tiny_llava import build_model, build_processor
from subtoken_train.artifact.folder import AdapterConfig, identify, read_adapter, write_adapter, write_merged
from subtoken_train.engine.build import Stage2Config, build
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.llava import LlavaFamily
from subtoken_train.families.load import load_family
from subtoken_train.families.lora import LoraSettings
from subtoken_train.inference.batched import generate_batch
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.pool import ModelPool
from subtoken_train.reducers import build_reducer
from subtoken_train.routing import RoutingConfig
from tests.support.helpers import compress, make_batch, save_backbone
from tests.support.sampling import sampled

FASTV = build_reducer("fastv", keep_ratio=0.25)
ROUTING = RoutingConfig(num_groups=4, kept_groups=1, query_conditioned=True, value_gate=True, budget="global")


def write(folder, source, reducer, routing, stage2=None):
    lora = LoraSettings(rank=2)
    backbone, peft_model = build(source, lora, reducer, routing, stage2)
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if "lora_" in name or name.startswith("bank."):
                parameter.normal_(std=0.3)
    config = AdapterConfig(source, lora, reducer, routing, identify(backbone.family, source), {}, stage2)
    return write_adapter(folder, config, backbone, peft_model)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A backbone, and adapters of it: routed, token-only, of two stages, and one merged."""
    folder = tmp_path_factory.mktemp("arms")
    torch.manual_seed(0)
    path = save_backbone(LlavaFamily(build_model(text_layers=3).eval(), build_processor()), folder / "backbone")
    source = BackboneConfig(path=str(path))
    found = {
        "backbone": path,
        "routed": write(folder / "routed", source, FASTV, ROUTING),
        "tokens": write(folder / "tokens", source, build_reducer("visionzip", keep_ratio=0.5), None),
        "stages": write(folder / "stages", source, FASTV, ROUTING, Stage2Config("first", LoraSettings(rank=2))),
    }
    config, backbone, peft_model = read_adapter(found["tokens"])
    write_merged(folder / "merged", config, backbone, peft_model)
    return found | {"merged": folder / "merged"}


@torch.no_grad()
def logits(backbone):
    return backbone.logits(backbone.run(make_batch([(1, 8), (0, 5)])))


def assert_untouched(family, source):
    """Weights, modules and hooks are those of a fresh load, and of transformers' own after a forward."""
    loaded = load_family(source)
    for each in (family, loaded):
        logits(compress(each))
    fresh = loaded.model
    assert [*family.model.state_dict()] == [*fresh.state_dict()]
    assert all(torch.equal(x, fresh.state_dict()[name]) for name, x in family.model.state_dict().items())
    mine, theirs = (dict(model.named_modules()) for model in (family.model, fresh))
    assert {name: type(part) for name, part in mine.items()} == {name: type(part) for name, part in theirs.items()}
    for name, part in mine.items():
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            assert len(getattr(part, hooks)) == len(getattr(theirs[name], hooks)), name
    assert {*vars(family.model)} == {*vars(fresh)}
    assert not any(part.training for part in mine.values())


@pytest.mark.slow
def test_arms_take_turns_and_leave_no_trace(places):
    pool = ModelPool("cpu")
    turns = ["routed", "tokens", "backbone", "stages", "routed", "backbone", "stages", "backbone"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # peft on a model that holds traces of it
        for name in turns:
            arm = pool.get(places[name])
            alone = SubTokenModel.from_pretrained(places[name]).backbone
            assert torch.equal(logits(arm), logits(alone)), name
            assert not arm.training
            if name == "backbone":
                assert_untouched(arm.family, BackboneConfig(path=str(places["backbone"])))
    assert pool.loads == 1


def test_merged_weights_rank_with_their_lora_or_not_at_all(places):
    """Without the LoRA they cannot run, so a frozen ranking would quietly be the adapted one."""
    pool = ModelPool("cpu")
    frozen = build_reducer("fastv", 0.25, ranking="frozen")
    with pytest.raises(ValueError, match=r"ranks without the LoRA, which .*merged.* use the unmerged"):
        pool.get(places["merged"], reducer=frozen)
    assert pool.get(places["tokens"], reducer=frozen).reducer.frozen_scout


def test_the_arm_before_runs_no_more_and_another_backbone_is_another_load(places):
    pool = ModelPool()
    before = pool.get(places["routed"])
    pool.get(places["tokens"])
    with pytest.raises(AssertionError, match="handed on to another"):
        logits(before)
    pool.get(places["tokens"], backbone=str(places["backbone"].parent / "." / "backbone"))
    assert pool.loads == 1
    half = pool.get(places["tokens"], backbone=BackboneConfig(str(places["backbone"]), dtype="bfloat16"))
    assert (pool.loads, half.model.dtype) == (2, torch.bfloat16)
    merged = logits(pool.get(str(places["merged"])))
    assert torch.equal(merged, logits(SubTokenModel.from_pretrained(places["merged"]).backbone))
    pool.get(places["merged"])
    assert pool.loads == 3


@pytest.mark.slow
def test_a_reducer_takes_the_place_of_the_adapters_own(places):
    pool = ModelPool()
    anchor = pool.get(places["tokens"], reducer=build_reducer("visionzip", keep_ratio=0.3, round_up=True))
    batch = make_batch([(1, 8)])
    batch.regions_BN[batch.regions_BN == 5] = 4
    assert generate_batch(anchor, batch, max_new_tokens=1)[0].entries_after == 3 * 20  # 19.2 of 64, rounded up
    assert not torch.equal(logits(anchor), logits(pool.get(places["tokens"])))
    assert torch.equal(logits(pool.get(places["routed"], reducer=FASTV)), logits(pool.get(places["routed"])))
    plain = pool.get(places["backbone"], reducer=FASTV)
    assert torch.equal(logits(plain), logits(SubTokenModel.from_pretrained(places["backbone"], reducer=FASTV).backbone))
    assert pool.loads == 1


@sampled("adapter", ["routed", "stages"], every=2)
def test_a_selector_takes_the_place_of_the_routers(places, adapter):
    pool, seen = ModelPool(), []
    for selector in (None, "value_norm", "output_norm", "random", "static", "none"):
        arm = pool.get(places[adapter], selector=selector)
        seen.append(logits(arm))
        if selector == "none":
            assert arm.bank is None
            continue
        config = arm.bank.config
        assert (config.num_groups, config.kept_groups, config.budget) == (4, 1, "global")
        assert config.selector == (selector or "linear")
        assert (config.query_conditioned, config.value_gate) == (selector is None, selector is None)
    assert len({x.sum().item() for x in seen}) == 6
    config, backbone, _ = read_adapter(places[adapter])
    backbone.bank = None
    assert torch.equal(logits(backbone), seen[-1])
    assert pool.get(places["tokens"], selector="none").bank is None
    assert pool.loads == 1


WRONG = {
    "which chooses by training": ("routed", {"selector": "linear"}),
    "routes nothing": ("tokens", {"selector": "random"}),
    "has no adapter": ("backbone", {"selector": "random"}),
    "is not an adapter": ("backbone", {"backbone": "elsewhere"}),
    "holds its own backbone": ("merged", {"backbone": "elsewhere"}),
    "evicts the context of a language model": ("routed", {"reducer": build_reducer("quest")}),
}


@sampled("words", WRONG, every=3)
def test_mistakes_are_worded_and_leave_a_pool_that_goes_on(places, words):
    pool, (name, options) = ModelPool(), WRONG[words]
    pool.get(places["stages"])
    with pytest.raises(ValueError, match=words):
        pool.get(places[name], **options)
    plain = pool.get(places["backbone"])
    assert_untouched(plain.family, BackboneConfig(path=str(places["backbone"])))
    with pytest.raises(ValueError, match="device"):
        ModelPool("gpu7")
