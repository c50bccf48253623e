"""An adapter is found by its folder or by its run's, everywhere; what is none is said in words."""

from __future__ import annotations

import shutil

import pytest

from subtoken_train.artifact.hub import adapter_folder, find_adapter
from subtoken_train.cli.main import main
from subtoken_train.resources import resource
from tests.support.sampling import sampled

SHIPPED, SAMPLES = resource("checkpoints/adapters/tiny_fastv25_s16k4"), resource("data/samples")


@pytest.fixture
def run(tmp_path):
    """A finished run's folder, as ``fit`` leaves it."""
    folder = tmp_path / "mine"
    (folder / "checkpoints" / "step-1").mkdir(parents=True)
    shutil.copytree(SHIPPED, folder / "adapter")
    return folder


def test_a_run_stands_for_its_adapter(run):
    assert adapter_folder(run) == adapter_folder(run / "adapter") == run / "adapter"


def test_a_run_without_an_adapter_says_what_makes_one(run):
    shutil.rmtree(run / "adapter")
    with pytest.raises(ValueError, match=r"mine is a run without a finished adapter; 'subtoken-train export "):
        adapter_folder(run)


def test_a_backbone_stays_one_whatever_lies_in_it(run):
    (run / "config.json").write_text("{}")
    assert find_adapter(run) is None


@sampled(
    "argv",
    [
        ["generate", "--adapter", "RUN", "--prompt", "is there a 7 ?", "--image", str(SAMPLES / "a.png")],
        ["evaluate", "--adapter", "RUN", "--data", str(SAMPLES / "questions.json")],
        ["evaluate", "--adapter", "RUN", "--tasks", "recall", "--out", "OUT"],
        ["diagnose", "--adapter", "RUN", "--data", str(SAMPLES / "questions.json"), "--limit", "2", "--out", "OUT"],
        ["export", "RUN", "OUT"],
    ],
    every=3,
)
def test_commands_take_runs(run, tmp_path, capsys, argv):
    out = tmp_path / "out"
    code = main([{"RUN": str(run), "OUT": str(out)}.get(word, word) for word in argv])
    if "recall" in argv:  # found, and it reads images
        assert "the model of tiny_fastv25_s16k4-seed0 reads images" in capsys.readouterr().err
        assert not out.exists()
    else:
        assert code == 0, capsys.readouterr().err
