"""Records are only joined by records of the same model, settings and samples."""

import json
import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file

from subtoken_train.artifact.folder import identify
from subtoken_train.datasets.scenes import write_scene_split
from subtoken_train.evaluation.results import MANIFEST_FILE, Manifest, read_samples
from subtoken_train.evaluation.runner.arms import prepare
from subtoken_train.evaluation.runner.run import run_grid
from subtoken_train.evictions.h2o import LayerShares
from subtoken_train.families.backbone_config import BackboneConfig, resolve
from subtoken_train.inference.pool import ModelPool, load_backbone
from subtoken_train.reducers.staged import PruneSchedules
from tests.support.eval_runs import ANCHOR, ROUTED, WHOLE, scenes_grid
from tests.support.prompt_views import written
from tests.support.sampling import sampled

EVICTED = replace(WHOLE, name="arm", eviction="snapkv", eviction_keep=0.25, scope="visual")
REDUCED = replace(WHOLE, name="arm", reducer="random", keep_ratio=0.25)


@pytest.fixture
def scenes(tmp_path):
    write_scene_split(tmp_path / "scenes", "test", 60, seed=3)
    return tmp_path / "scenes"


@pytest.mark.slow
def test_another_training_or_other_answers_in_the_files_are_refused(scenes, tmp_path):
    adapter = shutil.copytree(resolve(str(ROUTED.adapter)), tmp_path / "adapter")
    grid = scenes_grid(scenes, tmp_path / "out", replace(ROUTED, adapter=str(adapter)), limit=2)
    (folder,) = run_grid(grid)
    content = (scenes / "test.json").read_text()
    other = json.loads(content)
    for record in other:
        record["conversations"][1]["value"] = "another"
    (scenes / "test.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="answers to other samples"):
        run_grid(replace(grid, limit=4))
    (scenes / "test.json").write_text(content)
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, adapter / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"adapter_sha256.*choose another results folder"):
        run_grid(replace(grid, limit=4))
    assert len(read_samples(folder)) == Manifest.read(folder).rows == 2


@sampled(
    ("first", "second", "name"),
    [
        (EVICTED, replace(EVICTED, eviction_options={"window": 2}), "eviction_options"),
        (REDUCED, replace(REDUCED, reducer_options={"seed": 1}), "reducer"),
        (replace(ROUTED, name="arm"), replace(ROUTED, name="arm", selector="none"), r"arm\.groups"),
    ],
    every=2,
)
def test_settings_that_the_facts_do_not_tell_are_compared(scenes, tmp_path, first, second, name):
    grid = scenes_grid(scenes, tmp_path / "out", first, limit=2)
    run_grid(grid)
    run_grid(replace(grid, limit=3))
    with pytest.raises(ValueError, match=f"holds answers with {name}"):
        run_grid(replace(grid, arms=(second,), limit=3))
    with pytest.raises(ValueError, match="holds answers with max_length"):
        run_grid(replace(grid, max_length=100))


@sampled("method", ["prefixkv", "fitprune"], every=2)
def test_a_calibration_file_that_changed_is_noticed(scenes, tmp_path, method):
    """The setting names the same path; another content gives other answers. An eviction's or a reducer's."""
    family = load_backbone(str(WHOLE.adapter)).family
    layers, identity = family.shape.num_layers, identify(family, BackboneConfig(path="its own"))

    def calibrated(share):
        row = [1.0, *[share] * (layers - 1)]
        numbers = LayerShares([0.5], [[share] * layers]) if method == "prefixkv" else PruneSchedules([row])
        return written(tmp_path / "numbers.json", method, numbers, identity)

    options = {"calibration": calibrated(0.5)}
    arm = replace(EVICTED, eviction=method, eviction_options=options)
    if method == "fitprune":
        arm = replace(WHOLE, name="arm", reducer=method, keep_ratio=0.9, reducer_options=options)
    grid = scenes_grid(scenes, tmp_path / "out", arm, limit=2)
    (folder,) = run_grid(grid)
    run_grid(replace(grid, limit=3))
    calibrated(0.4)
    with pytest.raises(ValueError, match=r"holds answers with calibration_sha256"):
        run_grid(replace(grid, limit=4))
    assert len(Manifest.read(folder).settings["calibration_sha256"]) == 64


@pytest.mark.slow
def test_records_of_version_0_1_are_joined(scenes, tmp_path):
    """They name the settings of every reducer."""
    grid = scenes_grid(scenes, tmp_path / "out", REDUCED, limit=2)
    (folder,) = run_grid(grid)
    path = folder / MANIFEST_FILE
    manifest = json.loads(path.read_text())
    now = {"name": "random", "keep_ratio": 0.25, "round_up": False, "matches": None, "seed": 0}
    assert manifest["settings"]["reducer"] == now
    del manifest["settings"]["reducer"]["matches"]
    others = {"stage": "embeds", "layer": 2, "page_size": 16, "window": 64}
    path.write_text(
        json.dumps(
            {**manifest, "settings": {**manifest["settings"], "reducer": {**manifest["settings"]["reducer"], **others}}}
        )
    )
    run_grid(replace(grid, limit=3))
    assert len(read_samples(folder)) == 3


@pytest.mark.slow
def test_a_trained_anchor_may_come_later(scenes, tmp_path):
    """The answers stay, and are compared with it from then on."""
    grid = scenes_grid(scenes, tmp_path / "out", ROUTED, limit=2, anchors="auto")
    folder, _ = run_grid(grid)
    before = read_samples(folder)
    run_grid(replace(grid, arms=(ROUTED, ANCHOR)))
    assert Manifest.read(folder).arm.anchor == "tiny_fastv25_s16k4_anchor-seed0"
    assert read_samples(folder) == before


def test_a_random_control_of_each_training_has_that_training_s_seed(tmp_path):
    """So that a report takes both as seeds of one arm."""
    adapter = shutil.copytree(resolve(str(ROUTED.adapter)), tmp_path / "adapter")
    config = json.loads((adapter / "subtoken_config.json").read_text())
    config["training"] |= {"name": "tiny_fastv25_s16k4-seed1", "seed": 1}
    (adapter / "subtoken_config.json").write_text(json.dumps(config))
    drawn = replace(ROUTED, selector="random")
    arms = prepare([drawn, replace(drawn, adapter=str(adapter)), replace(drawn, seed=7)], ModelPool())
    assert [arm.facts.seed for arm in arms] == [0, 1, 7]
