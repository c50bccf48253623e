"""``sweep --grid``: which fits a grid needs, in which order, what stands, what is refused; a tiny grid is trained."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from subtoken_train.cli.grid_fits import grid_fits
from subtoken_train.cli.main import main
from subtoken_train.evaluation.runner.dry_run import recipe_of
from subtoken_train.resources import recipe_files
from tests.support.commands import printed, refused
from tests.support.places import recipe
from tests.support.tiny_fits import tiny_fit


def write_grid(*adapters: str) -> str:
    arms = "".join(f"  - adapter: {name}\n" for name in adapters)
    Path("grid.yaml").write_text(f"out: results/x\nanchors: none\ntasks: [scenes_pope]\narms:\n{arms}")
    return "grid.yaml"


def names(grid: str) -> list[str]:
    return [run.name for run in grid_fits(grid).runs]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


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


def test_the_paper_s_first_table_and_stage_1_before_stage_2():
    fits, name = grid_fits("table1_llava7b"), "llava7b_fastv25_s16k4_anchor"
    assert len(fits.runs) == 17
    assert fits.runs[1].fit_arguments() == ["fit", "--config", name, f"--output_dir=runs/{name}"]
    fits = grid_fits(write_grid("runs/tiny_fastv25_s16k4_stage2/adapter", "runs/tiny_fastv25/adapter"))
    assert [run.name for run in fits.runs] == ["tiny_fastv25", "tiny_fastv25_s16k4_stage2"]
    assert fits.later == {"tiny_fastv25_s16k4_stage2": "tiny_fastv25"}


def test_what_stands_is_left_out(tmp_path):
    grid = write_grid("checkpoints/adapters/tiny_lora_only", "runs/tiny_fastv25/adapter", "runs/tiny_fastv25")
    fits = grid_fits(grid)
    assert (fits.standing, names(grid)) == (["checkpoints/adapters/tiny_lora_only"], ["tiny_fastv25"])
    (tmp_path / "runs/tiny_fastv25/adapter").mkdir(parents=True)
    (tmp_path / "runs/tiny_fastv25/adapter/subtoken_config.json").write_text("{}")
    assert names(grid) == []


def test_a_recipe_of_ones_own_comes_before_a_shipped_one(tmp_path):
    assert recipe_of("runs/tiny_fastv25/adapter").is_absolute()
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/tiny_fastv25.yaml").write_text("model: {}\n")
    (tmp_path / "mine.yaml").write_text("model: {}\n")
    grid = write_grid("runs/tiny_fastv25/adapter", "elsewhere/mine")
    assert [run.fit_arguments()[2:] for run in grid_fits(grid).runs] == [
        ["recipes/tiny_fastv25.yaml", "--output_dir=runs/tiny_fastv25"],
        ["mine.yaml", "--output_dir=elsewhere/mine"],
    ]


def test_an_anchor_without_a_recipe_is_trained_by_that_of_its_arm(tmp_path):
    (tmp_path / "mine.yaml").write_text(recipe("tiny_fastv25_s16k4").read_text())
    (run,) = grid_fits(write_grid("runs/mine_anchor/adapter")).runs
    settings = dict(run.overrides)
    assert (settings["model.routing"], settings["model.reducer.keep_ratio"]) == ("null", "0.15625")
    assert "output_dir" not in settings
    assert run.fit_arguments()[-1] == "--output_dir=runs/mine_anchor"


def test_adapters_that_can_never_exist_are_refused(capsys, tmp_path):
    line = refused(capsys, "sweep", "--grid", write_grid("runs/nobody/adapter"), "--dry-run")
    words = "grid grid needs the adapter runs/nobody/adapter, which is not here and which no recipe makes"
    assert line.startswith(words)
    text = recipe("tiny_fastv25_s16k4").read_text().replace("num_groups: 16 ", "num_groups: 7 ")
    (tmp_path / "mine.yaml").write_text(text)
    line = refused(capsys, "sweep", "--grid", write_grid("runs/mine/adapter"))
    assert line.startswith("mine: ")
    assert "7" in line
    assert "publisher/model" in grid_fits(write_grid("publisher/model")).head()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--grid", "grid.yaml", "--set", "a=1"], "--set does not apply to --grid"),
        (["--grid", "grid.yaml", "--output_dir", "x"], "--output_dir does not apply to --grid"),
        (["--config", "tiny_fastv25"], "a sweep needs --config RECIPE and --set KEY=A,B, or --grid GRID"),
        (["--grid", "tabel1_llava7b"], "grid tabel1_llava7b is not a file. Did you mean 'table1_llava7b.yaml'?"),
    ],
)
def test_options_that_do_not_go_together(capsys, argv, message):
    write_grid("runs/tiny_fastv25/adapter")
    assert message in refused(capsys, "sweep", *argv)


def test_dry_run_and_slurm_print_and_train_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    grid = write_grid("runs/tiny_fastv25_s16k4_stage2/adapter")
    said = printed(capsys, "sweep", "--grid", grid, "--dry-run").splitlines()
    assert said[:3] == [
        "grid: 0 adapters stand, 2 to train",
        "subtoken-train fit --config tiny_fastv25 --output_dir=runs/tiny_fastv25",
        "subtoken-train fit --config tiny_fastv25_s16k4_stage2 --output_dir=runs/tiny_fastv25_s16k4_stage2",
    ]
    assert any(line.endswith("FLOPs: 2 runs") for line in said)
    script = printed(capsys, "sweep", "--grid", grid, "--slurm")
    assert "#SBATCH --job-name=grid\n#SBATCH --array=0-0\n" in script
    assert script.endswith("when the others stand: tiny_fastv25_s16k4_stage2 (starts from tiny_fastv25)\n")
    assert not (tmp_path / "runs").exists()
    write_grid("checkpoints/adapters/tiny_lora_only")
    assert printed(capsys, "sweep", "--grid", grid) == "grid: 1 adapters stand, 0 to train: nothing to do\n"


@pytest.mark.slow
def test_a_tiny_grid_is_trained_stopped_and_gone_on_with(tmp_path, tiny_family, monkeypatch):
    """Two arms and what one of them starts from; the second call trains what is left, the third nothing."""
    from subtoken_train.cli import sweep
    from subtoken_train.cli.recipe import RecipeCLI

    fit = tiny_fit(tmp_path, tiny_family)
    RecipeCLI(fit("--model.routing=null", "--trainer.max_steps=2")[1:]).save_recipe(tmp_path / "first.yaml")
    second = fit("--trainer.max_steps=2", "--model.stage2.adapter=runs/first/adapter")
    RecipeCLI(second[1:]).save_recipe(tmp_path / "second.yaml")
    started = []

    class Process:
        def __init__(self, command: list[str]) -> None:
            started.append(command[3:])

        def wait(self) -> int:
            return 130 if len(started) == 2 else main(started[-1])

    monkeypatch.setattr(subprocess, "Popen", Process)
    grid = write_grid("runs/second/adapter", "runs/first/adapter")
    assert main(["sweep", "--grid", grid]) == sweep.INTERRUPTED
    assert names(grid) == ["second"]
    assert main(["sweep", "--grid", grid]) == 0
    assert names(grid) == []
    assert [command[2] for command in started] == ["first.yaml", "second.yaml", "second.yaml"]
    assert main(["sweep", "--grid", grid]) == 0
    assert len(started) == 3
