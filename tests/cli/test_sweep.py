"""The sweep command: overrides and grids, what it prints, what it runs, what it says at the end."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from subtoken_train.cli import sweep
from subtoken_train.cli.main import main
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.cli.sweep import grid_fits, parse_setting, slurm_script, sweep_runs
from subtoken_train.evaluation.runner.dry_run import recipe_of
from subtoken_train.resources import recipe_files, recipe_text
from subtoken_train.training.checkpoints import PARTIAL, STATE, Marker, begin, seal
from tests.support.commands import printed, refused
from tests.support.places import recipe
from tests.support.run_folders import logged
from tests.support.training_memory import RECIPE, tiny_fit

GROUPS, RATE = "model.routing.kept_groups=2,4", "model.optimizer.learning_rate=1e-4,2e-4,3e-4"


@pytest.mark.parametrize(
    ("setting", "key", "values"),
    [
        ("--a.b=1e-4", "a.b", ["1e-4"]),
        ("a=[0,1],[2]", "a", ["[0,1]", "[2]"]),
        ("a={b: 1, c: 2},null", "a", ["{b: 1, c: 2}", "null"]),
    ],
)
def test_a_setting(setting, key, values):
    assert parse_setting(setting) == (key, values)


def test_the_combinations():
    runs = sweep_runs(["r.yaml", "s.yaml"], [GROUPS, RATE], Path("runs/sweep"))
    assert [one.name for one in runs] == [
        f"kept_groups={groups},learning_rate={rate}" for groups in (2, 4) for rate in ("1e-4", "2e-4", "3e-4")
    ]
    settings = ["--model.routing.kept_groups=2", "--model.optimizer.learning_rate=2e-4"]
    place = "--output_dir=runs/sweep/kept_groups=2,learning_rate=2e-4"
    assert runs[1].fit_arguments() == ["fit", "--config", "r.yaml", "--config", "s.yaml", *settings, place]
    # names that end alike are written out, and paths make no folders
    (one,) = sweep_runs(["r.yaml"], ["data.seed=1", "model.routing.seed=2", "data.train_file=a/b c.json"], Path("x"))
    assert (one.name, one.folder.parent) == ("data.seed=1,model.routing.seed=2,train_file=a_b_c.json", Path("x"))


EVIL = "x\ntouch CANARY #\r\u202e`touch CANARY`$(touch CANARY)'\"\\"
"""A name that is a command wherever it stands raw."""


def ran(folder: Path, script: str, number: int) -> list[str]:
    """The words that a task of an array starts, the script run by bash in an empty folder that must stay so."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin/srun").write_text('#!/bin/bash\nprintf "%s\\0" "$@"\n')
    (folder / "bin/srun").chmod(0o755)
    (folder / "empty").mkdir(exist_ok=True)
    own = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": str(number)}
    done = subprocess.run(["bash", "-c", script], env=own, capture_output=True, cwd=folder / "empty", check=True)
    assert (list((folder / "empty").iterdir()), done.stderr) == ([], b"")
    return done.stdout.decode().split("\0")[:-1]


def test_the_slurm_script_runs_the_task_of_its_number(tmp_path):
    runs = sweep_runs([f"{EVIL}.yaml"], [GROUPS, RATE], tmp_path / "a sweep; touch CANARY")
    script = slurm_script(runs, tmp_path / "a sweep; touch CANARY", "a sweep; touch CANARY")
    assert "#SBATCH --array=0-5\n" in script
    for number, one in enumerate(runs):
        assert ran(tmp_path, script, number) == ["subtoken-train", *one.fit_arguments()]


def test_names_of_a_grid_are_no_commands_of_the_script(tmp_path, capsys):
    """A line break in the name of an adapter, of the run that it starts from, and in the place of all of them."""
    Path(f"{EVIL}.yaml").write_text(recipe_text(recipe("tiny_fastv25")))
    second = yaml.safe_load(recipe_text(recipe("tiny_fastv25_s16k4_stage2")))
    second["model"]["stage2"]["adapter"] = f"runs/{EVIL}/adapter"
    Path(f"2{EVIL}.yaml").write_text(yaml.safe_dump(second))
    grid = {"out": "r", "anchors": "none", "tasks": ["scenes_pope"], "arms": [{"adapter": f"runs/2{EVIL}/adapter"}]}
    Path("grid.yaml").write_text(yaml.safe_dump(grid))
    script = printed(capsys, "sweep", "--grid", "grid.yaml", "--slurm")
    words = ["--config", f"{EVIL}.yaml", f"--output_dir=runs/{EVIL}"]
    assert ran(tmp_path, script, 0) == ["subtoken-train", "fit", *words]
    assert len(script.splitlines()) == 11
    first = printed(capsys, "sweep", "--grid", "grid.yaml", "--dry-run").splitlines()[1]
    assert ran(tmp_path, f'subtoken-train() {{ srun "$@"; }}; {first}', 0) == ["fit", *words]
    grid["arms"] = [{"adapter": f"{EVIL}/tiny_fastv25/adapter"}]
    Path("grid.yaml").write_text(yaml.safe_dump(grid))
    assert "which no #SBATCH line takes" in refused(capsys, "sweep", "--grid", "grid.yaml", "--slurm")
    assert not Path("CANARY").exists()


def swept(*extra: str) -> list[str]:
    return ["sweep", "--config", str(RECIPE), "--output_dir", "s", *extra]


def write_grid(*adapters: str) -> str:
    arms = "".join(f"  - adapter: {name}\n" for name in adapters)
    Path("grid.yaml").write_text(f"out: results/x\nanchors: none\ntasks: [scenes_pope]\narms:\n{arms}")
    return "grid.yaml"


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
    fit, recipe = tiny_fit(tmp_path, tiny_family)("--trainer.max_steps=2"), tmp_path / "mine.yaml"
    recipe.write_text(RecipeCLI(fit[1:]).recipe_text())
    folder, missing, started = tmp_path / "s", "data.val_file=null,nowhere.json", processes(main)
    command = ["sweep", "--config", str(recipe), "--output_dir", str(folder), "--set", missing]
    assert main(command) == 1
    table = capsys.readouterr().out
    assert "failed (exit code 2)" in table
    good = folder / "val_file=null"
    assert (good / "adapter").is_dir()
    line = next(line for line in table.splitlines() if line.startswith("val_file=null"))
    assert f"{logged(good, 'train/loss')[-1]:.4g}" in line
    assert len(started) == 2
    assert main(command) == 1
    assert "finished before" in capsys.readouterr().out
    assert [words[-1] for words in started[2:]] == [f"--output_dir={folder / 'val_file=nowhere.json'}"]
    recipe.write_text(recipe.read_text().replace("max_steps: 2", "max_steps: 3"))
    assert "holds a finished run of another recipe; choose another --output_dir" in refused(capsys, *command)


def test_ctrl_c_ends_the_sweep(processes, capsys):
    waits = []

    def end(command):
        waits.append(command)
        if len(waits) == 1:
            raise KeyboardInterrupt  # which reaches the sweep, too
        return 130

    started = processes(end)
    assert main(swept("--set", GROUPS)) == sweep.INTERRUPTED == 130
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


def names(grid: str) -> list[str]:
    return [run.name for run in grid_fits(grid).runs]


def test_every_shipped_grid_has_a_recipe_for_each_adapter():
    """Or ships the adapter; stage 1 comes before stage 2, and no run twice."""
    for name, path in recipe_files().items():
        if not name.startswith("eval/"):
            continue
        fits = grid_fits(str(path))
        assert fits.published == [], name
        runs = [run.name for run in fits.runs]
        assert len(runs) == len(set(runs))
        assert all(runs.index(start) < runs.index(later) for later, start in fits.later.items()), name
        assert all(run.fit_arguments()[:3] == ["fit", "--config", run.name] for run in fits.runs), name


def test_what_a_grid_needs(tmp_path, capsys):
    """Stage 1 before stage 2; what stands is left out; a recipe of one's own comes before a shipped one."""
    words = "grid grid needs the adapter runs/nobody/adapter, which is not here and which no recipe makes"
    grid = write_grid("runs/nobody/adapter")
    assert words in refused(capsys, "sweep", "--grid", grid, "--dry-run")
    fits = grid_fits(write_grid("runs/tiny_fastv25_s16k4_stage2/adapter", "runs/tiny_fastv25/adapter"))
    assert [run.name for run in fits.runs] == ["tiny_fastv25", "tiny_fastv25_s16k4_stage2"]
    assert fits.later == {"tiny_fastv25_s16k4_stage2": "tiny_fastv25"}
    grid = write_grid("checkpoints/adapters/tiny_lora_only", "runs/tiny_fastv25/adapter", "runs/tiny_fastv25")
    fits = grid_fits(grid)
    assert (fits.standing, names(grid)) == (["checkpoints/adapters/tiny_lora_only"], ["tiny_fastv25"])
    (tmp_path / "runs/tiny_fastv25/adapter").mkdir(parents=True)
    (tmp_path / "runs/tiny_fastv25/adapter/subtoken_config.json").write_text("{}")
    assert names(grid) == []
    assert grid_fits(write_grid("publisher/model")).published == ["publisher/model"]
    assert recipe_of("runs/tiny_fastv25/adapter").is_absolute()
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/tiny_fastv25.yaml").write_text("model: {}\n")
    (tmp_path / "mine.yaml").write_text("model: {}\n")
    assert [run.fit_arguments()[2:] for run in grid_fits(write_grid("new/tiny_fastv25", "elsewhere/mine")).runs] == [
        ["recipes/tiny_fastv25.yaml", "--output_dir=new/tiny_fastv25"],
        ["mine.yaml", "--output_dir=elsewhere/mine"],
    ]


def test_an_anchor_without_a_recipe_is_trained_by_that_of_its_arm(tmp_path):
    (tmp_path / "mine.yaml").write_text(recipe("tiny_fastv25_s16k4").read_text())
    (run,) = grid_fits(write_grid("runs/mine_anchor/adapter")).runs
    settings = dict(run.overrides)
    assert (settings["model.routing"], settings["model.reducer.keep_ratio"]) == ("null", "0.15625")
    assert "output_dir" not in settings
    assert run.fit_arguments()[-1] == "--output_dir=runs/mine_anchor"


def test_dry_run_and_slurm_print_and_train_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    lines = printed(capsys, *swept("--set", GROUPS, "--dry-run")).splitlines()
    fit = f"subtoken-train fit --config {RECIPE}"
    commands = [f"{fit} --model.routing.kept_groups={k} --output_dir=s/kept_groups={k}" for k in (2, 4)]
    assert lines[:3] == ["s: 0 adapters exist, 2 to train", *commands]
    assert printed(capsys, *swept("--set", GROUPS, "--slurm")).startswith("#!/bin/bash\n#SBATCH --job-name=s\n")
    grid = write_grid("runs/tiny_fastv25_s16k4_stage2/adapter")
    said = printed(capsys, "sweep", "--grid", grid, "--dry-run").splitlines()
    assert said[:3] == [
        "grid: 0 adapters exist, 2 to train",
        "subtoken-train fit --config tiny_fastv25 --output_dir=runs/tiny_fastv25",
        "subtoken-train fit --config tiny_fastv25_s16k4_stage2 --output_dir=runs/tiny_fastv25_s16k4_stage2",
    ]
    assert all(any(line.endswith("FLOPs: 2 runs") for line in each) for each in (lines, said))
    script = printed(capsys, "sweep", "--grid", grid, "--slurm")
    assert "#SBATCH --job-name=grid\n#SBATCH --array=0-0\n" in script
    assert script.endswith("when the others stand: tiny_fastv25_s16k4_stage2 (starts from tiny_fastv25)\n")
    assert not (tmp_path / "runs").exists()
    write_grid("checkpoints/adapters/tiny_lora_only")
    assert printed(capsys, "sweep", "--grid", grid) == "grid: 1 adapters exist, 0 to train: nothing to do\n"
