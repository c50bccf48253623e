"""KVzap's calibration: ridge regression and nets against plain references, KVzip's scores as targets, its texts."""

import numpy as np
import pytest
import torch

from subtoken_train.cache.cache import PackedCache
from subtoken_train.calibrating.base import calibration_prompts
from subtoken_train.calibrating.token_scorers import (
    FAINTEST,
    NetFit,
    NotingKVzip,
    RidgeFit,
    ScorerCalibrator,
    kvzip_examples,
    output_lengths,
)
from subtoken_train.engine.attention import use_packed_attention
from subtoken_train.evictions.kvzip import KVzip, foretold
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.eviction_pass import EvictionPass
from subtoken_train.inference.layer_packer import LayerPacker
from subtoken_train.inference.prefill import contexts_of, run_whole
from subtoken_train.routing import RoutingConfig
from subtoken_train.types import Region
from tests.support.helpers import compress
from tests.support.places import ROOT
from tests.support.text_families import text_batch, text_family

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def backbone():
    backbone = compress(text_family(layers=2)).eval()
    use_packed_attention(backbone.family.decoder.config)
    return backbone


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def plain_ridge(inputs, targets, ridge):
    """Weights and bias by numpy's least squares: standardised inputs, and a row of the penalty for each of them."""
    x, y = inputs.double().numpy(), targets.double().numpy()
    mean, deviation = x.mean(0), x.std(0)
    above = (x - mean) / deviation
    below = np.sqrt(ridge * len(x)) * np.eye(x.shape[1])
    solved = np.linalg.lstsq(
        np.vstack([above, below]), np.vstack([y - y.mean(0), np.zeros((x.shape[1], y.shape[1]))]), rcond=None
    )[0]
    weight = solved / deviation[:, None]
    return weight.T, y.mean(0) - mean @ weight


@pytest.mark.parametrize("ridge", [0.0, 0.1, 3.0])
def test_the_closed_form_is_least_squares(ridge):
    """Whatever the parts that entries come in, with inputs of unlike sizes and means."""
    inputs = drawn(80, 6) * torch.tensor([1.0, 100.0, 0.01, 1.0, 3.0, 1.0]) + torch.tensor([0, 1000, 0, -5, 0, 0])
    targets = inputs @ drawn(6, 2, seed=1) + drawn(80, 2, seed=2)
    weight, bias = plain_ridge(inputs, targets, ridge)
    for parts in ([80], [1, 30, 0, 49]):
        fit = RidgeFit(ridge)
        for x, y in zip(inputs.split(parts), targets.split(parts), strict=True):
            fit.add(3, x, y)
            fit.add(5, x, y * 2)
        (found, offset), (twice, _) = fit.nets()
        assert np.allclose(found.numpy(), weight, rtol=1e-4, atol=1e-6 * np.abs(weight).max())
        assert np.allclose(offset.numpy(), bias, rtol=1e-3, atol=1e-3)
        assert torch.allclose(twice, found * 2, rtol=1e-4)


def test_fewer_entries_than_inputs_and_one_that_never_changes():
    inputs = drawn(5, 9)
    inputs[:, 4] = 2.0
    fit = RidgeFit(0.1)
    fit.add(0, inputs, drawn(5, 1, seed=1))
    weight, bias = fit.nets()[0]
    assert weight.isfinite().all()
    assert bias.isfinite().all()
    assert RidgeFit(0.1).nets() == []


def test_a_net_learns_what_a_map_cannot():
    """A bend in one input; the same net for the same seed, standardisation undone."""
    inputs = drawn(600, 5) * torch.tensor([1.0, 30.0, 1.0, 1.0, 0.1]) + 7
    targets = torch.stack([(inputs[:, 0] - 7).abs() * 4 - 20, inputs[:, 1]], 1)
    settings = ScorerCalibrator(hidden=16, positions=600, epochs=300)
    nets = []
    for _ in range(2):
        seen = []
        fit = NetFit(settings, CPU)
        fit.add(0, inputs, targets)
        fit.add(1, inputs, targets)
        nets.append(fit.nets(lambda done, total, seen=seen: seen.append((done, total)))[0])
        assert seen == [(1, 2), (2, 2)]
    assert all(map(torch.equal, *nets))
    left = (foretold(nets[0], inputs[None])[0].T - targets).pow(2).mean(0) / targets.var(0)
    assert float(left.max()) < 0.1
    line = RidgeFit(0.0)
    line.add(0, inputs, targets)
    assert float((foretold(line.nets()[0], inputs[None])[0].T - targets).pow(2).mean(0)[0] / targets.var(0)[0]) > 0.9


def test_positions_are_drawn_of_every_context():
    fit = NetFit(ScorerCalibrator(hidden=4, positions=3), CPU)
    for size in (10, 2, 0):
        fit.add(0, torch.arange(size)[:, None].float(), torch.zeros(size, 1))
    assert [len(set(inputs[:, 0].tolist())) for inputs, _ in fit.examples[0]] == [3, 2]


@torch.no_grad()
def test_examples_are_what_layers_read_and_the_logs_of_kvzip_s_scores(backbone):
    """Of the contexts alone: padding, the question and a prompt without a context count for nothing."""
    family, batch = backbone.family, text_batch([(20, 4, 0), (0, 5, 0), (9, 3, 0)], pad_left=True, seed=4)
    contexts = contexts_of(batch)
    found = kvzip_examples(backbone, contexts, normalise=False)
    inputs = {}
    hooks = [
        family.decoder.layers[layer].self_attn.register_forward_pre_hook(
            lambda module, args, kwargs, layer=layer: inputs.update(
                {layer: inputs.get(layer, kwargs["hidden_states"])}
            ),
            with_kwargs=True,
        )
        for layer in range(2)
    ]
    compression = Compression(KVzip(), 0.5)
    eviction = EvictionPass(compression, family, contexts)
    run_whole(backbone, contexts, eviction, LayerPacker(backbone, compression, PackedCache(2), 20))
    for hook in hooks:
        hook.remove()
    marks = contexts.regions_BN == Region.CONTEXT
    assert marks.sum().item() == 29
    for layer, (x, y) in enumerate(found):
        assert torch.equal(x, inputs[layer][marks])
        scores = eviction.scores[layer].scores_BhN.transpose(1, 2)[marks]
        assert torch.allclose(y, scores.log().clamp(min=FAINTEST), atol=1e-6)
        assert y.dtype == torch.float32


def test_lengths_of_what_values_give_to_the_output():
    value, weight = drawn(2, 2, 3, 4), drawn(6, 16, seed=1)
    found = output_lengths(value, weight)
    assert found.shape == (2, 4, 3)
    for sample in range(2):
        for head in range(4):
            for token in range(3):
                given = weight[:, head * 4 : head * 4 + 4] @ value[sample, head // 2, token]
                assert float(found[sample, head, token]) == pytest.approx(float(given.norm()), rel=1e-5)


@torch.no_grad()
def test_normalised_scores_weigh_every_query_head_before_the_largest_is_taken(backbone):
    family, contexts = backbone.family, contexts_of(text_batch([(14, 2, 0), (9, 3, 0)], pad_left=True, seed=1))
    found = kvzip_examples(backbone, contexts, normalise=True)
    largest, length = {}, contexts.regions_BN.shape[1]

    class Watched(NotingKVzip):
        def weighed(self, view, largest_BHC, index_BC):
            largest[view.layer] = torch.zeros(2, 4, length).scatter_reduce(
                -1, index_BC[:, None].expand_as(largest_BHC), largest_BHC, "amax"
            )
            return super().weighed(view, largest_BHC, index_BC)

    compression = Compression(Watched(normalise=True), 0.5)
    eviction = EvictionPass(compression, family, contexts)
    packer = LayerPacker(backbone, compression, PackedCache(2), length)
    run_whole(backbone, contexts, eviction, packer)
    marks = contexts.regions_BN == Region.CONTEXT
    for layer, (x, y) in enumerate(found):
        read = torch.zeros(2, length)
        read[marks] = x.norm(dim=-1)
        lengths = output_lengths(packer.dense.layers[layer].values, family.output_weight(layer))
        weighed = largest[layer] * lengths / read.clamp(min=1e-4)[:, None]
        expected = weighed.view(2, 2, 2, length).amax(2).transpose(1, 2)[marks]
        assert torch.allclose(y.exp(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"hidden": 8, "epochs": 200, "positions": 60}, {"normalise": True}])
def test_a_calibrated_method_ranks_as_kvzip_does_what_it_learned_from(backbone, settings):
    batches = [contexts_of(text_batch([(40, 2, 0), (30, 2, 0)], pad_left=True, seed=seed)) for seed in range(4)]
    calibrator = ScorerCalibrator(ridge=1e-3, **settings)
    nets = calibrator.numbers(backbone, batches).nets
    with torch.no_grad():
        examples = [kvzip_examples(backbone, batch, calibrator.normalise) for batch in batches]
    for layer, net in enumerate(nets):
        inputs, targets = (torch.cat([each[layer][part] for each in examples]) for part in (0, 1))
        found = foretold(net, inputs[None])[0].T
        assert float(torch.corrcoef(torch.stack([found.flatten(), targets.flatten()]))[0, 1]) > 0.6  # random models


def test_any_text_serves(backbone, tmp_path):
    text = ROOT / "data/samples/long.txt"
    source = calibration_prompts(backbone.family, str(text), 3, 2, 50, 0, False, any_text=True)
    batches = list(source.batches)
    assert (source.name, len(source.sha256)) == ("long.txt", 64)
    assert [len(batch.record_ids) for batch in batches] == [2, 1]
    ids = backbone.family.tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    contexts = torch.cat([contexts_of(batch).input_ids_BN for batch in batches])
    assert contexts.shape == (3, 50)
    body = contexts[:, 1:] if backbone.family.tokenizer.bos_token_id is not None else contexts
    assert body.flatten().tolist() == ids[: body.numel()]
    with pytest.raises(ValueError, match="is calibrated on 'recall'; leave it out"):
        calibration_prompts(backbone.family, str(text), 3, 2, 50, 0, False)
    with pytest.raises(ValueError, match=r"data 'nowhere.txt' is neither 'recall' nor a file; check the path"):
        calibration_prompts(backbone.family, "nowhere.txt", 3, 2, 50, 0, False, any_text=True)
    short = tmp_path / "short.txt"
    short.write_text("two words")
    with pytest.raises(ValueError, match="fewer than one block"):
        list(calibration_prompts(backbone.family, str(short), 3, 2, 50, 0, False, any_text=True).batches)


def test_prompts_without_a_context_calibrate_nothing(backbone):
    with pytest.raises(ValueError, match="none of the prompts has a context to score"):
        ScorerCalibrator().numbers(backbone, [text_batch([(0, 5, 0)])])


def test_routers_are_refused():
    family = text_family(layers=2)
    with pytest.raises(ValueError, match="kvzap is calibrated on whole caches; use the backbone"):
        ScorerCalibrator().check(compress(family, RoutingConfig("linear", num_groups=8, kept_groups=3)))
