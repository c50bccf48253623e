"""Reducers and routers on Qwen2.5-VL: kept rows keep their mRoPE ids."""

from __future__ import annotations

import pytest
import torch

from subtoken_train.engine.attention_rows import row_attention
from subtoken_train.engine.modes import enable_checkpointing
from subtoken_train.families.lora import LoraSettings, add_lora
from subtoken_train.reducers import build_reducer
from subtoken_train.types import Region
from tests.support.helpers import REDUCTIONS, ROUTED, compress, unread
from tests.support.tiny.qwen import TOKENS, qwen_batch, qwen_family, qwen_records


@pytest.fixture
def family():
    return qwen_family()


@pytest.fixture
def records(tmp_path):
    return qwen_records(tmp_path)


@pytest.mark.parametrize("pad_left", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda r: "-".join(r.values()))
@torch.no_grad()
def test_kept_rows_keep_their_own_ids_and_decoding_goes_on_after_them(family, records, reduction, pad_left):
    batch = qwen_batch(family, records, pad_left)
    rows = compress(family, keep_ratio=0.25, **reduction).run(batch, pad_left=pad_left).rows
    before = family.positions(batch)
    own = before.gather(-1, rows.index_BM.expand(3, -1, -1))
    assert torch.equal(rows.position[:, rows.visible_BM], own[:, rows.visible_BM])
    assert torch.equal(rows.next_position[..., 0], (before.amax((0, 2)) + 1).expand(3, -1))


@torch.no_grad()
def test_visionzip_is_what_plain_transformers_would_make_of_the_same_rows(family, records):
    batch = qwen_batch(family, records[:1])
    states = family.visual_states(batch, "received")
    merged = build_reducer("visionzip", 0.5).merge(states, unread(states))
    assert len(merged.tokens[0]) == TOKENS[0] // 2
    keep = batch.regions_BN[0] != Region.VISUAL
    keep[batch.regions_BN[0] == Region.VISUAL] = merged.slots[0]
    embeds = family.model.get_input_embeddings()(batch.input_ids_BN)
    embeds[0, keep & (batch.regions_BN[0] == Region.VISUAL)] = merged.tokens[0]
    position = family.positions(batch)[..., keep]
    ones = torch.ones(1, int(keep.sum()), dtype=torch.long)
    state = family.decoder(inputs_embeds=embeds[:, keep], position_ids=position, attention_mask=ones)
    backbone = compress(family, name="visionzip", keep_ratio=0.5)
    expected = family.model.lm_head(state.last_hidden_state)
    torch.testing.assert_close(backbone.logits(backbone.run(batch)), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_fastv_ranks_by_the_attention_of_the_mrope_decoder(family, records):
    batch = qwen_batch(family, records, pad_left=True)
    visible, positions = batch.regions_BN != Region.PADDING, family.positions(batch)
    family.model.set_attn_implementation("eager")
    full = family.decoder(
        inputs_embeds=family.embed(batch),
        attention_mask=visible.long(),
        position_ids=positions,
        output_attentions=True,
        use_cache=False,
    ).attentions
    family.model.set_attn_implementation("sdpa")
    row_B = torch.tensor([batch.rank_position_B[0], batch.rank_position_B[1], visible.shape[1] - 1])
    for layer in range(4):
        below = family.run_layers(family.embed(batch), visible, positions, stop=layer)
        row = row_attention(family, layer, below, visible, positions, row_B)
        expected = full[layer].mean(1)[torch.arange(3), row_B]
        torch.testing.assert_close(row, expected, rtol=1e-4, atol=1e-5)
    assert row.std() > 0.01


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda r: "-".join(r.values()))
def test_checkpointing_gives_the_same_gradients_to_every_adapter(family, records, reduction):
    add_lora(family, LoraSettings(dropout=0.0))
    backbone = compress(family, ROUTED, keep_ratio=0.5, **reduction)
    backbone.train()
    batch, grads = qwen_batch(family, records), []
    for checkpointing in (False, True):
        if checkpointing:
            enable_checkpointing(family, backbone.bank)
        backbone.zero_grad()
        result = backbone.run(batch)
        (backbone.logits(result).pow(2).mean() + result.state.mean_balance()).backward()
        grads.append({name: p.grad.clone() for name, p in backbone.named_parameters() if p.grad is not None})
    routed_layers = 4 - backbone.cut_layer
    assert len(grads[0]) == 4 * 2 * 2 + 2 * routed_layers  # LoRA's A and B on q and v, routers' weight and bias
    assert all(grad.abs().sum() > 0 for name, grad in grads[0].items() if "lora_A" not in name)
    assert grads[0].keys() == grads[1].keys()
    for name, plain in grads[0].items():
        torch.testing.assert_close(plain, grads[1][name], rtol=1e-5, atol=1e-6)
