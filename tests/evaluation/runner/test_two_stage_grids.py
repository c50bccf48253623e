"""Table 4's grid and section 3.5's, arm by arm on a random tiny LLaVA: two questions each, and what a report says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from subtoken_train.datasets.scene_files import write_scene_split
from subtoken_train.evaluation.reporting.runs import read_results
from subtoken_train.evaluation.results import Manifest, read_samples
from subtoken_train.evaluation.runner.run import run_grid
from subtoken_train.evaluation.runner.spec import TaskSpec, read_grid
from subtoken_train.families.backbone_config import BackboneConfig
from tests.support.eval_runs import write_tiny_adapter
from tests.support.helpers import save_backbone
from tests.support.places import RECIPES


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arms"), [("table4_llava7b", 25), ("section35_llava7b", 12)])
def test_every_arm_answers(tiny_family, tmp_path, name, arms):
    """Each arm keeps its percentage of the visual KV, measured, and an anchor holds its arm's bytes."""
    grid = read_grid(RECIPES / "eval" / f"{name}.yaml")
    source = BackboneConfig(path=str(save_backbone(tiny_family, tmp_path / "backbone")))
    write_scene_split(tmp_path / "scenes", "test", 4, seed=3)
    names = [Path(arm.adapter).parent.name for arm in grid.arms]
    made = {each: str(write_tiny_adapter(each, source, tmp_path / "runs")) for each in names}
    small = replace(
        grid,
        arms=tuple(replace(arm, adapter=made[each]) for arm, each in zip(grid.arms, names, strict=True)),
        tasks=(TaskSpec("scenes_pope", str(tmp_path / "scenes")),),
        out=tmp_path / "results",
        data_root=None,
        limit=2,
        anchors="none",
    )
    folders = run_grid(small)
    assert len(folders) == len(names) == arms
    assert all(len(read_samples(folder)) == 2 for folder in folders)
    for results in read_results([small.out]):
        (run,) = results.runs["scenes_pope"].values()
        share = 1.0 if "lora_only" in results.name else 0.15625 if "25_" in results.name else 0.078125
        assert run.cost.shares["measured"] == pytest.approx(share), results.name
        assert run.cost.seconds > 0
        assert Manifest.read(run.folder).rows == 2
