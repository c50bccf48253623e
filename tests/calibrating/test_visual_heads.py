"""SparseMM's calibration: cells and tokens beside plain loops, answers that tell of cells, and a whole model."""

import numpy as np
import pytest
import torch

from subtoken_train.calibrating.head_scores import VisualCalibrator, cell_tokens, scene_record, told_cells
from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.scenes import draw_scene
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import load_family
from subtoken_train.reducers import build_reducer
from subtoken_train.types import Region
from tests.support.places import ROOT
from tests.support.text_families import text_family


@pytest.fixture(scope="module")
def llava():
    return load_family(BackboneConfig(path=str(ROOT / "checkpoints/tiny-llava")))


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (4, 4), (3, 5), (24, 24), (2, 7)])
def test_every_token_that_reaches_into_a_cell(rows, columns):
    for cell in range(16):
        found = cell_tokens(cell, rows, columns).view(rows, columns)
        for i in range(rows):
            for j in range(columns):
                spans = [(i / rows, (i + 1) / rows, cell // 4), (j / columns, (j + 1) / columns, cell % 4)]
                meets = all(min(stop, (k + 1) / 4) - max(start, k / 4) > 1e-9 for start, stop, k in spans)
                assert bool(found[i, j]) == meets


def test_answers_tell_of_the_cells_of_their_scenes(llava):
    """A token for every word of the tiny model: three for each object, in order, and an end that tells of none."""
    for number in range(3):
        objects = draw_scene(np.random.default_rng([0, number]), "train").objects
        record = scene_record(np.random.default_rng([0, number]), number)
        batch = Collator(llava, 512)([record])
        answer = batch.labels_BN[0][batch.labels_BN[0] >= 0].tolist()
        cells = told_cells(llava.tokenizer, answer)
        assert [cell for cell in cells if cell >= 0] == [item.cell for item in objects for _ in range(3)]
        index_BW, needle_BWN = VisualCalibrator().needles(llava, batch)
        assert index_BW[0].tolist() == [i - 1 for i in (batch.labels_BN[0] >= 0).nonzero()[:, 0]][: index_BW.shape[1]]
        assert needle_BWN.sum(-1).tolist() == [[4] * index_BW.shape[1]]  # 8 x 8 tokens, 4 x 4 cells
        assert not needle_BWN[0, :, batch.regions_BN[0] != Region.VISUAL].any()


def test_only_the_largest_weight_counts():
    looked = torch.tensor([0.1, 0.4, 0.3, 0.2]).expand(1, 2, 1, 4)
    weight = VisualCalibrator().weight
    assert weight(looked, torch.tensor([[[True, True, False, False]]])).tolist() == [[[0.5], [0.5]]]
    assert weight(looked, torch.tensor([[[True, False, True, False]]])).tolist() == [[[0.0], [0.0]]]
    assert weight(looked, torch.zeros(1, 1, 4, dtype=torch.bool)).tolist() == [[[0.0], [0.0]]]


def test_scores_do_not_hang_on_the_batch(llava):
    backbone = CompressedBackbone(llava, build_reducer("none")).eval()
    found = []
    for size in (1, 3):
        calibrator = VisualCalibrator(samples=3, batch_size=size)
        found.append(torch.tensor(calibrator.numbers(backbone, calibrator.prompts(llava, None).batches).score))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
    assert float(found[0].mean()) == pytest.approx(1, abs=1e-4)


def test_what_cannot_be_calibrated_is_refused(llava):
    with pytest.raises(ValueError, match="calibrated on pictures, and the backbone sees none; use headkv"):
        VisualCalibrator().check(CompressedBackbone(text_family(), build_reducer("none")).eval())
    with pytest.raises(ValueError, match="sparsemm is calibrated on whole caches"):
        VisualCalibrator().check(CompressedBackbone(llava, build_reducer("fastv", 0.5)).eval())
    with pytest.raises(ValueError, match=r"data 'dev\.json': sparsemm draws 'scenes'"):
        VisualCalibrator().prompts(llava, "dev.json")
