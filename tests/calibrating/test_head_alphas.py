"""DuoAttention's calibration: the loss by hand, the rate's course, and that heads nobody needs are let go."""

import pytest
import torch

from subtoken_train.calibrating.heads import DuoCalibrator, rate_at
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.engine.mixed_heads import HeadMix, mixed_hidden
from subtoken_train.functional.objective import IGNORE_INDEX
from subtoken_train.reducers import build_reducer
from subtoken_train.types import Region
from tests.support.kvzap_files import NOBODY
from tests.support.text_families import text_batch, text_family

SAMPLES = [(40, 4, 5), (30, 3, 4)]


@pytest.fixture
def family():
    return text_family(layers=2)


def backbone_of(family, **reducer):
    return CompressedBackbone(family, build_reducer(**(reducer or {"name": "none"}))).eval()


def short(**settings):
    return DuoCalibrator(**{"samples": 80, "batch_size": 2, "sinks": 1, "recent": 6, "context_length": 40} | settings)


def test_the_loss_by_hand(family):
    """Squared difference of the hidden states of the rows before labels, and a share of the mean alpha."""
    batch, alpha = text_batch(SAMPLES), torch.tensor([[0.2, 0.7], [0.9, 0.4]])
    loss = short().loss(family, batch, alpha.requires_grad_())
    visible = batch.regions_BN != Region.PADDING
    states = [
        mixed_hidden(family, family.embed(batch), family.positions(batch), HeadMix(each, 1, 6, visible))
        for each in (torch.ones(2, 2), alpha)
    ]
    squares = [
        (states[1][sample, row] - states[0][sample, row]).pow(2).mean()
        for sample, labels in enumerate(batch.labels_BN)
        for row in range(len(labels) - 1)
        if labels[row + 1] != IGNORE_INDEX
    ]
    assert len(squares) == 9
    torch.testing.assert_close(loss, torch.stack(squares).mean() + 0.05 * alpha.mean())


def test_the_rate_rises_falls_and_never_stops():
    rates = [rate_at(step, 50) for step in (0, 4, 9, 25, 45, 49, 60)]
    assert rates == pytest.approx([0.1, 0.5, 1, 1, 0.5, 0.1, 0.1])


def test_the_backbone_does_not_change(family):
    before = {name: value.clone() for name, value in family.model.state_dict().items()}
    batches = [text_batch(SAMPLES, seed=seed) for seed in range(40)]
    found = short().numbers(backbone_of(family), batches)
    assert all(torch.equal(value, before[name]) for name, value in family.model.state_dict().items())
    values = torch.tensor(found.alpha)
    assert values.shape == (2, 2)
    assert ((values >= 0) & (values <= 1)).all()
    assert (found.sinks, found.recent) == (1, 6)


@pytest.mark.slow
def test_a_head_whose_output_nobody_reads_is_let_go_and_others_are_held(family):
    """Key-value head 1 of layer 0 writes nothing; the rest matter, with no price on alpha they stay at 1."""
    with torch.no_grad():
        family.decoder.layers[0].self_attn.o_proj.weight[:, 32:] = 0
    batches = [text_batch(SAMPLES, seed=seed) for seed in range(60)]
    found = short(samples=120, learning_rate=0.05, regularisation=0.01).numbers(backbone_of(family), batches)
    assert found.alpha[0][1] < 0.05
    assert found.alpha[0][0] > 0.5


def test_a_reduced_cache_is_refused(family):
    backbone = backbone_of(family, name="quest", keep_ratio=0.5, page_size=4, window=4)
    with pytest.raises(ValueError, match="calibrated on whole caches"):
        short().run(backbone, NOBODY)
