"""The compressed pass: gradients, plans, layers that are recomputed; a batch is its samples, also of images."""

import re

import pytest
import torch

from subtoken_train.engine.build import Stage2Config, assemble
from subtoken_train.engine.modes import enable_checkpointing
from subtoken_train.families.images import Video
from subtoken_train.families.lora import LoraSettings, add_lora
from subtoken_train.inference.prompt_inputs import batch_from_inputs, inputs_of
from subtoken_train.ledger.kv_budget import KVBudget
from subtoken_train.reducers import build_reducer
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Region
from tests.support.helpers import ALL_GROUPS, REDUCTIONS, compress, gqa_family, make_batch
from tests.support.refusals import refusing
from tests.support.sampling import sampled
from tests.support.text_families import text_batch, text_family
from tests.support.tiny.llava_onevision import noise, onevision_family, onevision_records
from tests.support.tiny.qwen import qwen_batch, qwen_family, qwen_records


def test_text_only_batch_touches_every_router_and_costs_nothing(tiny_family):
    routing = RoutingConfig(num_groups=16, kept_groups=4, value_gate=True, score_prior="value_norm")
    backbone = compress(tiny_family, routing, name="fastv", keep_ratio=0.25)
    result = backbone.run(make_batch([(0, 8), (0, 6)]))
    balance = result.state.mean_balance()
    assert balance.item() == 0
    (backbone.logits(result).sum() + balance).backward()
    for parameter in backbone.bank.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() == 0


def test_routers_that_keep_every_group_leave_no_mask_in_the_plan(tiny_family):
    backbone = compress(tiny_family, RoutingConfig(num_groups=16, kept_groups=16), name="fastv", keep_ratio=0.25)
    assert backbone.active_routing is None
    assert backbone.group_budget == KVBudget()
    result = backbone.run(make_batch([(1, 9)]))
    assert result.state.masks
    assert all(layer.group_mask_BNS is None for layer in result.plan().layers)
    assert backbone.promised_fraction([64]) == 0.25


def test_a_decoder_cut_trains_no_router_below_it(tiny_family):
    add_lora(tiny_family, LoraSettings(dropout=0.0))
    routing = RoutingConfig(num_groups=16, kept_groups=4, value_gate=True)
    backbone = compress(tiny_family, routing, name="fastv", keep_ratio=0.25, stage="decoder")
    trained = {name: parameter for name, parameter in backbone.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[2] for name in trained if name.startswith("bank.")} == {"2", "3"}
    result = backbone.run(make_batch([(1, 9), (2, 7), (0, 12)]))
    backbone.logits(result)[result.rows.visible_BM].logsumexp(-1).sum().backward()
    assert all(parameter.grad is not None for parameter in trained.values())


SETTINGS = {
    "llava": {"name": "fastv", "keep_ratio": 0.25},
    "qwen2_5_vl": {"name": "fastv", "keep_ratio": 0.5},
    "llama": {"name": "quest", "keep_ratio": 0.5, "page_size": 4, "window": 4},
}


@sampled("name", SETTINGS, every=3)
def test_layers_are_recomputed_though_the_backbone_is_in_evaluation_mode(tiny_family, tmp_path, name):
    family = {"llava": lambda: tiny_family, "llama": text_family}.get(name, qwen_family)()
    if name == "llava":
        batch = make_batch([(1, 9), (1, 7)])
    else:
        batch = text_batch([(24, 8, 4), (16, 8, 4)]) if name == "llama" else qwen_batch(family, qwen_records(tmp_path))
    add_lora(family, LoraSettings(rank=4, dropout=0.0))
    backbone = compress(family, RoutingConfig(num_groups=8, kept_groups=2, fill="mean"), **SETTINGS[name])
    assert not family.decoder.layers[0].training
    calls = []
    for layer in family.decoder.layers:
        layer.mlp.register_forward_pre_hook(lambda module, args: calls.append(torch.is_grad_enabled()))

    def gradients():
        calls.clear()
        backbone.zero_grad()
        result = backbone.run(batch)
        choices = dict(result.state.choices)
        loss = backbone.logits(result).logsumexp(-1).mean() + result.state.mean_balance()
        loss.backward()
        assert all(result.state.choices[layer] is first for layer, first in choices.items())  # no recomputed graph
        return {key: p.grad.clone() for key, p in backbone.named_parameters() if p.requires_grad}

    plain, layers = gradients(), family.shape.num_layers
    assert sum(calls) == layers
    enable_checkpointing(family, backbone.bank)
    assert not family.decoder.layers[0].mlp.training
    recomputed = gradients()
    assert sum(calls) == 2 * layers
    assert all(torch.equal(recomputed[key], gradient) for key, gradient in plain.items())


LORA = re.compile(r"model\.language_model\.layers\.(\d+)\.self_attn\.(\w+)\.lora_(A|B)\.(default|output)\.weight")
FIRST, OUTPUT = LoraSettings(rank=4, alpha=8, dropout=0.3), LoraSettings(rank=2, alpha=4, dropout=0.1)


def second_stage(family, output_lora=OUTPUT, routing=RoutingConfig(), dtype=None):  # noqa: B008
    """Stage 2 on a family, with random numbers where stage 1's tensors would be loaded."""
    if dtype is not None:
        family.model.to(dtype)
    torch.manual_seed(0)
    parts, peft_model = assemble(family, FIRST, build_reducer("fastv"), routing, Stage2Config("nowhere", output_lora))
    with torch.no_grad():
        for name, parameter in family.model.named_parameters():
            if "lora_B.default" in name:
                parameter.normal_(std=0.2)
    return parts, peft_model


def lora_of(family, trained):
    """(layer, module, A or B, adapter) of the LoRA tensors that train, or that do not."""
    return {
        LORA.fullmatch(name).groups()
        for name, parameter in family.model.named_parameters()
        if "lora_" in name and parameter.requires_grad == trained
    }


def test_without_an_output_lora_the_routers_alone_train(tiny_family):
    parts, _ = second_stage(tiny_family, output_lora=None)
    assert lora_of(tiny_family, True) == set()
    assert len(lora_of(tiny_family, False)) == 16
    assert {name.split(".")[0] for name, parameter in parts.named_parameters() if parameter.requires_grad} == {"bank"}


def test_the_output_lora_reads_the_routed_attention(tiny_family):
    """y + alpha / rank * B A y on what attention puts out, in training mode without its dropout."""
    second_stage(tiny_family, LoraSettings(rank=2, alpha=6, dropout=0.0))
    adapted = tiny_family.decoder.layers[2].self_attn.o_proj
    torch.nn.init.normal_(adapted.lora_B["output"].weight)
    attended = torch.randn(3, 128)
    update = attended @ adapted.lora_A["output"].weight.T @ adapted.lora_B["output"].weight.T
    assert torch.allclose(adapted.train()(attended), adapted.base_layer(attended) + 3.0 * update, atol=1e-4)


def test_the_frozen_lora_has_no_dropout(tiny_family):
    """Stage 1 is a fixed model: its own dropout of 0.3 is off even in training mode."""
    second_stage(tiny_family)
    attention = tiny_family.decoder.layers[0].self_attn.train()
    hidden = torch.randn(2, 128)
    assert torch.equal(attention.q_proj(hidden), attention.q_proj(hidden))
    assert not torch.equal(attention.o_proj.lora_dropout["output"](hidden), hidden)


test_wrong_settings_are_worded = refusing(
    [
        (None, OUTPUT, "set model.routing, or drop model.stage2"),
        (RoutingConfig(selector="value_norm"), None, "nothing to train: selector 'value_norm'"),
    ],
    lambda routing, output_lora, tiny_family: second_stage(tiny_family, output_lora, routing),
)

KINDS = {
    "llava": (gqa_family, lambda folder: [(1, 9), (2, 7), (0, 12)], lambda family, *given: make_batch(*given)),
    "qwen": (qwen_family, qwen_records, qwen_batch),
    "onevision": (onevision_family, onevision_records, qwen_batch),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def family(kind):
    return KINDS[kind][0]()


@pytest.fixture
def batches(kind, family, tmp_path):
    """A batch of the records in a slice, padded on a side."""
    _, records, batch = KINDS[kind]
    return lambda part=slice(None), pad_left=False: batch(family, records(tmp_path)[part], pad_left)


def hf_logits(family, batch):
    """Transformers' own forward; Qwen's makes its mRoPE ids itself from the token types."""
    visible_BN = (batch.regions_BN != Region.PADDING).long()
    given = {"position_ids": (visible_BN.cumsum(-1) - 1).clamp(min=0), "pixel_values": batch.pixel_values}
    if family.name == "qwen2_5_vl":
        types_BN = (batch.input_ids_BN == family.image_token_id).int()
        given = {"image_grid_thw": batch.image_grid_I3, "mm_token_type_ids": types_BN, **given, "position_ids": None}
    elif family.name == "llava_onevision" and batch.pixel_values is not None:
        given |= family.given_images(batch.pixel_values, batch.image_grid_I3, batch.input_ids_BN)
        given["batch_num_images"] = batch.images_per_sample_B[batch.images_per_sample_B > 0]
    return family.model(batch.input_ids_BN, attention_mask=visible_BN, use_cache=False, **given).logits


@pytest.mark.parametrize("reducer", ["fastv", "visionzip"])
@pytest.mark.parametrize("pad_left", [False, True])
def test_neutral_settings_are_the_backbone_bit_for_bit(family, batches, pad_left, reducer):
    batch = batches(pad_left=pad_left)
    expected = hf_logits(family, batch)
    add_lora(family, LoraSettings(dropout=0.0))
    neutral, real = compress(family, ALL_GROUPS, name=reducer, keep_ratio=1.0), batch.regions_BN != Region.PADDING
    assert torch.equal(neutral.logits(neutral.run(batch))[real], expected[real])


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda r: "-".join(r.values()))
@pytest.mark.parametrize("pad_left", [False, True])
def test_forced_gather_with_everything_kept(kind, family, batches, pad_left, reduction):
    """VisionZip too: without a class token (LLaVA has one) and with nothing to merge it is the identity."""
    if (kind, reduction["name"]) == ("llava", "visionzip"):
        return
    batch = batches(pad_left=pad_left)
    real, backbone = batch.regions_BN != Region.PADDING, compress(family, ALL_GROUPS, keep_ratio=1.0, **reduction)
    result = backbone.run(batch, force_gather=True, pad_left=pad_left)
    assert torch.equal(result.rows.visible_BM, real)
    assert (backbone.logits(result)[real] - hf_logits(family, batch)[real]).abs().max() < 1e-5


@pytest.mark.parametrize("pictures", [1, 2], ids=["video", "video-and-image"])
def test_prompts_with_videos_are_the_backbone(pictures):
    """A video alone bit for bit; beside an image the tower runs once, transformers' twice."""
    onevision, video = onevision_family(), Video(tuple(noise(30, 44, seed) for seed in range(3)))
    given = inputs_of(onevision, "what moves?", [video, noise(20, 30)][:pictures])
    batch = batch_from_inputs(onevision, given["input_ids"], given["attention_mask"].bool(), given, None)
    expected = onevision.model(**given, use_cache=False).logits
    neutral = compress(onevision, ALL_GROUPS, name="fastv", keep_ratio=1.0)
    got = neutral.logits(neutral.run(batch))
    assert torch.equal(got, expected) if pictures == 1 else torch.allclose(got, expected, atol=1e-5)
