"""``fit --overwrite`` from end to end: whatever ends it, the old run is whole, and the user learns where."""

import json
import os
import random
import shutil
import signal

import pytest

from subtoken_train.cli.main import main
from subtoken_train.datasets.scene_files import write_scenes
from subtoken_train.training import checkpoints
from subtoken_train.training.run_folder import MARKER_FILE
from tests.support.commands import refused
from tests.support.helpers import interrupted_fit, last_state
from tests.support.killed_runs import RunServer, Scene, complete_run, differences, kill_at, kill_writing, wait_until
from tests.support.run_folders import content
from tests.support.sampling import sampled
from tests.support.strategy_runs import run_fit

SHORT = "--trainer.max_steps=1"
OTHER = ("--trainer.max_steps=3", "--checkpoint.every_n_train_steps=1", "--model.lora.rank=4")


@pytest.fixture
def finished(tiny_run, tmp_path):
    """A run of one step, and a file of its user's in it."""
    assert main(tiny_run(SHORT)) == 0
    (tmp_path / "run" / "notes.txt").write_text("mine")
    return tmp_path / "run"


def beside(run):
    return sorted(path.name for path in run.parent.glob("run.*"))


def rank(run):
    return json.loads((run / "adapter" / "adapter_config.json").read_text())["r"]


def same(folder, old):
    return {path: text for path, text in content(folder).items() if path.name != ".lock"} == {
        path: text for path, text in old.items() if path.name != ".lock"
    }


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [None, True, False], ids=["one", "torchrun", "launched"])
def test_a_new_run_takes_the_name_of_the_old_one(tiny_run, finished, capsys, torchrun):
    old = content(finished)
    settings = ["--trainer.strategy=ddp", "--data.batch_size=4", "--data.group_by_length=false"]
    argv = tiny_run("--overwrite", *OTHER, *([] if torchrun is None else [*settings, "--trainer.callbacks=samples"]))
    if torchrun is None:
        assert main(argv) == 0
        assert f"the run that was there is in {finished}.1" in capsys.readouterr().err
        assert len((finished / "logs" / "csv" / "metrics.csv").read_text().splitlines()) > 3
    else:
        ended = run_fit(argv, processes=2, torchrun=torchrun)
        assert ended.returncode == 0, ended.stdout
        for process in range(2):
            assert len((finished / "logs" / f"samples-rank{process}.jsonl").read_text().splitlines()) == 3
    assert (rank(finished), beside(finished)) == (4, ["run.1"])
    assert same(finished.with_name("run.1"), old)


@pytest.mark.parametrize("step", [1, 2])
def test_a_run_whose_folder_was_removed_can_be_resumed(tiny_run, tmp_path, capsys, monkeypatch, step):
    """Before a checkpoint, and after the last one that stands: what fit says next is what can be done."""
    run, begin = tmp_path / "run", checkpoints.begin

    def removed(folder, at):
        if at == step:
            shutil.rmtree(run)
        return begin(folder, at)

    monkeypatch.setattr(checkpoints, "begin", removed)
    every = ("--checkpoint.every_n_train_steps=1", "--trainer.max_steps=3")
    assert main(tiny_run(*every)) == 2  # its logger misses its file
    said = capsys.readouterr().err
    assert f"{run} was removed while the run wrote to it; its recipe is written again" in said
    assert f"last good checkpoint: {run / 'checkpoints' / f'step-{step}'}" in said
    assert f"continue with: subtoken-train fit --config {run / 'recipe.yaml'} --resume" in said
    monkeypatch.undo()
    assert "holds a run; pass --overwrite, --resume" in refused(capsys, *tiny_run(*every))
    assert main(["fit", "--config", str(run / "recipe.yaml"), "--resume"]) == 0
    assert last_state(run)["global_step"] == 3


def test_ctrl_c_keeps_both_runs_and_says_where(tiny_run, finished, capsys):
    old = content(finished)
    assert interrupted_fit(tiny_run("--overwrite", "--trainer.max_steps=4", "--model.lora.rank=4"), after_step=2) == 130
    said = capsys.readouterr().err
    assert said.count(f"the run that was there is in {finished}.1\n") == 2  # as it begins, and now
    assert f"continue with: subtoken-train fit --config {finished / 'recipe.yaml'} --resume" in said
    assert same(finished.with_name("run.1"), old)
    assert main(["fit", "--config", str(finished / "recipe.yaml"), "--resume"]) == 0
    assert rank(finished) == 4


@sampled(
    "mistake",
    [
        "--data.train_file={run}/train.json",
        "--data.image_folder={run}/images",
        "--model.backbone.path={run}/backbone",
        "--model.optimizer.weight_decay=-1",
        "--data.num_workers=-1",
    ],
    every=3,
)
def test_a_recipe_that_is_refused_or_reads_from_the_run_moves_nothing(tiny_run, finished, capsys, mistake):
    (finished / "train.json").write_text("[]")
    (finished / "images").mkdir()
    old = content(finished)
    assert main(tiny_run("--overwrite", SHORT, mistake.format(run=finished))) == 2
    assert "Traceback" not in (said := capsys.readouterr().err)
    assert "{run}" not in mistake or "which --overwrite would rename" in said
    assert same(finished, old)
    assert beside(finished) == []


@pytest.mark.slow
def test_a_run_of_an_older_version_is_resumed(tiny_run, finished):
    (finished / MARKER_FILE).unlink()
    assert main(tiny_run("--resume", "--trainer.max_steps=2")) == 0
    assert last_state(finished)["global_step"] == 2
    assert not (finished / MARKER_FILE).exists()
    (finished / "recipe.yaml").unlink()
    assert main(tiny_run("--resume", "--trainer.max_steps=3")) == 0


def end_politely(server: RunServer, scene: Scene, run: str) -> None:
    """SIGTERM to the run and its workers, as a cluster sends it."""
    before = scene.newest(run)
    pid = server.start(scene.restart(run))
    wait_until(lambda: scene.newest(run) != before, server)
    os.killpg(pid, signal.SIGTERM)
    assert server.wait() == 143
    said = server.log.read_text()
    assert "SIGTERM: stopped after step" in said
    assert f"last good checkpoint: {scene.newest(run)}" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_three_kills_change_nothing(tmp_path):
    write_scenes(tmp_path / "scenes", train=20, dev=1, test=1)  # passes of five micro-batches, windows of 2, 2 and 1
    scene, rng = Scene(tmp_path, steps=12), random.Random()
    with RunServer(tmp_path / "log.txt") as server:
        complete_run(server, scene, "unbroken")
        first = kill_at(server, scene, "killed", rng.randrange(3), rng.uniform(0, 0.05))
        second = kill_writing(server, scene, "killed", nth=1)
        kill_at(server, scene, "killed", 2 * (second.resumed_from or 0) + rng.randrange(2), rng.uniform(0, 0.05))
        end_politely(server, scene, "killed")
        complete_run(server, scene, "killed")
    assert second.resumed_from == first.resumed_from
    assert f"step-{(first.resumed_from or 0) + 1}.partial" in second.left_behind
    assert differences(scene, "unbroken", "killed") == []
    seen = [name for names in scene.samples("killed") for name in names]
    assert len(scene.samples("killed")) == 20
    for start in range(0, len(seen), 20):  # each record once in every pass
        assert len(set(seen[start : start + 20])) == 20
