"""ExpectedAttention: every golden is a setting; a plain reference; positions of the future; sampled queries."""

import pytest
import torch

from subtoken_train.evictions import build_eviction
from subtoken_train.functional.rotary import Rotation
from tests.support.golden_cases import close, golden_view, load, same_sets
from tests.support.prompt_views import layer_views, rope


def llama_rotation(theta, width):
    """Llama's rotation in its default form, at position ids [B, N]."""

    def rotate(position):
        frequency = theta ** -(torch.arange(0, width, 2) / width)
        angle = (position[..., None].float() * frequency).repeat(1, 1, 2)
        return Rotation(angle.cos(), angle.sin())

    return rotate


@pytest.mark.parametrize(
    "name", ["kvpress_expected_attention", "kvpress_expected_attention_eps", "kvpress_expected_attention_nocov"]
)
def test_golden_press(shared, name):
    """The press scores the sinks above all others, where here they are protected."""
    params, tensors = load(shared, name)
    method = build_eviction(
        "expected_attention",
        future=params["n_future_positions"],
        sinks=params["n_sink"],
        covariance=params["use_covariance"],
        value_norm=params["use_vnorm"],
        epsilon=params["epsilon"],
    )
    batch, _, length, width = tensors["keys"].shape
    rotate = llama_rotation(params["rope_theta"], width)
    position = torch.arange(length).expand(batch, -1)
    assert torch.allclose(rotate(position[:1]).cos_BNr, tensors["cos"][:1], atol=1e-5)
    view = golden_view(
        method, tensors, values="values", position=position, next_position=position[:, -1:] + 1, rotate=rotate
    )
    assert torch.allclose(view.unrotated_queries(), tensors["queries_prerope"], atol=1e-5)
    ours = method.score(view).scores_BhN[..., method.sinks :]
    close(method, f"{name}: scores", ours, tensors["scores"][..., method.sinks :])
    same_sets(method, name, view, tensors["kept_positions"])


def plain_scores(view, sample, rows, method):
    """Scores of one prompt: each future position by itself, and matrices in full."""
    width, kv_heads = view.key_BhNd.shape[-1], view.key_BhNd.shape[1]
    counted, scores = rows[method.sinks :], torch.zeros(kv_heads, len(rows))
    if not counted:
        return scores
    ahead = view.next_position[sample] + torch.arange(method.future)
    turns = [rope(place.view(1, 1)).turn(torch.eye(width)[None, None])[0, 0].T for place in ahead]
    rotation = torch.stack(turns).mean(0)
    turned = rope(view.position[sample : sample + 1]).turn_back(view.query_BHNd[sample : sample + 1])[0, :, counted]
    for head, queries in enumerate(turned.unflatten(0, (kv_heads, -1))):
        keys, share = view.key_BhNd[sample, head, counted], torch.zeros(len(counted))
        for own in queries:
            spread = rotation @ torch.cov(own.T, correction=0).view(width, width) @ rotation.T
            squares = torch.stack([key @ spread @ key for key in keys]) * view.scale**2 / 2 * method.covariance
            share += (keys @ (rotation @ own.mean(0)) * view.scale + squares).softmax(0) / len(queries)
        if method.value_norm:
            share = (share + method.epsilon) * view.value_BhNd[sample, head, counted].norm(dim=-1)
        scores[head, method.sinks :] = share
    return scores


@pytest.mark.parametrize("settings", [{}, {"covariance": False}, {"value_norm": False}, {"epsilon": 0.3, "sinks": 0}])
@pytest.mark.parametrize("pad", ["left", "right"])
def test_equal_to_the_plain_reference(settings, pad):
    """Padding, three lengths (one of sinks only, one with a single entry more), and rows that are no entries."""
    method = build_eviction("expected_attention", future=7, **settings)
    prompts = [[1] + [2] * 14 + [4] * 4, [4] * 5, [4] * 3]
    view = layer_views(prompts, method.needs, pad, layers=1, dropped=[(0, 0.3)])[0]
    found = method.score(view)
    for sample in range(3):
        rows = view.entries_BN[sample].nonzero()[:, 0].tolist()
        expected = plain_scores(view, sample, rows, method)
        assert torch.allclose(found.scores_BhN[sample][:, rows], expected, atol=1e-5)
        assert found.protected_BN[sample, rows].tolist() == [i < method.sinks for i in range(len(rows))]


def test_future_positions_move_on_every_axis():
    """Under mRoPE the ids are [3, B, 1], and a token of text moves all three alike."""
    method = build_eviction("expected_attention", future=3)
    view = layer_views([[4] * 12, [4] * 9], method.needs, "left", layers=1)[0]
    asked = []

    def rotate(position):
        asked.append(position)
        return rope(position[0])

    plain = method.score(view).scores_BhN
    view.position, view.next_position = (each.expand(3, -1, -1) for each in (view.position, view.next_position))
    view.rotate = rotate
    assert torch.equal(method.score(view).scores_BhN, plain)
    assert asked[-1].tolist() == [[[12, 13, 14], [9, 10, 11]]] * 3
