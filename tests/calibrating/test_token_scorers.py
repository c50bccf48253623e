"""KVzap's nets beside plain regressions; what is held out; targets that are kept, found again, damaged."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from subtoken_train.cache.cache import PackedCache
from subtoken_train.calibrating import token_scorers
from subtoken_train.calibrating.base import calibration_prompts
from subtoken_train.engine.attention import use_packed_attention
from subtoken_train.evictions.kvzip import KVzip, foretold
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.eviction_pass import EvictionPass
from subtoken_train.inference.layer_packer import LayerPacker
from subtoken_train.inference.prefill import contexts_of, run_whole
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Region
from tests.support.helpers import compress, random_scores
from tests.support.places import ROOT
from tests.support.refusals import refuses
from tests.support.text_families import text_batch, text_family


@pytest.fixture(scope="module")
def shallow():
    shallow = compress(text_family(layers=2)).eval()
    use_packed_attention(shallow.family.decoder.config)
    return shallow


def plain_ridge(inputs, targets, ridge):
    """Weights and bias by numpy's least squares: standardised inputs, and a row of the penalty for each of them."""
    x, y = inputs.double().numpy(), targets.double().numpy()
    mean, deviation = x.mean(0), x.std(0)
    below = np.sqrt(ridge * len(x)) * np.eye(x.shape[1])
    rows = np.vstack([(x - mean) / deviation, below]), np.vstack([y - y.mean(0), np.zeros((x.shape[1], y.shape[1]))])
    weight = np.linalg.lstsq(*rows, rcond=None)[0] / deviation[:, None]
    return weight.T, y.mean(0) - mean @ weight


@pytest.mark.parametrize("ridge", [0.0, 0.1, 3.0])
def test_the_closed_form_is_least_squares(ridge):
    """Whatever the parts that entries come in, with inputs of unlike sizes and means."""
    scale, shift = torch.tensor([1.0, 100.0, 0.01, 1.0, 3.0, 1.0]), torch.tensor([0, 1000, 0, -5, 0, 0])
    inputs = random_scores(0, 80, 6) * scale + shift
    targets = inputs @ random_scores(1, 6, 2) + random_scores(2, 80, 2)
    weight, bias = plain_ridge(inputs, targets, ridge)
    for parts in ([80], [1, 30, 0, 49]):
        first, *others = map(token_scorers.Moments.of, inputs.split(parts), targets.split(parts))
        found, offset = sum(others, first).ridge_map(ridge)
        assert np.allclose(found.numpy(), weight, rtol=1e-4, atol=1e-6 * np.abs(weight).max())
        assert np.allclose(offset.numpy(), bias, rtol=1e-3, atol=1e-3)


def test_fewer_entries_than_inputs_and_one_that_never_changes():
    inputs = random_scores(0, 5, 9)
    inputs[:, 4] = 2.0
    assert all(
        bool(part.isfinite().all()) for part in token_scorers.Moments.of(inputs, random_scores(1, 5, 1)).ridge_map(0.1)
    )


def test_examples_are_what_layers_read_and_the_logs_of_kvzip_s_scores(shallow):
    """Of the contexts alone: padding, the question and a prompt without a context count for nothing."""
    family, batch = shallow.family, text_batch([(20, 4, 0), (0, 5, 0), (9, 3, 0)], pad_left=True, seed=4)
    contexts = contexts_of(batch)
    found = token_scorers.kvzip_examples(shallow, contexts)
    inputs = {}
    hooks = [
        family.decoder.layers[layer].self_attn.register_forward_pre_hook(
            lambda module, _, kwargs, layer=layer: inputs.update({layer: inputs.get(layer, kwargs["hidden_states"])}),
            with_kwargs=True,
        )
        for layer in range(2)
    ]
    compression = Compression(KVzip(), 0.5)
    eviction = EvictionPass(compression, family, contexts)
    run_whole(shallow, contexts, eviction, LayerPacker(shallow, compression, PackedCache(2), 20))
    for hook in hooks:
        hook.remove()
    marks = contexts.regions_BN == Region.CONTEXT
    assert marks.sum().item() == 29
    for layer, (x, y) in enumerate(found):
        assert torch.equal(x, inputs[layer][marks])
        scores = eviction.scores[layer].scores_BhN.transpose(1, 2)[marks]
        assert torch.allclose(y, scores.log().clamp(min=token_scorers.FAINTEST), atol=1e-6)
        assert y.dtype == torch.float32


def test_a_calibrated_method_ranks_as_kvzip_does_what_it_learned_from(shallow):
    batches = [contexts_of(text_batch([(40, 2, 0), (30, 2, 0)], pad_left=True, seed=seed)) for seed in range(4)]
    nets = token_scorers.ScorerCalibrator(ridge=1e-3).numbers(shallow, batches).nets
    with torch.no_grad():
        examples = [token_scorers.kvzip_examples(shallow, batch) for batch in batches]
    for layer, net in enumerate(nets):
        inputs, targets = (torch.cat([each[layer][part] for each in examples]) for part in (0, 1))
        found = foretold(net, inputs[None])[0].T
        assert float(torch.corrcoef(torch.stack([found.flatten(), targets.flatten()]))[0, 1]) > 0.6  # random models


def test_any_text_serves(shallow, tmp_path):
    text = ROOT / "data/samples/long.txt"
    source = calibration_prompts(shallow.family, str(text), 3, 2, 50, 0, False, any_text=True)
    batches = list(source.batches)
    assert (source.name, len(source.sha256)) == ("long.txt", 64)
    assert [len(batch.record_ids) for batch in batches] == [2, 1]
    ids = shallow.family.tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    contexts = torch.cat([contexts_of(batch).input_ids_BN for batch in batches])
    assert contexts.shape == (3, 50)
    body = contexts[:, 1:] if shallow.family.tokenizer.bos_token_id is not None else contexts
    assert body.flatten().tolist() == ids[: body.numel()]
    with pytest.raises(ValueError, match="is calibrated on 'recall'; leave it out"):
        calibration_prompts(shallow.family, str(text), 3, 2, 50, 0, False)
    with pytest.raises(ValueError, match=r"data 'nowhere.txt' is neither 'recall' nor a file; check the path"):
        calibration_prompts(shallow.family, "nowhere.txt", 3, 2, 50, 0, False, any_text=True)
    short = tmp_path / "short.txt"
    short.write_text("two words")
    with pytest.raises(ValueError, match="fewer than one block"):
        list(calibration_prompts(shallow.family, str(short), 3, 2, 50, 0, False, any_text=True).batches)


def test_routers_are_refused():
    family = text_family(layers=2)
    with pytest.raises(ValueError, match="kvzap is calibrated on whole caches; use the backbone"):
        token_scorers.ScorerCalibrator().check(compress(family, RoutingConfig("linear", num_groups=8, kept_groups=3)))


def test_two_layers_learn_what_one_cannot_and_keep_the_epoch_that_errs_least():
    """Targets of unlike sizes that no map foretells; then noise, which later epochs foretell less than early ones."""
    inputs = random_scores(0, 600, 4) * torch.tensor([1.0, 50.0, 0.1, 1.0]) + torch.tensor([0.0, 300.0, 0.0, -2.0])
    plain = torch.stack([(inputs[:, 0] * inputs[:, 3]), 100 + 30 * inputs[:, 0].abs()], 1)
    held = (inputs[500:], plain[500:])
    net = token_scorers.two_layers((inputs[:500], plain[:500]), held, 32, 0, 500)
    weight, bias = plain_ridge(inputs[:500], plain[:500], 1e-6)
    by_map = torch.tensor(held[0].double().numpy() @ weight.T + bias)

    def error(found):
        return ((found - held[1]) / held[1].std(0)).square().mean().item()

    assert error(foretold(net, held[0][None])[0].T) < 0.5 * error(by_map)
    noise, other = (inputs[:60], random_scores(5, 60, 2)), (inputs[60:90], random_scores(6, 30, 2))
    early, late = (
        F.mse_loss(foretold(token_scorers.two_layers(noise, watched, 32, 0, 80), other[0][None])[0].T, other[1]).item()
        for watched in (other, noise)
    )
    assert early < 0.9 * late  # the last epochs learn the noise by heart


def test_two_layers_are_made_of_what_is_not_held_out(shallow):
    contexts = [contexts_of(text_batch([(30, 2, 0)], seed=seed)) for seed in range(token_scorers.HELD_OUT + 2)]
    calibrator = token_scorers.ScorerCalibrator(hidden=8)
    found = calibrator.numbers(shallow, contexts)
    assert (found.hidden, found.heads) == (8, shallow.family.shape.num_kv_heads)
    with torch.no_grad():
        examples = [token_scorers.kvzip_examples(shallow, each) for each in contexts]
    for layer, net in enumerate(found.nets):
        parts = [[], []]
        for place, each in enumerate(examples):
            parts[place in (0, token_scorers.HELD_OUT)].append(each[layer])
        learned, held = (tuple(torch.cat(part) for part in zip(*some, strict=True)) for some in parts)
        for ours, expected in zip(net, token_scorers.two_layers(learned, held, 8, 0), strict=True):
            assert torch.allclose(ours, expected, atol=1e-6)
    refuses("needs two batches of prompts at least", calibrator.numbers, shallow, contexts[:1])


def test_a_gate_learns_scores_and_is_made_of_all_examples(shallow, monkeypatch):
    """As the release's own, of as many queries as a head has; what one map makes of the inputs is not enough here."""
    inputs, other = random_scores(0, 500, 6), random_scores(1, 100, 6)
    scores = [
        torch.stack([(x[:, 0] * x[:, 1]).sigmoid(), x[:, 2].abs() / 4], 1).clamp(1e-3, 1) for x in (inputs, other)
    ]
    monkeypatch.setattr(token_scorers, "STEPS", 500)
    net = token_scorers.gate(inputs, scores[0].log(), 3, 4, 0)
    assert F.mse_loss(foretold(net, other[None])[0].T.exp(), scores[1]) < 0.25 * scores[1].var(0).mean()
    monkeypatch.setattr(token_scorers, "STEPS", 3)
    contexts = [contexts_of(text_batch([(30, 2, 0)], seed=seed)) for seed in range(2)]
    found = token_scorers.ScorerCalibrator(sinks=4).numbers(shallow, contexts)
    heads = shallow.family.decoder.config.num_attention_heads
    assert (found.sinks, found.heads, found.hidden) == (4, shallow.family.shape.num_kv_heads, 16 * heads)
    with torch.no_grad():
        examples = [token_scorers.kvzip_examples(shallow, each) for each in contexts]
    for layer, own in enumerate(found.nets):
        both = token_scorers.layer_examples(examples, layer, torch.device("cpu"))
        assert all(map(partial(torch.allclose, atol=1e-6), own, token_scorers.gate(*both, heads // found.heads, 4, 0)))
    refuses("set one of them", token_scorers.ScorerCalibrator(sinks=4, hidden=8).numbers, shallow, contexts)


def test_targets_are_made_once_for_a_model_a_text_and_a_draw(shallow, tmp_path, monkeypatch):
    contexts = [contexts_of(text_batch([(30, 2, 0), (20, 2, 0)], seed=seed)) for seed in range(3)]
    expected, runs = token_scorers.ScorerCalibrator(positions=12).numbers(shallow, contexts), []
    made = token_scorers.kvzip_examples

    def counted(*states):
        runs.append(1)
        return made(*states)

    monkeypatch.setattr(token_scorers, "kvzip_examples", counted)
    own = token_scorers.ScorerCalibrator(positions=12, targets=str(tmp_path / "kept"))
    begun = own.examples(shallow, contexts)
    assert [len(x) for x, _ in next(begun)] == [12, 12]
    begun.close()  # as where the process is killed after the first
    for count in (3, 3):
        assert own.numbers(shallow, contexts) == expected
        assert len(runs) == count
    assert len(list((tmp_path / "kept").iterdir())) == 3
    token_scorers.ScorerCalibrator(positions=11, targets=own.targets).numbers(shallow, contexts)
    own.numbers(shallow, [contexts_of(text_batch([(30, 2, 0)], seed=9))])
    assert len(runs) == 7
    with torch.no_grad():
        next(shallow.family.decoder.layers[1].self_attn.parameters()).mul_(1.5)
    assert own.numbers(shallow, contexts) != expected
    assert len(runs) == 10


def test_a_damaged_file_of_targets_is_named(shallow, tmp_path):
    own = token_scorers.ScorerCalibrator(targets=str(tmp_path))
    contexts = [contexts_of(text_batch([(30, 2, 0)], seed=1))]
    own.numbers(shallow, contexts)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    for bad in (b"", whole[:-1], whole[:90] + bytes([whole[90] ^ 1]) + whole[91:]):
        file.write_bytes(bad)
        refuses(rf"{file.name} is damaged: .*; remove it, and it is made again", own.numbers, shallow, contexts)
