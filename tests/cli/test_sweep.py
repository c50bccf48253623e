"""The sweep command: the grid, what it prints, what it runs, what it says at the end."""

from __future__ import annotations

import csv
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from subtoken_train.cli import sweep
from subtoken_train.cli.main import main
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.cli.sweep import parse_setting, slurm_script, sweep_runs
from subtoken_train.resources import recipe_text
from subtoken_train.training.checkpoints import PARTIAL, STATE, Marker, begin, seal
from tests.support.commands import printed, refused
from tests.support.places import recipe
from tests.support.sampling import sampled
from tests.support.tiny_fits import RECIPE, tiny_fit

GROUPS, RATE = "model.routing.kept_groups=2,4", "model.optimizer.learning_rate=1e-4,2e-4,3e-4"


@pytest.mark.parametrize(
    ("setting", "key", "values"),
    [
        ("a.b=1,2", "a.b", ["1", "2"]),
        ("--a.b=1e-4", "a.b", ["1e-4"]),
        ("a= x , y ", "a", ["x", "y"]),
        ("a=[0,1],[2]", "a", ["[0,1]", "[2]"]),
        ("a={b: 1, c: 2},null", "a", ["{b: 1, c: 2}", "null"]),
        ("a=b=c", "a", ["b=c"]),
    ],
)
def test_a_setting(setting, key, values):
    assert parse_setting(setting) == (key, values)


@pytest.mark.parametrize("setting", ["a", "a=", "=1", "a=1,,2", "a=1,"])
def test_settings_that_are_none(setting):
    with pytest.raises(ValueError, match=r"must be KEY=VALUE,VALUE, for instance model\.routing\.kept_groups=2,4,8"):
        parse_setting(setting)


def test_the_grid():
    runs = sweep_runs(["r.yaml", "s.yaml"], [GROUPS, RATE], Path("runs/sweep"))
    assert [one.name for one in runs] == [
        f"kept_groups={groups},learning_rate={rate}" for groups in (2, 4) for rate in ("1e-4", "2e-4", "3e-4")
    ]
    assert runs[1].fit_arguments() == [
        "fit",
        "--config",
        "r.yaml",
        "--config",
        "s.yaml",
        "--model.routing.kept_groups=2",
        "--model.optimizer.learning_rate=2e-4",
        "--output_dir=runs/sweep/kept_groups=2,learning_rate=2e-4",
    ]


def test_names_that_end_alike_are_written_out_and_paths_make_no_folders():
    (one,) = sweep_runs(["r.yaml"], ["data.seed=1", "model.routing.seed=2", "data.train_file=a/b c.json"], Path("x"))
    assert one.name == "data.seed=1,model.routing.seed=2,train_file=a_b_c.json"
    assert one.folder.parent == Path("x")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([GROUPS, "model.routing.kept_groups=8"], "--set model.routing.kept_groups is given twice"),
        (["a=1,1"], "two runs would share the folder a=1"),
        (["a=b/c,b:c"], "two runs would share the folder a=b_c"),
        (["output_dir=x"], "--output_dir DIR moves all of them"),
        (["--resume=true"], "a sweep sets it for every run itself"),
    ],
)
def test_grids_that_are_none(settings, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the whole message is compared below
        sweep_runs(["r.yaml"], settings, Path("x"))
    assert message in str(caught.value)


EVIL = "x\ntouch CANARY #\r\u202e`touch CANARY`$(touch CANARY)'\"\\"
"""A name that is a command wherever it stands raw."""


def ran(folder: Path, script: str, number: int) -> list[str]:
    """The words that a task of an array starts, the script run by bash in an empty folder that must stay so."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin/srun").write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    (folder / "bin/srun").chmod(0o755)
    (folder / "empty").mkdir(exist_ok=True)
    environment = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": str(number)}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, cwd=folder / "empty", check=True
    )
    assert (list((folder / "empty").iterdir()), done.stderr) == ([], b"")
    return done.stdout.decode().split("\0")[:-1]


def test_the_slurm_script_runs_the_task_of_its_number(tmp_path):
    runs = sweep_runs([f"{EVIL}.yaml"], [GROUPS, RATE], tmp_path / "a sweep; touch CANARY")
    script = slurm_script(runs, tmp_path / "a sweep; touch CANARY")
    assert "#SBATCH --array=0-5\n" in script
    for number, one in enumerate(runs):
        assert ran(tmp_path, script, number) == ["subtoken-train", *one.fit_arguments()]


def test_names_of_a_grid_are_no_commands_of_the_script(tmp_path, capsys, monkeypatch):
    """A line break in the name of an adapter, of the run that it starts from, and in the place of all of them."""
    monkeypatch.chdir(tmp_path)
    Path(f"{EVIL}.yaml").write_text(recipe_text(recipe("tiny_fastv25")))
    second = yaml.safe_load(recipe_text(recipe("tiny_fastv25_s16k4_stage2")))
    second["model"]["stage2"]["adapter"] = f"runs/{EVIL}/adapter"
    Path(f"2{EVIL}.yaml").write_text(yaml.safe_dump(second))
    grid = {"out": "r", "anchors": "none", "tasks": ["scenes_pope"], "arms": [{"adapter": f"runs/2{EVIL}/adapter"}]}
    Path("grid.yaml").write_text(yaml.safe_dump(grid))
    script = printed(capsys, "sweep", "--grid", "grid.yaml", "--slurm")
    words = ["--config", f"{EVIL}.yaml", f"--output_dir=runs/{EVIL}"]
    assert ran(tmp_path, script, 0) == ["subtoken-train", "fit", *words]
    assert len(script.splitlines()) == 10
    first = printed(capsys, "sweep", "--grid", "grid.yaml", "--dry-run").splitlines()[1]
    assert ran(tmp_path, f'subtoken-train() {{ srun "$@"; }}; {first}', 0) == ["fit", *words]
    grid["arms"] = [{"adapter": f"{EVIL}/tiny_fastv25/adapter"}]
    Path("grid.yaml").write_text(yaml.safe_dump(grid))
    assert "which no #SBATCH line can name" in refused(capsys, "sweep", "--grid", "grid.yaml", "--slurm")
    assert not Path("CANARY").exists()


def swept(folder: Path, *extra: str) -> list[str]:
    return ["sweep", "--config", str(RECIPE), "--output_dir", str(folder), *extra]


def test_dry_run_and_slurm_print_and_run_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    assert main(swept(tmp_path / "s", "--set", GROUPS, "--dry-run")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        f"subtoken-train fit --config {RECIPE} --model.routing.kept_groups={k} "
        f"--output_dir={tmp_path / 's'}/kept_groups={k}"
        for k in (2, 4)
    ]
    assert main(swept(tmp_path / "s", "--set", GROUPS, "--slurm")) == 0
    assert capsys.readouterr().out.startswith("#!/bin/bash\n")
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "model.routing.kept_group=2,4",
            "unknown option '--model.routing.kept_group'. Did you mean '--model.routing.kept_groups'?",
        ),
        ("trainer.max_stepss=1", "unknown option '--trainer.max_stepss'. Did you mean '--trainer.max_steps'?"),
        ("data.batch_size=8,many", "data.batch_size is 'many'; it must be a whole number"),  # the last of the grid
    ],
)
def test_a_mistake_anywhere_in_the_grid_is_one_line_and_nothing_runs(tmp_path, capsys, monkeypatch, setting, message):
    monkeypatch.setattr(subprocess, "Popen", None)
    assert main(swept(tmp_path / "s", "--set", setting)) == 2
    assert capsys.readouterr().err == f"subtoken-train: error: {message}\n"
    assert not (tmp_path / "s").exists()


@pytest.fixture
def processes(monkeypatch):
    """A function from how a command ends to the list of commands that are started: none is, ``wait`` asks it."""

    def put(end):
        started = []

        class Process:
            def __init__(self, command: list[str]) -> None:
                assert command[1:3] == ["-m", "subtoken_train"]
                started.append(command[3:])

            def wait(self) -> int:
                return end(started[-1])

        monkeypatch.setattr(subprocess, "Popen", Process)
        return started

    return put


def test_a_sweep_goes_on_after_a_failure_and_skips_what_is_finished(tmp_path, tiny_family, processes, capsys):
    fit = tiny_fit(tmp_path, tiny_family)("--trainer.max_steps=2")
    recipe = tmp_path / "mine.yaml"
    RecipeCLI(fit[1:]).save_recipe(recipe)
    started = processes(main)
    folder = tmp_path / "s"
    command = ["sweep", "--config", str(recipe), "--output_dir", str(folder), "--set", "model.routing.num_groups=7,16"]
    assert main(command) == 1  # 7 groups divide no value vector: a fit's mistake, not the parser's
    table = capsys.readouterr().out
    assert "failed (exit code 2)" in table
    assert (folder / "num_groups=16" / "adapter").is_dir()
    with (folder / "num_groups=16" / "logs" / "csv" / "metrics.csv").open() as file:
        last = [row["train/loss"] for row in csv.DictReader(file) if row["train/loss"]][-1]
    assert f"{float(last):.4g}" in next(line for line in table.splitlines() if "num_groups=16" in line and "│" in line)
    assert len(started) == 2
    assert main(command) == 1
    assert "finished before" in capsys.readouterr().out
    assert [words[-1] for words in started[2:]] == [f"--output_dir={folder / 'num_groups=7'}"]
    assert main([*command[:-1], "model.routing.num_groups=16"]) == 0
    recipe.write_text(recipe.read_text().replace("max_steps: 2", "max_steps: 3"))
    capsys.readouterr()
    assert "holds a finished run of another recipe; choose another --output_dir" in refused(capsys, *command)


@sampled("code", [130, 0], every=2)
def test_ctrl_c_ends_the_sweep(tmp_path, processes, capsys, code):
    waits = []

    def end(command):
        waits.append(command)
        if code == 0 and len(waits) == 1:
            raise KeyboardInterrupt  # reaches the sweep, too
        return 130

    started = processes(end)
    assert main(swept(tmp_path / "s", "--set", GROUPS)) == 130
    assert len(started) == 1
    assert "interrupted" in capsys.readouterr().out


def test_a_stopped_run_is_resumed(tmp_path, processes):
    (one,) = sweep_runs([str(RECIPE)], ["data.seed=1"], tmp_path)
    started = processes(lambda command: 0)
    sweep.run_one(one)
    (begin(one.folder / "checkpoints", 1) / STATE).write_bytes(b"")
    seal(one.folder / "checkpoints" / f"step-1{PARTIAL}", Marker(1, 1, "SingleDeviceStrategy", {}))
    sweep.run_one(one)
    assert [command[-1] for command in started] == [f"--output_dir={one.folder}", "--resume"]
