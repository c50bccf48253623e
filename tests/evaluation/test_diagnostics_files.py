"""The tables of a diagnosis hold its numbers, and the pictures are drawn from it."""

import csv

import pytest
import torch
from PIL import Image

from subtoken_train.evaluation.diagnostics import Diagnosis, draw_figures, layer_rows, rank_means, write_tables
from subtoken_train.routing import RoutingConfig

GLOBAL = RoutingConfig(num_groups=4, kept_groups=1, budget="global")
PER_TOKEN = RoutingConfig(num_groups=4, kept_groups=1)


def diagnosis(kept):
    """Two layers (2 and 3) of four tokens each that keep four pairs per layer; three ranks, one of which is empty."""
    return Diagnosis(
        layers=[2, 3],
        counts_LS=torch.tensor([[1, 1, 1, 1], [4, 0, 0, 0]]),
        kept_LK=torch.tensor([kept, kept]),
        norm_pairs_L=torch.tensor([1, 3]),
        figure_LK=torch.tensor([[1, 2, 1, 0, 0], [3, 0, 0, 0, 1]]),
        rank_tokens_R=torch.tensor([4, 4, 0]),
        rank_relevance_R=torch.tensor([1.0, 0.5, 0.0]),
        rank_kept_R=torch.tensor([6, 2, 0]),
    )


def table(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_layers():
    first, second = layer_rows(diagnosis([0, 4, 0, 0, 0]), PER_TOKEN)
    assert first == (2, 1.0, 0.25, pytest.approx(1), 0.25, 0.25, 0.25)
    assert second == (3, 1.0, 0.25, pytest.approx(0, abs=1e-6), 1.0, 0.75, 0.25)


@pytest.mark.parametrize(("config", "chance"), [(GLOBAL, 0.25), (PER_TOKEN, 0.5)])
def test_chance_where_tokens_keep_different_numbers(config, chance):
    """Two tokens keep 2 of 4 groups: chosen token by token, half of a random choice is shared; over all, a quarter."""
    assert [row.chance for row in layer_rows(diagnosis([2, 0, 2, 0, 0]), config)] == [chance, chance]


def test_tables(tmp_path):
    write_tables(diagnosis([0, 4, 0, 0, 0]), PER_TOKEN, tmp_path)
    histogram = table(tmp_path / "figure1a.csv")
    assert histogram[:6] == [
        ["layer", "kept_groups", "tokens", "share"],
        ["all", "0", "4", "0.5"],
        ["all", "1", "2", "0.25"],
        ["all", "2", "1", "0.125"],
        ["all", "3", "0", "0"],
        ["all", "4", "1", "0.125"],
    ]
    assert histogram[6] == ["2", "0", "1", "0.25"]
    assert len(histogram) == 1 + 3 * 5
    assert table(tmp_path / "figure1b.csv") == [
        ["rank", "tokens", "relevance", "kept_groups"],
        ["0", "4", "0.25", "1.5"],
        ["1", "4", "0.125", "0.5"],
    ]
    groups = table(tmp_path / "groups.csv")
    assert groups[1] == ["2", "0", "0.25"]
    assert groups[5] == ["3", "0", "1"]
    layers = table(tmp_path / "layers.csv")
    assert layers[0][-2:] == ["value_norm_agreement", "chance"]
    assert layers[2] == ["3", "1", "0.25", "0", "1", "0.75", "0.25"]


@pytest.mark.slow
def test_figures(tmp_path):
    draw_figures(diagnosis([0, 4, 0, 0, 0]), PER_TOKEN, tmp_path)
    sizes = {path.name: Image.open(path).size for path in tmp_path.iterdir()}
    assert sizes == {"figure1.png": (1440, 480), "layers.png": (1440, 480)}


def test_ranks_that_do_not_occur_are_left_out():
    assert rank_means(diagnosis([0, 4, 0, 0, 0])) == ([0.25, 0.125], [1.5, 0.5])
