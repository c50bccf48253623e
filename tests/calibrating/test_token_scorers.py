"""KVzap's calibration: ridge regression against a plain reference, KVzip's scores as targets, its texts."""

import numpy as np
import pytest
import torch

from subtoken_train.cache.cache import PackedCache
from subtoken_train.calibrating.base import calibration_prompts
from subtoken_train.calibrating.layers import FAINTEST, Moments, ScorerCalibrator, kvzip_examples
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
    rows = np.vstack([above, below]), np.vstack([y - y.mean(0), np.zeros((x.shape[1], y.shape[1]))])
    weight = np.linalg.lstsq(*rows, rcond=None)[0] / deviation[:, None]
    return weight.T, y.mean(0) - mean @ weight


@pytest.mark.parametrize("ridge", [0.0, 0.1, 3.0])
def test_the_closed_form_is_least_squares(ridge):
    """Whatever the parts that entries come in, with inputs of unlike sizes and means."""
    inputs = drawn(80, 6) * torch.tensor([1.0, 100.0, 0.01, 1.0, 3.0, 1.0]) + torch.tensor([0, 1000, 0, -5, 0, 0])
    targets = inputs @ drawn(6, 2, seed=1) + drawn(80, 2, seed=2)
    weight, bias = plain_ridge(inputs, targets, ridge)
    for parts in ([80], [1, 30, 0, 49]):
        moments = Moments()
        for x, y in zip(inputs.split(parts), targets.split(parts), strict=True):
            moments = moments + Moments.of(x, y)
        found, offset = moments.ridge_map(ridge)
        assert np.allclose(found.numpy(), weight, rtol=1e-4, atol=1e-6 * np.abs(weight).max())
        assert np.allclose(offset.numpy(), bias, rtol=1e-3, atol=1e-3)


def test_fewer_entries_than_inputs_and_one_that_never_changes():
    inputs = drawn(5, 9)
    inputs[:, 4] = 2.0
    assert all(bool(part.isfinite().all()) for part in Moments.of(inputs, drawn(5, 1, seed=1)).ridge_map(0.1))


@torch.no_grad()
def test_examples_are_what_layers_read_and_the_logs_of_kvzip_s_scores(backbone):
    """Of the contexts alone: padding, the question and a prompt without a context count for nothing."""
    family, batch = backbone.family, text_batch([(20, 4, 0), (0, 5, 0), (9, 3, 0)], pad_left=True, seed=4)
    contexts = contexts_of(batch)
    found = kvzip_examples(backbone, contexts)
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


def test_a_calibrated_method_ranks_as_kvzip_does_what_it_learned_from(backbone):
    batches = [contexts_of(text_batch([(40, 2, 0), (30, 2, 0)], pad_left=True, seed=seed)) for seed in range(4)]
    nets = ScorerCalibrator(ridge=1e-3).numbers(backbone, batches).nets
    with torch.no_grad():
        examples = [kvzip_examples(backbone, batch) for batch in batches]
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
