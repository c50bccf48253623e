"""LKV's budgets: what fades by a loop, places beside scores, a loss that falls, and settings that no head can meet."""

import pytest
import torch

from subtoken_train.calibrating.heads import BudgetCalibrator, places
from subtoken_train.engine.attention import use_packed_attention
from subtoken_train.engine.mixed_heads import FadingEntries
from subtoken_train.evictions import build_eviction
from subtoken_train.inference.prefill import contexts_of
from subtoken_train.types import Region
from tests.support.helpers import compress
from tests.support.refusals import refusing
from tests.support.text_families import text_batch, text_family


@pytest.fixture
def backbone():
    found = compress(text_family(layers=2)).eval()
    use_packed_attention(found.family.decoder.config)
    return found


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_rows_after_the_context_see_it_as_far_as_it_stays():
    """A loop over query heads and rows; rows of the context and before it see everything up to themselves."""
    query, key, value = drawn(1, 4, 9, 8), drawn(1, 2, 9, 8, seed=1), drawn(1, 2, 9, 8, seed=2)
    context = torch.tensor([[0, 1, 1, 1, 1, 0, 0, 0, 0]]).bool()
    stays = torch.rand(2, 1, 2, 9).log()
    found = FadingEntries(context, stays, torch.ones(1, 9).bool()).attend(1, query, key, value, 0.3)
    for head in range(4):
        for row in range(9):
            logits = [0.3 * float(query[0, head, row] @ key[0, head // 2, place]) for place in range(row + 1)]
            if row > 4:
                logits = [x + float(stays[1, 0, head // 2, n]) * bool(context[0, n]) for n, x in enumerate(logits)]
            expected = torch.tensor(logits).softmax(0) @ value[0, head // 2, : row + 1]
            torch.testing.assert_close(found[0, head, row], expected)


def test_places_are_those_of_the_method_s_scores(backbone):
    batch = text_batch([(20, 4, 0)], seed=3)
    found = places(backbone, batch, build_eviction("knorm"))
    dense = backbone.family.model(contexts_of(batch).input_ids_BN, use_cache=True).past_key_values
    assert found.shape == (2, backbone.family.shape.num_kv_heads, 21)  # its first token is read with it
    for layer in range(2):
        for head in range(found.shape[1]):
            norms = dense.layers[layer].keys[0, head].norm(dim=-1)
            assert found[layer, head].tolist() == norms.argsort(stable=True).argsort().tolist()  # the lowest stay


def test_what_is_learned_loses_less_of_what_it_was_learned_from(backbone):
    calibrator = BudgetCalibrator(samples=60, context_length=60, following=12, keep=0.2, eviction="knorm")
    batches = [text_batch([(60, 2, 0)], seed=seed % 3) for seed in range(60)]
    before = {name: value.clone() for name, value in backbone.model.state_dict().items()}
    found = torch.tensor(calibrator.numbers(backbone, batches).score)
    assert all(torch.equal(value, before[name]) for name, value in backbone.model.state_dict().items())
    assert found.mean() == pytest.approx(1, abs=1e-5)
    assert found.max() > 1.2 * found.min()
    losses = {}
    for name, share in (("equal", torch.ones_like(found)), ("learned", found)):
        prompts = calibrator._prompts(backbone.family, batches[:3])
        with torch.no_grad():
            losses[name] = sum(float(calibrator.loss(backbone, prompt, share, 0.05)) for prompt in prompts)
    assert losses["learned"] < 0.97 * losses["equal"]


def test_a_loss_of_entries_that_all_stay_is_none(backbone):
    calibrator = BudgetCalibrator(context_length=40, following=10, keep=0.5, eviction="knorm")
    (prompt,) = calibrator._prompts(backbone.family, [text_batch([(40, 2, 0)])])
    assert (prompt.regions_BN == Region.CONTEXT).sum() == 31  # the first token is read as context, too
    with torch.no_grad():
        wide = torch.full((2, backbone.family.shape.num_kv_heads), 9.0)
        assert float(calibrator.loss(backbone, prompt, wide, 0.01)) < 1e-6
        assert float(calibrator.loss(backbone, prompt, wide / 20, 0.01)) > 1e-3


test_budgets_that_no_head_can_meet_are_refused = refusing(
    [
        (
            {"keep": 0.001},
            "lkv keep=0.001 must leave a head one at least of the 192 tokens before following=64, and not all",
        ),
        ({"keep": 1.0}, "lkv keep=1 must leave a head one"),
        ({"following": 256}, "of the 0 tokens before following=256"),
        ({"eviction": "tova"}, "lkv divides a budget between heads, and tova keeps one set"),
        ({"eviction": "kvzip", "eviction_options": "chunks=3"}, "unknown setting of kvzip 'chunks'"),
    ],
    lambda settings: BudgetCalibrator(**settings),
)


def test_nothing_to_learn_from_is_refused(backbone):
    with pytest.raises(ValueError, match="none of the prompts has a context to score"):
        BudgetCalibrator(eviction="knorm").numbers(backbone, [text_batch([(20, 4, 0)])])
