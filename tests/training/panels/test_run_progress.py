"""Progress on terminals and in logs."""

import json
from types import SimpleNamespace

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from subtoken_train.training.panels.run_progress import BarProgress, LineProgress, SampleLog
from tests.support.tiny_fits import Toy, fit_toy


@pytest.mark.parametrize(("last", "described"), [(-1, "Epoch 0"), (3, "Epoch 0/2"), (None, "Epoch 0")])
def test_epochs(last, described):
    bar = BarProgress()
    bar._trainer = SimpleNamespace(max_epochs=last, sanity_checking=False)
    assert bar._get_train_description(0).strip() == described


def test_metrics_are_the_run_s_own(tmp_path):
    trainer = SimpleNamespace(loggers=[TensorBoardLogger(tmp_path, version="tb")], progress_bar_metrics={"loss": 0.5})
    assert BarProgress().get_metrics(trainer, None) == {"loss": 0.5}


class Logged(Toy):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        return loss


def test_a_line_every_so_many_steps_and_at_the_end(tmp_path, capsys):
    settings = {"accumulate_grad_batches": 2, "max_epochs": -1, "max_steps": 5}
    fit_toy(Logged(), tmp_path / "checkpoints", LineProgress(2), batches=10, **settings)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 2/5", "step 4/5", "step 5/5"]
    assert all("  loss " in line and line.endswith(" steps/s") for line in lines)


def test_an_open_end_shows_the_epoch_and_other_processes_nothing(tmp_path, capsys):
    fit_toy(Toy(), tmp_path / "checkpoints", LineProgress(3), batches=3)
    assert capsys.readouterr().out.startswith("step 3 (epoch 0)  ")
    quiet = LineProgress(1)
    quiet.disable()
    fit_toy(Toy(), tmp_path / "more", quiet, batches=3)
    assert capsys.readouterr().out == ""


def trainer(tmp_path, consumed):
    data = SimpleNamespace(batches_consumed=lambda: consumed)
    process = SimpleNamespace(broadcast=lambda folder: str(tmp_path))  # what process 0 says
    return SimpleNamespace(
        default_root_dir="elsewhere", strategy=process, global_rank=1, global_step=consumed // 2, datamodule=data
    )


def consume(log, tmp_path, number):
    log.on_train_batch_start(trainer(tmp_path, number), None, (SimpleNamespace(record_ids=[f"r{number}"]), 1, 1), 0)


def test_lines_after_the_checkpoint_are_dropped_on_resume(tmp_path):
    path = tmp_path / "logs" / "samples-rank1.jsonl"
    log = SampleLog()
    log.on_train_start(trainer(tmp_path, 0), None)
    for number in range(4):
        consume(log, tmp_path, number)
    with path.open("a") as file:
        file.write('{"batch": 4, "ids')  # killed while writing
    again = SampleLog()
    again.on_train_start(trainer(tmp_path, 2), None)
    consume(again, tmp_path, 2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"batch": n, "step": n // 2, "ids": [f"r{n}"]} for n in range(3)]
