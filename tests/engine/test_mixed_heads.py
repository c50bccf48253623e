"""Mixed heads: full attention at 1, a masked model at 0, what lies between per head, and a gradient."""

import pytest
import torch

from subtoken_train.engine.mixed_heads import HeadMix, mixed_hidden
from subtoken_train.types import Region
from tests.support.text_families import text_batch, text_family

SAMPLES = [(20, 4, 3), (11, 3, 2), (5, 2, 0)]


@pytest.fixture(scope="module")
def family():
    return text_family(layers=2)


def hidden_of(family, batch, alpha, sinks=2, recent=4):
    visible = batch.regions_BN != Region.PADDING
    mix = HeadMix(alpha, sinks, recent, visible)
    return mixed_hidden(family, family.embed(batch), family.positions(batch), mix), visible


def masked(family, batch, sinks, recent):
    """The model itself, run on one mask for all layers: streaming, written as a loop over places."""
    visible = batch.regions_BN != Region.PADDING
    mask = torch.full((len(visible), 1, visible.shape[1], visible.shape[1]), torch.finfo(torch.float32).min)
    for sample, marks in enumerate(visible):
        rows = marks.nonzero()[:, 0].tolist()
        for i, row in enumerate(rows):
            for j, key in enumerate(rows[: i + 1]):
                if j < sinks or i - j < recent:
                    mask[sample, 0, row, key] = 0
        for row in range(len(marks)):
            mask[sample, 0, row, row] = 0
    out = family.model.model(
        inputs_embeds=family.embed(batch), attention_mask=mask, position_ids=family.positions(batch), use_cache=False
    )
    return out.last_hidden_state


@pytest.mark.parametrize("pad_left", [False, True])
@pytest.mark.parametrize(("alpha", "sinks", "recent"), [(1.0, 2, 4), (0.0, 2, 4), (0.0, 0, 1), (0.0, 3, 1000)])
@torch.no_grad()
def test_the_ends_are_masked_models(family, pad_left, alpha, sinks, recent):
    batch = text_batch(SAMPLES, pad_left)
    hidden, visible = hidden_of(family, batch, torch.full((2, 2), alpha), sinks, recent)
    expected = masked(family, batch, 0, 1000) if alpha == 1 else masked(family, batch, sinks, recent)
    torch.testing.assert_close(hidden[visible], expected[visible], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_head_is_mixed_by_its_own_alpha(family):
    """What the first layer hands to its output projection: query heads 0 and 1 read key-value head 0."""
    batch, heard = text_batch(SAMPLES), []
    hook = family.decoder.layers[0].self_attn.o_proj.register_forward_hook(lambda _, args, out: heard.append(args[0]))
    for row in ([1.0, 1.0], [0.0, 0.0], [0.3, 0.8]):
        hidden_of(family, batch, torch.tensor([row, [1.0, 1.0]]))
    hook.remove()
    full, streaming, mixed = heard
    alpha = torch.tensor([0.3, 0.8]).repeat_interleave(2 * 16)
    torch.testing.assert_close(mixed, alpha * full + (1 - alpha) * streaming)
    assert not torch.allclose(full, streaming)


def test_the_gradient_is_that_of_a_difference(family):
    batch = text_batch(SAMPLES)
    alpha = torch.tensor([[0.4, 0.6], [0.2, 0.9]], requires_grad=True)

    def loss(values):
        hidden, visible = hidden_of(family, batch, values)
        return hidden[visible].double().pow(2).mul(torch.arange(hidden.shape[-1])).mean()

    loss(alpha).backward()
    step = 1e-2
    with torch.no_grad():
        for layer, head in ((0, 1), (1, 0)):
            change = torch.zeros(2, 2).index_put((torch.tensor(layer), torch.tensor(head)), torch.tensor(step))
            slope = (loss(alpha + change) - loss(alpha - change)) / (2 * step)
            assert float(alpha.grad[layer, head]) == pytest.approx(float(slope), rel=0.05)


def test_the_model_s_own_attention_comes_back(family):
    before = family.decoder.config._attn_implementation
    with pytest.raises(RuntimeError):
        hidden_of(family, text_batch(SAMPLES), torch.ones(1, 2, 3))  # no such heads
    assert family.decoder.config._attn_implementation == before
