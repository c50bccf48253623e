"""Gates with a delay (DMS): what rows see beside plain loops, in training, prefill, chunks and decoding; refusals."""

import math

import pytest
import torch
from transformers import AttentionInterface

from subtoken_train import SubTokenModel
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evictions import build_eviction
from subtoken_train.forks import undoing
from subtoken_train.functional.causal_attention import Seen, causal_attention
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.prefill import decode
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.bank import OPEN
from subtoken_train.types import Region
from tests.support.helpers import compress, opened, random_scores
from tests.support.refusals import refuses, refusing
from tests.support.text_families import text_batch, text_family

DELAY = 3


def settings(**changed):
    own = {"num_groups": 1, "kept_groups": 1, "budget": "delayed", "byte_share": 0.4, "window": DELAY}
    return RoutingConfig(**{**own, **changed})


def gated(kind="llama", **changed) -> CompressedBackbone:
    """A tiny model whose drawn gates close for about half of the entries."""
    backbone = compress(text_family(kind), settings(**changed), name="none")
    torch.manual_seed(3)
    for parameter in backbone.bank.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    for selector in backbone.bank.selectors:
        selector.token.bias.data.fill_(-OPEN)
    return backbone.eval()


def loops(query, key, value, gate_hN, late_NN, scale):
    """Attention of one sample by its whole matrix, [H, N, d]; ``late_NN``: where ``gate_hN`` joins in."""
    key, value, gate_HN = (each.repeat_interleave(len(query) // len(key), 0) for each in (key, value, gate_hN))
    logits = query @ key.mT * scale + torch.where(late_NN, gate_HN[:, None], 0.0)
    return logits.masked_fill(torch.ones(late_NN.shape).triu(1).bool(), -math.inf).softmax(-1) @ value


def later_than(length, delay):
    places = torch.arange(length)
    return places[:, None] - places > delay


@torch.no_grad()
def truth(backbone, ids, gates_N, late_NN):
    """Logits [N, V] of a whole recompute by plain loops; ``gates_N`` marks the entries whose gates may close."""
    bank, decoder, family = backbone.bank, backbone.family.decoder, backbone.family
    read, closed = {}, []

    def attention(module, query, key, value, attention_mask, scaling=None, **_):
        selector = bank.selectors[module.layer_idx].token
        gone_hN = ((read[module.layer_idx] @ selector.weight.T + selector.bias + OPEN)[0].T < 0) & gates_N
        closed.append(gone_hN)
        gate_hN = torch.where(gone_hN, -math.inf, 0.0)
        return loops(query[0], key[0], value[0], gate_hN, late_NN, scaling).transpose(0, 1)[None], None

    AttentionInterface.register("plain_loops", attention)
    hooks = []
    for layer in range(family.shape.num_layers):
        note = lambda module, args, layer=layer: read.__setitem__(layer, args[0])  # noqa: E731
        hooks.append(family.projection(layer, "v").module.register_forward_pre_hook(note))
    before = decoder.config._attn_implementation
    with undoing(lambda: setattr(decoder.config, "_attn_implementation", before)):
        decoder.config._attn_implementation = "plain_loops"
        logits = family.model(input_ids=ids[None], use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    assert 0.1 < torch.stack(closed)[..., gates_N].float().mean() < 0.9
    return logits


@pytest.mark.parametrize("training", [False, True])
def test_attention_beside_loops(training):
    """Closed gates and soft ones, fewer rows than places; the gates' gradient is that of finite differences."""
    query, key, value = (random_scores(i, 2, heads, 9, 4).double() for i, heads in enumerate((4, 2, 2)))
    gate = -random_scores(7, 2, 2, 9).double().exp()
    if not training:
        gate = torch.where(gate < gate.median(), -math.inf, 0.0)
    for start in (0, 4):
        found = causal_attention(query[:, :, start:], key, value, Seen(gate_BhK=gate, delay=2), 0.5, 3)
        for sample in range(2):
            wanted = loops(query[sample], key[sample], value[sample], gate[sample], later_than(9, 2), 0.5)
            torch.testing.assert_close(found[sample], wanted[:, start:].double(), rtol=1e-5, atol=1e-5)
    if training:
        gate.requires_grad_()
        run = lambda each: (  # noqa: E731
            causal_attention(query, key, value, Seen(gate_BhK=each, delay=2), 0.5, 4).square().sum()
        )
        assert torch.autograd.gradcheck(run, gate)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("protocol", ["query_aware", "context_first"])
@pytest.mark.parametrize(("chunk", "every"), [(None, None), (7, None), (None, 1), (7, 1)])
def test_packed_is_the_truth(kind, protocol, chunk, every):
    """Two prompts of unlike lengths; rows of heads keep unlike numbers, in the prompt and after."""
    backbone, batch, steps = gated(kind), text_batch([(24, 6, 0), (16, 4, 0)], True), 5
    first, cache = opened(backbone, batch, Compression(prefill_chunk=chunk, every=every), protocol)
    logits, tokens = [first.logits_BV], []
    for _ in range(steps):
        tokens.append(logits[-1].argmax(-1))
        logits.append(decode(backbone, tokens[-1][:, None], cache))
    for sample in range(2):
        real = batch.regions_BN[sample] != Region.PADDING
        ids = torch.cat([batch.input_ids_BN[sample][real], torch.stack(tokens, 1)[sample]])
        gates = torch.zeros(len(ids), dtype=torch.bool)
        gates[: int(real.sum())] = batch.regions_BN[sample][real] == Region.CONTEXT
        gates[int(real.sum()) :] = every is not None
        late, (first, last) = later_than(len(ids), DELAY), (int(real.sum()), int(real.sum()) + (every is not None))
        if protocol == "context_first":  # the question and the token after it read what was stored of the context
            first = int((batch.regions_BN[sample][real] == Region.CONTEXT).nonzero().max()) + 1
        last = last if every else len(ids)
        late[first:last] = torch.arange(len(ids)) < first - DELAY
        wanted = truth(backbone, ids, gates, late)[-len(logits) :]
        torch.testing.assert_close(torch.stack(logits, 1)[sample], wanted, rtol=1e-4, atol=1e-4)


def test_training_sees_soft_gates_and_learns_them():
    """Noise differs by step; a closed gate has a gradient; the share of closed ones is what the penalty reads."""
    backbone = gated()
    backbone.train()
    backbone.bank.requires_grad_(True)
    batch = text_batch([(24, 6, 5), (16, 4, 7)])
    torch.manual_seed(0)
    first = backbone.run(batch)
    closed = torch.stack(list(first.state.closed.values()))
    assert closed.shape == (backbone.family.shape.num_layers,)
    assert ((closed > 0.2) & (closed < 0.8)).all()
    first.hidden_BMD.square().sum().backward()
    for selector in backbone.bank.selectors:
        assert selector.token.weight.grad.abs().max() > 0
    assert not torch.equal(backbone.run(batch).hidden_BMD, first.hidden_BMD)
    torch.manual_seed(0)
    torch.testing.assert_close(backbone.run(batch).hidden_BMD, first.hidden_BMD)


def test_open_gates_are_the_backbone():
    """As training starts, nothing has gone; a delay as long as the prompt hides nothing either."""
    family, batch = text_family(), text_batch([(24, 6, 0), (16, 4, 0)])
    real = batch.regions_BN != Region.PADDING
    plain = compress(family, None, name="none").eval().run(batch).hidden_BMD[real]
    torch.testing.assert_close(compress(family, settings(), name="none").eval().run(batch).hidden_BMD[real], plain)
    torch.testing.assert_close(gated(window=40).run(batch).hidden_BMD[real], plain)


def test_the_target_grows_with_entries_per_kept_one():
    config = settings(byte_share=0.125)
    assert [1 / (1 - config.closed_target(progress)) for progress in (0, 0.5, 1, 2)] == [1, 4.5, 8, 8]


test_settings_that_make_no_gates = refusing(
    [
        ({"num_groups": 4, "kept_groups": 2}, "whole entries, not num_groups=4 and kept_groups=2: set both to 1"),
        ({"sinks": 2}, "no use for sinks: leave it out"),
        ({"value_gate": True}, "no use for value_gate"),
        ({"selector": "value_norm"}, "not selector 'value_norm': use 'linear' or 'mlp'"),
        ({"byte_share": 0.0}, "byte_share"),
    ],
    lambda changed: compress(text_family(), settings(**changed), name="none"),
)


def test_a_delay_that_no_budget_holds():
    shape = text_family().shape
    settings().check_tokens(shape, 30)
    refuses("window 30, is no shorter than the context of 30 tokens", settings(window=30).check_tokens, shape, 30)
    with pytest.raises(ValueError, match=r"window 13, holds more entries .* than byte_share 0.4 of 30 .* 12"):
        settings(window=13).check_tokens(shape, 30)


def test_what_gates_do_not_go_with():
    refuses("whole prompts: use reducer none", compress, text_family(), settings(), name="quest", keep_ratio=0.5)
    refuses("use a model without windows", lambda: compress(text_family("qwen2_window"), settings(), name="none"))
    with pytest.raises(ValueError, match="gates say already what stays, and so does eviction 'knorm'"):
        SubTokenModel.around(gated(), Compression(build_eviction("knorm"), 0.5))
