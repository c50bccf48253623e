"""A short fit of a random tiny LLaVA-OneVision: every adapter moves, nothing else does, the folder reads back."""

from __future__ import annotations

import pytest

from subtoken_train.cli.main import main
from tests.support.onevision_tiny import onevision_family
from tests.support.sampling import sampled
from tests.support.seeing_fits import IN_TOWER_BF16, argv_of, assert_moves_exactly_the_trainables, read_back

KINDS = {
    "fastv-decoder-linear": ["--model.reducer.stage=decoder"],
    "visionzip-mlp-checkpointing-bf16": IN_TOWER_BF16,
}


@sampled("extra", KINDS.values(), every=2, ids=KINDS)
def test_three_steps_move_exactly_the_trainables(tiny_run, tmp_path, extra):
    """Scenes are nine tiles, scaled down to four, here."""
    assert_moves_exactly_the_trainables(argv_of(tiny_run, tmp_path, onevision_family(), *extra), 4)


@pytest.mark.slow
def test_the_adapter_folder_reads_back(tiny_run, tmp_path):
    argv = argv_of(tiny_run, tmp_path, onevision_family(), "--model.reducer.name=visionzip")
    read_back(argv, tmp_path, "llava_onevision")


def test_a_cap_of_pixels_is_refused_in_words(tiny_run, tmp_path, capsys):
    assert main(argv_of(tiny_run, tmp_path, onevision_family(), "--model.backbone.max_pixels=5000")) == 2
    assert "max_pixels=5000: llava_onevision cuts images into tiles" in capsys.readouterr().err
