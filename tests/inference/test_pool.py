"""Arms on one backbone are those loaded alone; a model on two pretended devices (``support/shards.py``), on one."""

import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from subtoken_train.artifact.folder import read_adapter, write_merged
from subtoken_train.cache.cache import PackedCache
from subtoken_train.calibrating import CALIBRATORS
from subtoken_train.engine.build import Stage2Config
from subtoken_train.evictions import build_eviction
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import check_whole, is_spread, layout_family, load_family, spread_memory
from subtoken_train.functional.gather import on_device
from subtoken_train.inference import pool
from subtoken_train.inference.batched import generate_batch
from subtoken_train.inference.cache_report import account, report
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.pool import ModelPool
from subtoken_train.inference.prefill import decode, open_prompts
from subtoken_train.plugins.harness import read_arguments
from subtoken_train.reducers import build_reducer
from subtoken_train.routing import RoutingConfig
from tests.support.helpers import SMALL_LORA, compress, drawn_llava, made_adapter, make_batch, save_backbone
from tests.support.refusals import refuses
from tests.support.sampling import sampled
from tests.support.shards import shards, spread
from tests.support.truth_cells import REDUCERS
from tests.support.truth_models import TINY, prompts

FASTV = build_reducer("fastv", keep_ratio=0.25)
ROUTING = RoutingConfig(num_groups=4, kept_groups=1, query_conditioned=True, value_gate=True, budget="global")
BYTES = RoutingConfig(num_groups=16, kept_groups=16, value_gate=True, budget="bytes", byte_share=0.6, sinks=1)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A backbone, and adapters of it: routed, of a byte budget, token-only, of two stages, and one merged."""
    folder = tmp_path_factory.mktemp("arms")
    path = save_backbone(drawn_llava(3), folder / "backbone")
    arms = {
        "routed": (FASTV, ROUTING), "tokens": (build_reducer("visionzip", keep_ratio=0.5), None),
        "bytes": (build_reducer("none"), BYTES),
        "stages": (FASTV, ROUTING, SMALL_LORA, Stage2Config("first", SMALL_LORA)),
    }  # fmt: skip
    found = {name: made_adapter(folder / name, path, *arm, spread=0.3)[0] for name, arm in arms.items()}
    config, backbone, peft_model = read_adapter(found["tokens"])
    write_merged(folder / "merged", config, backbone, peft_model)
    return found | {"backbone": path, "merged": folder / "merged"}


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
            assert torch.equal(logits(arm), logits(SubTokenModel.from_pretrained(places[name]).backbone)), name
            assert not arm.training
            if name == "backbone":
                assert_untouched(arm.family, BackboneConfig(path=str(places["backbone"])))
    assert pool.loads == 1


def test_merged_weights_rank_with_their_lora_or_not_at_all(places):
    """Without the LoRA they cannot run, so a frozen ranking would quietly be the adapted one."""
    pool = ModelPool("cpu")
    frozen = build_reducer("fastv", 0.25, ranking="frozen")
    refuses(r"ranks without the LoRA, which .*merged.* use the unmerged", pool.get, places["merged"], reducer=frozen)
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
    pool, batch = ModelPool(), make_batch([(1, 8)])
    anchor = pool.get(places["tokens"], reducer=build_reducer("visionzip", keep_ratio=0.3, round_up=True))
    batch.regions_BN[batch.regions_BN == 5] = 4
    assert generate_batch(anchor, batch, max_new_tokens=1)[0].entries_after == 3 * 20  # 19.2 of 64, rounded up
    assert not torch.equal(logits(anchor), logits(pool.get(places["tokens"])))
    assert torch.equal(logits(pool.get(places["routed"], reducer=FASTV)), logits(pool.get(places["routed"])))
    alone = SubTokenModel.from_pretrained(places["backbone"], reducer=FASTV).backbone
    assert torch.equal(logits(pool.get(places["backbone"], reducer=FASTV)), logits(alone))
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


def test_another_share_of_bytes_is_spent_by_the_same_routers(places):
    """In Python, by a harness and beside other arms."""
    batch, adapter, trained = make_batch([(1, 8)]), str(places["bytes"]), read_adapter(places["bytes"])[1].state_dict()
    batch.regions_BN[batch.regions_BN == 5] = 4
    given = read_arguments({"adapter": adapter, "byte_share": "0.3", "device": "cpu"})
    arms = [SubTokenModel.from_pretrained(adapter, byte_share=share).backbone for share in (None, 0.6, 0.15)]
    for arm, share in zip([*arms, given.model().backbone], (0.6, 0.6, 0.15, 0.3), strict=True):
        assert arm.bank.config == replace(BYTES, byte_share=share)
        assert all(torch.equal(tensor, trained[name]) for name, tensor in arm.state_dict().items())
        (outcome,) = generate_batch(arm, batch, max_new_tokens=1)
        assert share - 0.04 < (outcome.region_bytes - outcome.index_bytes) / outcome.region_dense_bytes <= share


WRONG = {
    "is a trained router": ("routed", {"selector": "linear"}),
    "routes nothing": ("tokens", {"selector": "random"}),
    "has no adapter": ("backbone", {"selector": "random"}),
    "byte_share=0.3 is for an adapter's routers": ("backbone", {"byte_share": 0.3}),
    "routed spends no byte budget": ("routed", {"byte_share": 0.3}),
    "whose place selector='none' takes": ("bytes", {"byte_share": 0.3, "selector": "none"}),
    "is not an adapter": ("backbone", {"backbone": "elsewhere"}),
    "holds its own backbone": ("merged", {"backbone": "elsewhere"}),
    "evicts the context of a language model": ("routed", {"reducer": build_reducer("quest")}),
}


@sampled("words", WRONG, every=3)
def test_mistakes_are_worded_and_leave_a_pool_that_goes_on(places, words):
    pool, (name, options) = ModelPool(), WRONG[words]
    pool.get(places["stages"])
    refuses(words, lambda: pool.get(places[name], **options))
    assert_untouched(pool.get(places["backbone"]).family, BackboneConfig(path=str(places["backbone"])))
    refuses("device", ModelPool, "gpu7")


LINEAR = RoutingConfig("linear", num_groups=8, kept_groups=3)
GATED = replace(LINEAR, value_gate=True, query_conditioned=True)
CASES = {
    "fastv in the decoder, snapkv": ("llava_gqa", "fastv_decoder", GATED, "snapkv", {}),
    "fastv at the embeddings, in chunks": ("llava", "fastv_embeds", LINEAR, "h2o", {"prefill_chunk": 7}),
    "the tower, budgets across layers": ("llava", "visionzip", LINEAR, "prefixkv", {"merge": "weighted"}),
    "mRoPE, cut keys": ("qwen2_5_vl", "visionzip", LINEAR, "ada(snapkv)", {"key_channels": 0.6}),
    "context split, second pass": ("llama", "quest", LINEAR, "kvzip", {}),
    "context split in chunks": ("llama", "quest", GATED, None, {"prefill_chunk": 7}),
    "closed-up positions": ("llama", "none", None, "streaming_llm", {"rerotate": True}),
    "evicting while decoding": ("llama", "none", None, "h2o", {"keep": 8, "unit": "tokens", "every": 2}),
    "output norms": ("qwen2", "none", replace(LINEAR, selector="output_norm"), "critical(h2o)", {"kv_dtype": "int8"}),
}


def answered(family, reducer, routing, eviction, further, protocol="query_aware"):
    torch.manual_seed(1)
    backbone = compress(family, routing, **REDUCERS[reducer]).eval()
    batch, cache = prompts(family, "three", pad_left=True), PackedCache(family.shape.num_layers)
    if is_spread(family.model):
        if backbone.bank is not None:
            backbone.bank.place([next(layer.parameters()).device for layer in family.decoder.layers])
        batch = on_device(batch, family.device)
    method = eviction and build_eviction(eviction, **({"window": 4} if eviction == "snapkv" else {}))
    compression = Compression(method, **{"keep": 0.5 if method else 1.0, **further})
    first = open_prompts(backbone, batch, cache, compression, protocol)
    took = account(backbone, batch, first, cache)
    logits, tokens = [first.logits_BV], [first.logits_BV.argmax(-1)]
    while len(tokens) < 4:
        logits.append(decode(backbone, tokens[-1][:, None], cache))
        tokens.append(logits[-1].argmax(-1))
    if protocol == "query_aware":
        took.append(str(report(backbone, batch, first.plan, cache)))
    return torch.stack(logits).cpu(), torch.stack(tokens).cpu(), [layer.device for layer in cache.layers], took


@sampled(
    ("case", "protocol"),
    [*((case, "query_aware") for case in CASES), ("evicting while decoding", "context_first")],
    every=4,
)
def test_two_devices_answer_as_one(case, protocol):
    name, *parts = CASES[case]
    logits, tokens, _, took = answered(TINY[name].build(), *parts, protocol)
    found, said, places, taken = answered(spread(TINY[name].build()), *parts, protocol)
    assert (found - logits).abs().max() < 5e-5
    assert torch.equal(said, tokens)
    assert taken == took
    near, far = shards()
    assert places == [near, *[far] * (len(places) - 1)]


def test_an_adapter_on_a_spread_backbone(vlm_adapter, monkeypatch):
    """The first of two GPUs does not hold it. LoRA and routers lie where their layers do; transformers generates."""
    given = []

    def load(config, reducer=None, memory=None):
        given.append(memory)
        family = load_family(config, reducer)
        return family if memory is None else spread(family)

    monkeypatch.setattr(pool, "free_memory", lambda: [400_000, 10**9])
    monkeypatch.setattr(pool, "load_family", load)
    picture, asked = Image.new("RGB", (120, 80), "teal"), {"prompt": "is there a 0 ?", "max_new_tokens": 3}
    whole = SubTokenModel.from_pretrained(vlm_adapter, eviction="snapkv", eviction_keep=0.5)
    expected = whole.chat(images=[picture], **asked)
    model = SubTokenModel.from_pretrained(vlm_adapter, eviction="snapkv", eviction_keep=0.5, device_map="auto")
    assert given == [None, {0: 280_000, 1: 700_000_000}]
    assert is_spread(model.backbone.model)
    near, far = shards()
    for layer, block in enumerate(model.backbone.family.decoder.layers):
        place = far if layer else near
        lora = [part for name, part in block.named_parameters() if "lora_" in name]
        assert lora
        assert {part.device for part in (*lora, *model.backbone.bank.selectors[layer].parameters())} == {place}
    assert model.chat(images=[picture], **asked) == expected
    assert str(model.cache_report()) == str(whole.cache_report())
    refuses(r"training needs a backbone on one device.*fsdp2", model.backbone.train)


def test_memory_of_each_gpu():
    config = BackboneConfig(path="llava-hf/llava-1.5-7b-hf", dtype="bfloat16")
    layout = layout_family(config)
    gib = 2**30
    assert spread_memory(layout, config, [24 * gib]) is None  # as before: one GPU has no choice
    assert spread_memory(layout, config, [24 * gib, 8 * gib]) is None  # 13.2 GiB fit on the first
    assert spread_memory(layout, config, [12 * gib] * 2) == {0: int(8.4 * gib), 1: int(8.4 * gib)}
    assert spread_memory(layout, replace(config, quantization="nf4"), [12 * gib] * 2) is None
    refuses(r"take 13.2 GiB, and 2 GPUs have room for 11.2 .70%.*nf4", spread_memory, layout, config, [8 * gib] * 2)
    left = SimpleNamespace(hf_device_map={"model.layers.0": 0, "model.layers.1": "disk", "lm_head": "cpu"})
    refuses(r"2 parts do not fit on the GPUs .first lm_head.*not supported", check_whole, left, "some/model")
    with pytest.raises(ValueError, match="duo_attention's calibration needs a backbone on one device"):
        CALIBRATORS.find("duo_attention")().check(compress(spread(TINY["llama"].build())))
