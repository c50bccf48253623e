"""Early stopping: monitors that a run has, modes that fit them, and when it stops."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

from subtoken_train.cli.main import main
from subtoken_train.training.panels.midway_scores import EarlyStoppingConfig, MidwayEvaluation, StopEarly
from subtoken_train.training.panels.throughput import Stopwatch
from tests.support.commands import refused
from tests.support.refusals import refuses
from tests.support.sampling import sampled

ALL = ["eval/accuracy", "val/loss", "val/token_accuracy"]


def test_the_mode_follows_from_the_monitor():
    for monitor, mode in (("val/loss", "min"), ("val/token_accuracy", "max"), ("eval/accuracy", "max")):
        assert EarlyStoppingConfig(monitor).checked_mode(ALL) == mode


REFUSED = [
    ("eval/acuracy", ALL, "unknown early_stopping.monitor 'eval/acuracy'. Did you mean 'eval/acc"),
    ("eval/accuracy", ["val/loss"], "Allowed: val/loss"),
    ("val/loss", [], "the run makes no scores; add an evaluation band or validation data"),
]


@pytest.mark.parametrize(("monitor", "scores", "message"), REFUSED)
def test_mistakes(monitor, scores, message):
    refuses(re.escape(message), EarlyStoppingConfig(monitor).checked_mode, scores)


@pytest.mark.parametrize("numbers", [{"patience": 0}, {"min_delta": -1}, {"min_delta": math.nan}])
def test_numbers_out_of_range(numbers):
    refuses(r"early_stopping\.\w+ is .*; it must be \d", EarlyStoppingConfig, "val/loss", **numbers)


def trainer(score: float, step: int) -> SimpleNamespace:
    off = dict.fromkeys(("is_last_batch", "fast_dev_run", "should_stop"), False)
    strategy = SimpleNamespace(reduce_boolean_decision=lambda decision, **_: decision)
    found = {"callback_metrics": {"eval/accuracy": torch.tensor(score)}, "strategy": strategy, "current_epoch": 0}
    return SimpleNamespace(global_step=step, accumulate_grad_batches=1, **off, **found)


def test_an_evaluations_score_is_checked_after_each_evaluation_and_only_then():
    midway = MidwayEvaluation(lambda backbone: {}, 2, Stopwatch())
    stop = StopEarly(EarlyStoppingConfig("eval/accuracy", patience=2, min_delta=0.1), "max", midway)
    stop.setup(None, None, "fit")
    scores = {2: 0.3, 4: 0.35, 6: 0.5, 8: 0.5, 10: 0.55}  # an improvement is more than 0.1
    stopped = []
    for step in range(1, 11):
        now = trainer(scores.get(step, 0.0), step)
        stop.on_train_batch_end(now, None, None, None, step - 1)
        stop.on_validation_end(now, None)  # has nothing to say to this monitor
        stopped.append(now.should_stop)
    assert stopped == [False] * 9 + [True]


@sampled(
    ("extra", "message"),
    [
        (["--early_stopping.monitor=val/los", "--data.val_file={dev}"], "Did you mean 'val/loss'? Allowed: val/loss"),
        (["--early_stopping.monitor=eval/accuracy"], "the run makes no scores"),
        (["--early_stopping.moniter=val/loss"], "unknown option '--early_stopping.moniter'"),
        (["--early_stopping.monitor=val/loss", "--early_stopping.mode=min"], "unknown option '--early_stopping.mode'"),
        (["--early_stopping.patience=3"], "early_stopping.monitor is not set"),
        (["--evaluation.every_n_steps=3"], "evaluation.data is not set"),
        (["--evaluation.data={dev}", "--evaluation.every_n_steps=0"], "evaluation.every_n_steps is 0; it must be 1"),
        (["--evaluation.data={dev}", "--model.backbone.attention=eager"], "use attention: sdpa"),
        (["--evaluation.data=nowhere.json"], "nowhere.json"),
    ],
    every=3,
)
def test_mistakes_in_a_recipe_come_out_before_anything_is_written(tiny_run, tmp_path, capsys, extra, message):
    dev = tmp_path / "scenes" / "dev.json"
    assert message in refused(capsys, *tiny_run(*(word.format(dev=dev) for word in extra)))
    assert not (tmp_path / "run").exists()


def test_a_fit_stops_early_and_says_so(tiny_run, tmp_path, caplog):
    dev = tmp_path / "scenes" / "dev.json"
    task = [f"--evaluation.data={dev}", "--evaluation.every_n_steps=1", "--evaluation.limit=2"]
    stop = ["--early_stopping.monitor=eval/accuracy", "--early_stopping.patience=1", "--early_stopping.min_delta=1"]
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        assert main(tiny_run(*task, *stop, "--evaluation.max_new_tokens=2")) == 0
    assert "stopped early at step 2: Monitored metric eval/accuracy did not improve" in caplog.text
    assert (tmp_path / "run" / "adapter").is_dir()  # a run that stops early is a finished run
