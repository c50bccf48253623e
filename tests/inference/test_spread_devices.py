"""A model whose layers lie on two devices says what it says on one; the devices are pretended ones of the CPU.

Every operation on tensors of two devices would raise (``tests/support/shards.py``).
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from subtoken_train.cache.cache import PackedCache
from subtoken_train.calibrating import CALIBRATORS
from subtoken_train.evictions import build_eviction
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import check_whole, is_spread, layout_family, load_family, spread_memory
from subtoken_train.functional.moving import on_device
from subtoken_train.inference import pool
from subtoken_train.inference.cache_report import account, report
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.model import SubTokenModel
from subtoken_train.inference.prefill import decode, open_prompts
from subtoken_train.routing import RoutingConfig
from tests.support.helpers import compress
from tests.support.sampling import sampled
from tests.support.shards import shards, spread
from tests.support.truth_cells import REDUCERS
from tests.support.truth_models import TINY, prompts

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


@torch.no_grad()
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


@pytest.fixture
def two_gpus(monkeypatch):
    """``auto`` finds two GPUs, of which the first does not hold the model; what they are given is returned."""
    given = []

    def load(config, reducer=None, memory=None):
        given.append(memory)
        family = load_family(config, reducer)
        return family if memory is None else spread(family)

    monkeypatch.setattr(pool, "free_memory", lambda: [400_000, 10**9])
    monkeypatch.setattr(pool, "load_family", load)
    return given


def test_an_adapter_on_a_spread_backbone(vlm_adapter, two_gpus):
    """LoRA and routers lie where their layers do; transformers' own loop generates."""
    picture, asked = Image.new("RGB", (120, 80), "teal"), {"prompt": "is there a 0 ?", "max_new_tokens": 3}
    whole = SubTokenModel.from_pretrained(vlm_adapter, eviction="snapkv", eviction_keep=0.5)
    expected = whole.chat(images=[picture], **asked)
    model = SubTokenModel.from_pretrained(vlm_adapter, eviction="snapkv", eviction_keep=0.5, device_map="auto")
    assert two_gpus == [None, {0: 280_000, 1: 700_000_000}]
    assert is_spread(model.backbone.model)
    near, far = shards()
    for layer, block in enumerate(model.backbone.family.decoder.layers):
        place = far if layer else near
        lora = [part for name, part in block.named_parameters() if "lora_" in name]
        assert lora
        assert {part.device for part in (*lora, *model.backbone.bank.selectors[layer].parameters())} == {place}
    assert model.chat(images=[picture], **asked) == expected
    assert str(model.cache_report()) == str(whole.cache_report())
    with pytest.raises(ValueError, match=r"training needs a backbone on one device.*fsdp2"):
        model.backbone.train()


def test_memory_of_each_gpu():
    config = BackboneConfig(path="llava-hf/llava-1.5-7b-hf", dtype="bfloat16")
    layout = layout_family(config)
    gib = 2**30
    assert spread_memory(layout, config, [24 * gib]) is None  # as before: one GPU has no choice
    assert spread_memory(layout, config, [24 * gib, 8 * gib]) is None  # 13.2 GiB fit on the first
    assert spread_memory(layout, config, [12 * gib] * 2) == {0: int(8.4 * gib), 1: int(8.4 * gib)}
    assert spread_memory(layout, replace(config, quantization="nf4"), [12 * gib] * 2) is None
    with pytest.raises(ValueError, match=r"take 13.2 GiB, and 2 GPUs have room for 11.2 .70%.*nf4"):
        spread_memory(layout, config, [8 * gib] * 2)
    left = SimpleNamespace(hf_device_map={"model.layers.0": 0, "model.layers.1": "disk", "lm_head": "cpu"})
    with pytest.raises(ValueError, match=r"2 parts do not fit on the GPUs .first lm_head.*not supported"):
        check_whole(left, "some/model")
    with pytest.raises(ValueError, match="duo_attention's calibration needs a backbone on one device"):
        CALIBRATORS.find("duo_attention")().check(compress(spread(TINY["llama"].build())))
