"""The bar of a terminal names no last epoch where there is none, and no logger's version."""

from types import SimpleNamespace

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from subtoken_train.training.panels.run_progress import BarProgress


@pytest.mark.parametrize(("last", "described"), [(-1, "Epoch 0"), (3, "Epoch 0/2"), (None, "Epoch 0")])
def test_epochs(last, described):
    bar = BarProgress()
    bar._trainer = SimpleNamespace(max_epochs=last, sanity_checking=False)
    assert bar._get_train_description(0).strip() == described


def test_metrics_are_the_run_s_own(tmp_path):
    trainer = SimpleNamespace(loggers=[TensorBoardLogger(tmp_path, version="tb")], progress_bar_metrics={"loss": 0.5})
    assert BarProgress().get_metrics(trainer, None) == {"loss": 0.5}
