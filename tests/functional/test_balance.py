"""The load-balance loss against loops, and its linearity in the batch."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.functional.masks import fixed_mask, global_mask
from subtoken_train.functional.objective import balance_loss
from subtoken_train.routing.bank import RoutingState
from tests.support.helpers import random_mask, random_scores


@st.composite
def batches(draw, max_batch=4):
    """(logits, hard mask, routed tokens) of one layer, under either budget."""
    batch, length, num_groups = draw(st.integers(2, max_batch)), draw(st.integers(1, 5)), draw(st.integers(1, 6))
    seed = draw(st.integers(0, 10_000))
    logits, routed = 3 * random_scores(seed, batch, length, num_groups), random_mask(seed, batch, length)
    kept = draw(st.integers(1, num_groups))
    hard = fixed_mask(logits, kept) if draw(st.booleans()) else global_mask(logits, kept, routed)
    return logits, hard, routed


def slow_balance(logits_NS, hard_NS, routed_N):
    """One sample's loss, token by token."""
    num_groups = len(logits_NS[0])
    tokens = [n for n in range(len(logits_NS)) if routed_N[n]]
    selections = sum(int(hard_NS[n].sum()) for n in tokens)
    if not selections:
        return 0.0
    loss = 0.0
    for group in range(num_groups):
        share = sum(bool(hard_NS[n, group]) for n in tokens) / selections
        probability = sum(torch.softmax(logits_NS[n].double(), -1)[group].item() for n in tokens) / len(tokens)
        loss += num_groups * share * probability
    return loss


@settings(max_examples=50, deadline=None)
@given(batch=batches())
def test_equals_the_loops(batch):
    losses = balance_loss(*batch)
    expected = [slow_balance(logits, hard, routed) for logits, hard, routed in zip(*batch, strict=True)]
    assert torch.allclose(losses, torch.tensor(expected), atol=1e-5)


def state_of(*layers):
    """What a pass leaves behind where ``layers`` chose by these (logits, hard mask, routed tokens)."""
    routed = layers[0][2]
    nothing = torch.zeros_like(routed)
    places = torch.arange(routed.shape[1]).expand(routed.shape)
    return RoutingState(routed, nothing, places, places[:, 0], choices=dict(enumerate(layers)))


@settings(max_examples=50, deadline=None)
@given(first=batches(), cut=st.integers(0, 4))
def test_layers_are_those_of_a_loop(first, cut):
    """A layer above a cut has fewer rows; it may leave tokens of which a global budget chose no group."""
    second = tuple(part[:, cut:] if cut < part.shape[1] else part for part in first)
    state = state_of(first, second)
    expected = torch.stack([balance_loss(*layer) for layer in (first, second)])
    assert torch.allclose(state.balances(), expected, atol=1e-5)
    assert torch.equal(state.mean_balance(), state.balances().mean())


def test_a_batch_without_routed_tokens_gives_zero_still_connected():
    logits = random_scores(0, 2, 3, 4).requires_grad_()
    state = state_of((logits, fixed_mask(logits.detach(), 1), torch.zeros(2, 3, dtype=torch.bool)))
    loss = state.mean_balance()
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_routed_tokens_of_which_no_group_is_chosen_give_zero():
    """A global budget may leave a token without a group; where a cut leaves only such tokens, no share is left."""
    logits, hard = random_scores(0, 2, 3, 4), torch.zeros(2, 3, 4, dtype=torch.bool)
    routed = torch.ones(2, 3, dtype=torch.bool)
    assert balance_loss(logits, hard, routed).tolist() == [0.0, 0.0]
    assert state_of((logits, hard, routed)).mean_balance().item() == 0.0


def test_a_sample_without_routed_tokens_gives_zero_and_a_zero_gradient():
    logits = random_scores(0, 2, 3, 4).requires_grad_()
    routed = torch.tensor([[False] * 3, [True] * 3])
    losses = balance_loss(logits, fixed_mask(logits.detach(), 1), routed)
    assert losses[0].item() == 0
    losses[0].backward(retain_graph=True)
    assert logits.grad is not None
    assert not logits.grad.any()
    losses[1].backward()
    assert not logits.grad[0].any()
    assert logits.grad[1].any()


def test_computed_in_fp32_from_bf16_logits():
    logits, routed = random_scores(0, 1, 8, 4).bfloat16(), torch.ones(1, 8, dtype=torch.bool)
    loss = balance_loss(logits, fixed_mask(logits, 2), routed)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, balance_loss(logits.float(), fixed_mask(logits, 2), routed))
