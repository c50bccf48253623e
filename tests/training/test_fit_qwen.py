"""A short fit of random tiny Qwen-VLs: every adapter moves, nothing else does, the folder reads back."""

from __future__ import annotations

from tests.support.qwen_tiny import qwen2_family, qwen3_family, qwen_family
from tests.support.sampling import sampled
from tests.support.seeing_fits import IN_TOWER_BF16, argv_of, assert_moves_exactly_the_trainables, read_back

KINDS = {
    "fastv-linear": ["--model.reducer.name=fastv"],
    "fastv-decoder-mlp": ["--model.reducer.stage=decoder", "--model.routing.selector=mlp"],
    "visionzip-linear": ["--model.reducer.name=visionzip"],
    "visionzip-mlp-checkpointing-bf16": IN_TOWER_BF16,
}
OTHERS = {"qwen2_vl": qwen2_family, "qwen3_vl": qwen3_family}


@sampled("extra", KINDS.values(), every=4, ids=KINDS)
def test_three_steps_move_exactly_the_trainables(tiny_run, tmp_path, extra):
    assert_moves_exactly_the_trainables(argv_of(tiny_run, tmp_path, qwen_family(), *extra), 4)


@sampled("kind", OTHERS, every=2)
def test_three_steps_move_exactly_the_trainables_of_other_qwens(tiny_run, tmp_path, kind):
    argv = argv_of(tiny_run, tmp_path, OTHERS[kind](), "--model.reducer.name=visionzip")
    assert_moves_exactly_the_trainables(argv, 4)


@sampled("kind", OTHERS, every=2)
def test_other_qwens_read_back(tiny_run, tmp_path, kind):
    read_back(argv_of(tiny_run, tmp_path, OTHERS[kind](), "--model.reducer.stage=decoder"), tmp_path, kind)


def test_the_adapter_folder_reads_back_with_its_cap(tiny_run, tmp_path):
    pad = "--model.backbone.image_aspect_ratio=pad"
    extra = ("--model.backbone.max_pixels=5000", "--model.reducer.name=visionzip", pad)
    config, backbone = read_back(argv_of(tiny_run, tmp_path, qwen_family(), *extra), tmp_path, "qwen2_5_vl")
    assert config.backbone.max_pixels == backbone.family.max_pixels == 5000
    assert config.backbone.image_aspect_ratio == "pad"
    assert backbone.family.pads
    assert backbone.family.visual_tokens((20, 60)) == backbone.family.visual_tokens((60, 60))
