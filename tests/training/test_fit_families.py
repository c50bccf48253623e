"""Short fits of random tiny models that see: what trains moves, nothing else does, folders read back."""

import json

import pytest

from subtoken_train.artifact.folder import read_adapter
from subtoken_train.cli.main import main
from subtoken_train.cli.recipe import RecipeCLI
from tests.support.commands import refused
from tests.support.helpers import moved_by_fit, save_backbone
from tests.support.sampling import sampled
from tests.support.tiny import noise, tiny_families

TINY = tiny_families()
VISIONZIP, DECODER = "--model.reducer.name=visionzip", "--model.reducer.stage=decoder"
MLP = "--model.routing.selector=mlp"
IN_TOWER_BF16 = [VISIONZIP, MLP, "--model.gradient_checkpointing=true", "--trainer.precision=bf16-mixed"]
FITS = [
    ("qwen2_5_vl", ["--model.reducer.name=fastv"]),
    ("qwen2_5_vl", [DECODER, MLP]),
    ("internvl", ["--model.reducer.name=fastv"]),
    ("qwen2_5_vl", [VISIONZIP]),
    ("qwen2_5_vl", IN_TOWER_BF16),
    ("llava_onevision", IN_TOWER_BF16),
    ("qwen3_vl", [VISIONZIP]),
    ("smolvlm", IN_TOWER_BF16),
    ("mistral3", IN_TOWER_BF16),
    ("glm4v", IN_TOWER_BF16),
    ("glm4v_moe", [DECODER]),
    ("qwen3_vl_moe", ["--model.reducer.name=fastv"]),
]
CAPPED = {"internvl": ("most_tiles", 2), "smolvlm": ("longest", 64), "mistral3": ("longest", 32)}


@pytest.fixture
def seeing_run(tiny_run, tmp_path):
    """As ``tiny_run``: three steps of a family on the same scenes."""

    def argv(kind: str, *extra: str) -> list[str]:
        path = save_backbone(TINY[kind].build(), tmp_path / "seeing")
        settings = ["--data.max_length=512", "--model.reducer.keep_ratio=0.5", "--trainer.max_steps=3"]
        return tiny_run(f"--model.backbone.path={path}", *settings, "--model.optimizer.warmup_steps=0", *extra)

    return argv


@sampled(("kind", "extra"), FITS, every=6, ids=[f"{kind}-{number}" for number, (kind, _) in enumerate(FITS)])
def test_three_steps_move_exactly_the_trainables(seeing_run, kind, extra):
    cli = RecipeCLI(seeing_run(kind, *extra)[1:])
    moved = moved_by_fit(cli)
    assert {f"compressed.{name}" for name in moved} == set(cli.model.trained())
    layers = cli.model.family.shape.num_layers
    assert len([name for name in moved if "lora_" in name]) == layers * 2 * 2  # on q and v of every layer


@sampled(
    ("kind", "extra", "cap"),
    [
        ("qwen2_5_vl", [VISIONZIP, "--model.backbone.image_aspect_ratio=pad"], 5000),
        ("qwen2_vl", [DECODER], None),
        ("qwen3_vl", [DECODER], None),
        ("internvl", [VISIONZIP], 3000),
        ("llava_onevision", [VISIONZIP], None),
        ("smolvlm", [DECODER], 5000),
        ("mistral3", [DECODER], 1100),
        ("glm4v", ["--model.reducer.name=fastv"], 7000),
        ("glm4v_moe", [VISIONZIP], None),
    ],
    every=3,
)
def test_the_adapter_folder_reads_back(seeing_run, tmp_path, kind, extra, cap):
    assert main(seeing_run(kind, *extra, *([] if cap is None else [f"--model.backbone.max_pixels={cap}"]))) == 0
    config, backbone, _ = read_adapter(tmp_path / "run" / "adapter")
    assert (config.identity.model_type, config.backbone.max_pixels) == (kind, cap)
    assert all(p.abs().sum() > 0 for name, p in backbone.named_parameters() if "lora_B" in name)
    if kind == "qwen2_5_vl":
        assert backbone.family.max_pixels == cap
        assert config.backbone.image_aspect_ratio == "pad"
        assert backbone.family.pads
        assert backbone.family.visual_tokens((20, 60)) == backbone.family.visual_tokens((60, 60))
    elif kind in CAPPED:
        assert getattr(backbone.family, CAPPED[kind][0]) == CAPPED[kind][1]


def test_a_cap_of_pixels_is_refused_in_words(seeing_run, capsys):
    words = seeing_run("llava_onevision", "--model.backbone.max_pixels=5000")
    assert "max_pixels=5000: llava_onevision scales images to sizes of its own" in refused(capsys, *words)


@sampled("kind, name", [("qwen2_vl", "evs"), ("llava_onevision", "vidcom2"), ("qwen3_vl", "evs")], every=2)
def test_reducers_of_videos_train_on_videos_and_refuse_scenes(seeing_run, tmp_path, capsys, kind, name):
    asked = seeing_run(kind, f"--model.reducer.name={name}", "--model.reducer.keep_ratio=0.6", "--data.val_file=null")
    assert "shows an image, and its reducer chooses among the frames of videos" in refused(capsys, *asked)
    turns = [{"from": "human", "value": "<video>\nwhere ?"}, {"from": "gpt", "value": "left"}]
    for number in range(4):
        (tmp_path / f"v{number}").mkdir()
        for frame in range(3):
            noise(40, 60, seed=4 * number + frame).save(tmp_path / f"v{number}" / f"{frame}.png")
    rows = [{"id": str(number), "video": f"v{number}", "conversations": turns} for number in range(4)]
    (tmp_path / "videos.json").write_text(json.dumps(rows))
    data = [f"--data.train_file={tmp_path / 'videos.json'}", f"--data.image_folder={tmp_path}"]
    cli = RecipeCLI([*asked[1:], "--data.batch_size=2", *data])
    assert {f"compressed.{name}" for name in moved_by_fit(cli)} == set(cli.model.trained())


RANKED = "--model.routing.budget=ranked"
KINDS = {
    "visionzip-linear": ["--model.reducer.name=visionzip"],
    "visionzip-mlp": ["--model.reducer.name=visionzip", "--model.routing.selector=mlp"],
    "visionzip-anchor": ["--model.reducer.name=visionzip", "--model.routing=null"],
    "fastervlm-linear": ["--model.reducer.name=fastervlm"],
    "prumerge-linear": ["--model.reducer.name=prumerge", "--model.reducer.plus=true", "--model.reducer.adaptive=true"],
    "sparsevlm-ranked": ["--model.reducer.name=sparsevlm", "--model.reducer.keep_ratio=0.6", RANKED],
    "pyramiddrop-linear": ["--model.reducer.name=pyramiddrop", "--model.reducer.keep_ratio=0.6"],
    "divprune-ranked": ["--model.reducer.name=divprune", "--model.routing.budget=ranked"],
    "cdpruner-linear": ["--model.reducer.name=cdpruner"],
    "dart-linear": ["--model.reducer.name=dart"],
    "dart-decoder": ["--model.reducer.name=dart", "--model.reducer.stage=decoder"],
    "vispruner-anchor": ["--model.reducer.name=vispruner", "--model.routing=null"],
    "fastv-decoder": ["--model.reducer.stage=decoder"],
    "fastv-query": ["--model.routing.query_conditioned=true"],
    "fastv-bilinear": ["--model.routing.selector=bilinear", "--model.routing.features=[norm, attention]"],
    "fastv-global-gated": ["--model.routing.budget=global", "--model.routing.value_gate=true"],
    "fastv-ranked-prior": ["--model.routing.budget=ranked", "--model.routing.score_prior=value_norm"],
    "fastv-output-prior-mlp": ["--model.routing.score_prior=output_norm", "--model.routing.selector=mlp"],
    "fastv-mean": ["--model.routing.fill=mean", "--model.routing.value_gate=true"],
    "fastv-mean-norm": ["--model.routing.fill=mean", "--model.routing.selector=value_norm"],
    "gated-anchor": ["--model.routing.kept_groups=16", "--model.routing.value_gate=true"],
    "output-norm": ["--model.routing.selector=output_norm"],
}


@sampled("extra", KINDS.values(), every=9, ids=KINDS)
def test_three_steps_move_exactly_the_trainables_kinds(tiny_run, extra):
    cli = RecipeCLI(tiny_run("--trainer.max_steps=3", "--model.optimizer.warmup_steps=0", *extra)[1:])
    moved = moved_by_fit(cli)
    assert {f"compressed.{name}" for name in moved} == set(cli.model.trained())
    assert sum("lora_" in name for name in moved) == 4 * 2 * 2
