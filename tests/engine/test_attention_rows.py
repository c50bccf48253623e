"""One row of attention against the full matrix of transformers' eager attention."""

import pytest
import torch

from subtoken_train.engine import attention_rows as rows_module
from subtoken_train.engine.attention_rows import region_attention, row_attention
from subtoken_train.engine.mixed_heads import HeadMix, mixed_hidden
from subtoken_train.engine.prompt_pass import Rows, protected_rows
from subtoken_train.types import Region
from tests.support.helpers import gqa_family, make_batch, sharpen
from tests.support.sampling import sampled
from tests.support.text_families import text_batch, text_family
from tests.support.tiny.qwen import qwen_batch, qwen_family, qwen_records

MIXED = [(1, 9), (2, 7), (0, 12)]
P, S, V, Q, A = (int(r) for r in (Region.PADDING, Region.SYSTEM, Region.VISUAL, Region.QUERY, Region.ANSWER))
SAMPLES = [(20, 4, 3), (11, 3, 2), (5, 2, 0)]


@pytest.fixture(params=["multi_head", "grouped_query"])
def family(request, tiny_family):
    family = tiny_family if request.param == "multi_head" else gqa_family()
    sharpen(family)
    return family


def full_attention(family, batch):
    """Head-mean attention matrices of all layers, [L, B, N, N], by transformers."""
    family.model.set_attn_implementation("eager")
    visible = batch.regions_BN != Region.PADDING
    rows = {"inputs_embeds": family.embed(batch), "position_ids": family.positions(batch), "use_cache": False}
    output = family.model.model.language_model(**rows, attention_mask=visible.long(), output_attentions=True)
    family.model.set_attn_implementation("sdpa")
    return torch.stack(output.attentions).mean(2)


def attended(read, family, batch, layer, rows):
    """What ``row_attention`` or ``region_attention`` reads in a layer of a batch."""
    visible, positions = batch.regions_BN != Region.PADDING, family.positions(batch)
    below = family.run_layers(family.embed(batch), visible, positions, stop=layer)
    return read(family, layer, below, visible, positions, rows)


@sampled("pad_left", [False, True], every=2)
def test_equals_eager_attention(family, pad_left):
    """For rows at the start, in the middle and at the end of every sample, in every layer."""
    batch = make_batch(MIXED, pad_left)
    full = full_attention(family, batch)
    real = [mask.nonzero().flatten() for mask in batch.regions_BN != Region.PADDING]
    for layer in range(4):
        for share in (0.0, 0.4, 1.0):
            row_B = torch.stack([rows[int(share * (len(rows) - 1))] for rows in real])
            row = attended(row_attention, family, batch, layer, row_B)
            expected = full[layer][torch.arange(3), row_B]
            assert row.dtype == torch.float32
            assert torch.allclose(row, expected, atol=1e-5)
    assert expected.std() > 0.01  # far from uniform, so that a wrong head or position shows


def test_fastv_ranks_by_the_attention_of_the_mrope_decoder(tmp_path):
    qwen = qwen_family()
    batch = qwen_batch(qwen, qwen_records(tmp_path), pad_left=True)
    row_B = torch.tensor([*batch.rank_position_B[:2], batch.regions_BN.shape[1] - 1])
    for layer, full in enumerate(full_attention(qwen, batch)):
        row = attended(row_attention, qwen, batch, layer, row_B)
        torch.testing.assert_close(row, full[torch.arange(3), row_B], rtol=1e-4, atol=1e-5)
    assert (layer, row.std() > 0.01) == (3, True)


@sampled("pad_left", [False, True], every=4)
@sampled("block", [3, 32], every=2)
def test_a_region_is_the_mean_of_its_rows(family, pad_left, block, monkeypatch):
    """Against the full matrix, for regions of different sizes, some of more rows than a block holds."""
    monkeypatch.setattr(rows_module, "ROW_BLOCK", block)
    batch = make_batch(MIXED, pad_left)
    full = full_attention(family, batch)
    region_BN = batch.regions_BN == Region.QUERY
    assert sorted(region_BN.sum(-1).tolist()) == [5, 7, 10]
    for layer in range(4):
        expected = torch.stack([full[layer][i, region_BN[i]].mean(0) for i in range(3)])
        assert torch.allclose(attended(region_attention, family, batch, layer, region_BN), expected, atol=1e-5)


def test_an_empty_region_is_zeros_and_leaves_the_others_alone(family):
    batch = make_batch(MIXED)
    region_BN = batch.regions_BN == Region.QUERY
    whole = attended(region_attention, family, batch, 1, region_BN)
    region_BN[1] = False
    found = attended(region_attention, family, batch, 1, region_BN)
    assert not found[1].any()
    assert torch.allclose(found[[0, 2]], whole[[0, 2]], atol=1e-6)
    assert not attended(region_attention, family, batch, 1, torch.zeros_like(region_BN)).any()


def test_tokens_are_read_before_answers_and_at_the_end():
    batch = make_batch([(1, 6)])
    batch.regions_BN = torch.tensor([[P, S, V, V, A, A, Q, V], [S, V, Q, A, A, P, P, P]])
    assert protected_rows(batch).nonzero().tolist() == [[0, 3], [0, 7], [1, 2], [1, 4]]
    batch.followed = True
    assert protected_rows(batch).nonzero().tolist() == [[0, 3], [1, 2]]


def test_what_follows_stands_where_it_did():
    regions = torch.tensor([[S, V, V, V, V], [P, P, S, V, V]])
    rows = Rows.whole(regions, torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]]))
    keep = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 1, 0, 1]]).bool()
    assert rows.take(keep, pad_left=True)[0].next_position.tolist() == [[5], [3]]
    assert rows.take(keep, pad_left=False, policy="renumber")[0].next_position.tolist() == [[3], [2]]


@pytest.fixture(scope="module")
def text():
    return text_family(layers=2)


def hidden_of(text, batch, alpha, sinks=2, recent=4):
    visible = batch.regions_BN != Region.PADDING
    return mixed_hidden(text, text.embed(batch), text.positions(batch), HeadMix(alpha, sinks, recent, visible)), visible


def masked(text, batch, sinks, recent):
    """The model itself, run on one mask for all layers: streaming, by the places of the rows."""
    visible, place = batch.regions_BN != Region.PADDING, text.positions(batch)
    apart = place[:, :, None] - place[:, None]
    sees = (apart >= 0) & ((place[:, None] < sinks) | (apart < recent)) & visible[:, :, None] & visible[:, None]
    sees |= torch.eye(visible.shape[1]).bool()
    mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min)[:, None]
    out = text.model.model(inputs_embeds=text.embed(batch), attention_mask=mask, position_ids=place, use_cache=False)
    return out.last_hidden_state


@pytest.mark.parametrize("pad_left", [False, True])
@pytest.mark.parametrize(("alpha", "sinks", "recent"), [(1.0, 2, 4), (0.0, 2, 4), (0.0, 0, 1), (0.0, 3, 1000)])
def test_the_ends_are_masked_models(text, pad_left, alpha, sinks, recent):
    batch = text_batch(SAMPLES, pad_left)
    hidden, visible = hidden_of(text, batch, torch.full((2, 2), alpha), sinks, recent)
    expected = masked(text, batch, 0, 1000) if alpha == 1 else masked(text, batch, sinks, recent)
    torch.testing.assert_close(hidden[visible], expected[visible], atol=1e-5, rtol=1e-4)


def test_a_head_is_mixed_by_its_own_alpha(text):
    """What the first layer hands to its output projection: query heads 0 and 1 read key-value head 0."""
    batch, heard = text_batch(SAMPLES), []
    hook = text.decoder.layers[0].self_attn.o_proj.register_forward_hook(lambda _, args, out: heard.append(args[0]))
    for row in ([1.0, 1.0], [0.0, 0.0], [0.3, 0.8]):
        hidden_of(text, batch, torch.tensor([row, [1.0, 1.0]]))
    hook.remove()
    full, streaming, mixed = heard
    alpha = torch.tensor([0.3, 0.8]).repeat_interleave(2 * 16)
    torch.testing.assert_close(mixed, alpha * full + (1 - alpha) * streaming)
    assert not torch.allclose(full, streaming)
