"""FitPrune's calibration: what leaves, by loops; the schedule of a target; the command and who reads its file."""

import json

import pytest
import torch

from subtoken_train.calibrating import CALIBRATORS
from subtoken_train.calibrating.layers import BearableCuts, bearable, stopped_at
from subtoken_train.cli.main import main
from subtoken_train.datasets.scene_files import write_scenes
from subtoken_train.reducers import build_reducer
from tests.support.helpers import compress, make_batch, only_sample, random_scores, sharpen
from tests.support.places import ROOT
from tests.support.text_families import text_family


@pytest.mark.parametrize("alpha", [0.0, 0.05, 0.3, 0.7, 1.0])
def test_what_leaves_is_the_longest_row_of_the_lowest(alpha):
    mass, visual = random_scores(0, 3, 12).abs(), random_scores(1, 3, 12) > -0.5
    total = torch.tensor([1.2, 1.0, 1.5]) * (mass * visual).sum(-1)
    leave = bearable(mass, visual, total, alpha)
    for sample in range(3):
        places = sorted(visual[sample].nonzero().flatten().tolist(), key=lambda i: float(mass[sample, i]))
        whole, count = float((mass * visual)[sample].sum()), 0
        while count < len(places) - 1:
            left = whole - sum(float(mass[sample, i]) for i in places[: count + 1])
            if left < (1 - alpha) * float(total[sample]):
                break
            count += 1
        assert leave[sample].nonzero().flatten().tolist() == sorted(places[:count])


def test_nothing_leaves_once_the_average_is_met():
    shares = [1.0, 0.8, 0.5, 0.2]
    assert stopped_at(shares, 0.9) == [1.0, 0.8, 0.8, 0.8]
    assert stopped_at(shares, 0.7) == [1.0, 0.8, 0.5, 0.5]
    assert stopped_at(shares, 0.625) == [1.0, 0.8, 0.5, 0.2]
    assert stopped_at(shares, 0.6) is None
    assert stopped_at(shares, 1.0) == [1.0] * 4


@torch.no_grad()
def test_shares_of_a_batch_are_those_of_its_samples(tiny_family):
    sharpen(tiny_family)
    batch, backbone = make_batch([(1, 9), (2, 7), (0, 12)]), compress(tiny_family)
    together = BearableCuts()
    together.run(backbone, batch)
    found = together.shares(backbone, batch, 0.25)
    assert found.shape == (2, 4)
    for sample in range(2):
        alone = BearableCuts()
        alone.run(backbone, only_sample(batch, sample))
        assert torch.equal(alone.shares(backbone, only_sample(batch, sample), 0.25)[0], found[sample])
    assert (found[:, 0] == 1).all()
    assert (found[:, 1:] < 1).all()
    assert (found.diff(dim=-1) <= 0).all()
    assert (together.shares(backbone, batch, 0.6) <= found).all()


def test_the_command_writes_what_the_reducer_reads(tmp_path, capsys):
    data, out, llava = tmp_path / "scenes", tmp_path / "fit.json", str(ROOT / "checkpoints/tiny-llava")
    write_scenes(data, train=4, dev=4, test=4)
    words = ["calibrate", "fitprune", "--backbone", llava, "--out", str(out), "--data", str(data / "dev.json")]
    assert main([*words, "--option", "samples=2"]) == 0
    assert "share of the visual tokens in every layer" in capsys.readouterr().out
    content = json.loads(out.read_text())
    assert (content["method"], content["data"]["samples"]) == ("fitprune", 2)
    rows = content["numbers"]["shares"]
    averages = [sum(row) / len(row) for row in rows]
    assert averages == sorted(averages, reverse=True)
    reducer = build_reducer("fitprune", (averages[0] + 1) / 2, calibration=str(out))
    assert float(sum(reducer.layer_shares(len(rows[0])))) == pytest.approx(len(rows[0]) * (averages[0] + 1) / 2)


@torch.no_grad()
def test_prompts_and_models_without_images_are_refused(tiny_family):
    calibrator = CALIBRATORS["fitprune"]()
    with pytest.raises(ValueError, match="none of the prompts has an image"):
        calibrator.numbers(compress(tiny_family), [make_batch([(0, 12)])])
    with pytest.raises(ValueError, match=r"fitprune prunes visual tokens, and a language model has none"):
        calibrator.check(compress(text_family(layers=2)))
