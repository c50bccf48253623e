"""``fit --overwrite`` from end to end: whatever ends it, the old run is whole, and the user learns where."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from subtoken_train.cli.main import main
from subtoken_train.training import checkpoints
from subtoken_train.training.run_folder import MARKER_FILE
from tests.support.helpers import interrupted_fit, last_state
from tests.support.run_folders import adapter_tensors, content, same_tensors
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
        "--data.train_file={run}/train.json", "--data.image_folder={run}/images",
        "--model.backbone.path={run}/backbone", "--model.optimizer.weight_decay=-1", "--data.num_workers=-1",
    ],
    every=3,
)  # fmt: skip
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


@pytest.mark.slow
def test_kills_change_nothing(tiny_run, tmp_path):
    """Two at any moment and one that asks: weights and the order of the records are those of a run left alone."""
    settings = "--data.num_workers=2 --model.lora.dropout=0.1 --trainer.accumulate_grad_batches=2".split()
    settings += ["--checkpoint.every_n_train_steps=1", "--trainer.callbacks=samples", "--trainer.max_steps=9"]
    assert main(tiny_run(*settings, output="whole")) == 0
    run, rng = tmp_path / "killed", random.Random()
    for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM):
        last = checkpoints.newest_complete(run / "checkpoints")
        argv = tiny_run(*settings, *(["--resume"] if last else []), output="killed")
        process = subprocess.Popen([sys.executable, "-m", "subtoken_train", *argv], start_new_session=True)
        while process.poll() is None and checkpoints.newest_complete(run / "checkpoints") == last:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.05))
        os.killpg(process.pid, number)
        assert process.wait(60) == (143 if number == signal.SIGTERM else -number)
    assert main(tiny_run(*settings, "--resume", output="killed")) == 0
    whole = tmp_path / "whole"
    assert same_tensors(adapter_tensors(whole / "adapter"), adapter_tensors(run / "adapter"))
    assert (whole / "logs/samples-rank0.jsonl").read_text() == (run / "logs/samples-rank0.jsonl").read_text()
