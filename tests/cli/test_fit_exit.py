"""What ``fit`` says and returns when training ends early."""

from types import SimpleNamespace

import pytest

from subtoken_train.cli.fit_course import train
from subtoken_train.training.checkpoints import Marker, begin, seal
from subtoken_train.training.run_checkpoints import CheckpointFailed, TrainingInterrupted
from subtoken_train.training.run_folder import RunFolder


def ended(error, tmp_path, rank=0):
    """Training that ends with ``error`` in one process; its exit code."""

    def fit(*args, **kwargs):
        assert kwargs["weights_only"] is True
        raise error

    trainer = SimpleNamespace(fit=fit, is_global_zero=rank == 0, global_step=0)
    cli = SimpleNamespace(trainer=trainer, model=None, datamodule=None, output_dir=tmp_path)
    return train(cli, None, RunFolder(tmp_path))


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (TrainingInterrupted(2, "after step 5"), 130, "subtoken-train: SIGINT: stopped after step 5\n"),
        (TrainingInterrupted(15, "after step 5"), 143, "subtoken-train: SIGTERM: stopped after step 5\n"),
        (CheckpointFailed("the disk"), 1, "subtoken-train: the disk\n"),
        (
            OSError(28, "No space left on device", "m.csv"),
            1,
            "stopped: No space left on device: m.csv; nothing that was there is lost: make room, or write elsewhere\n",
        ),
        (ConnectionError("api.wandb.ai"), 1, "subtoken-train: stopped: api.wandb.ai\n"),
    ],
)
def test_one_message_names_the_last_good_checkpoint(tmp_path, capsys, error, code, words):
    assert ended(error, tmp_path) == code
    said = capsys.readouterr().err
    assert words in said
    assert "no checkpoint was written; start again with the same command\n" in said
    seal(begin(tmp_path / "checkpoints", 3), Marker(3, 1, "X", {}))
    ended(error, tmp_path)
    said = capsys.readouterr().err
    assert f"last good checkpoint: {tmp_path}/checkpoints/step-3\n" in said
    assert f"continue with: subtoken-train fit --config {tmp_path}/recipe.yaml --resume\n" in said
    assert said.count("\n") == 4


def test_other_errors_keep_their_traceback_and_user_errors_their_words(tmp_path, capsys):
    with pytest.raises(RuntimeError, match="bug"):
        ended(RuntimeError("bug"), tmp_path)
    assert "stopped by an error" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        ended(FileNotFoundError("a.png"), tmp_path)
    assert capsys.readouterr().err == ""


def test_the_other_processes_of_a_run_that_stops_say_nothing(tmp_path, capsys):
    assert ended(TrainingInterrupted(15, "after step 5"), tmp_path, rank=1) == 0
    assert capsys.readouterr().err == ""
    assert ended(TrainingInterrupted(15, "at once", alone=True), tmp_path, rank=1) == 143
    assert ended(OSError(28, "No space left on device"), tmp_path, rank=1) == 1
