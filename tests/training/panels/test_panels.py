"""Panels read the device on logging steps only, and name dead tensors; progress; early stopping and its monitors."""

import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DeepSpeedStrategy

from subtoken_train.cli.main import main
from subtoken_train.engine.prompt_pass import Rows
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.reducers import build_reducer
from subtoken_train.routing.bank import RoutingState
from subtoken_train.training.module import StepRecord, SubTokenModule
from subtoken_train.training.panels import logs_next, logs_now, stepped
from subtoken_train.training.panels.midway_scores import EarlyStoppingConfig, MidwayEvaluation, StopEarly
from subtoken_train.training.panels.per_layer import RoutingPanel, SilentTensors, TrainedPanel
from subtoken_train.training.panels.run_progress import BarProgress, LineProgress, SampleLog
from subtoken_train.training.panels.throughput import Stopwatch, Throughput, flops_of
from tests.support.commands import refused
from tests.support.refusals import refuses
from tests.support.sampling import sampled
from tests.support.training_memory import Toy, fit_toy

LAYER = "compressed.model.model.layers.{}.self_attn.{}.lora_{}.default.weight"
ROUTER = "compressed.bank.selectors.{}.token.weight"


class Notes:
    """A logger that remembers the last call."""

    def log_metrics(self, metrics, step):
        self.found, self.step = metrics, step

    def taken(self):
        """What was logged since the last time, or nothing."""
        found, self.found = vars(self).get("found", {}), {}
        assert found.pop("epoch", 1) == 1
        return found


NOTES = Notes()


def trainer(step=0, every=2, accumulate=1, last=False, strategy=None, scaler=None):
    """What panels read of a trainer."""
    steps = {"global_step": step, "log_every_n_steps": every, "accumulate_grad_batches": accumulate}
    parts = {"precision_plugin": SimpleNamespace(scaler=scaler), "loggers": [NOTES], "current_epoch": 1}
    optimizers = [SimpleNamespace(param_groups=[{"name": "lora", "lr": 0.5}])]
    return SimpleNamespace(**steps, **parts, is_last_batch=last, strategy=strategy, optimizers=optimizers)


def module(**parameters):
    """A module that trains ``parameters`` and notes what is logged."""
    built = SubTokenModule(backbone=BackboneConfig(path="none"), reducer=build_reducer("none"))
    built.trained = lambda: parameters
    built.logged = {}
    built.log = lambda name, value, **_: built.logged.update({name: value})
    NOTES.taken()
    return built


def parameter(values, gradient=None):
    tensor = torch.nn.Parameter(torch.tensor(values, dtype=torch.float32))
    tensor.grad = None if gradient is None else torch.tensor(gradient, dtype=torch.float32)
    return tensor


def record(device="cpu", state=None, kept=None, rows=((1, 2, 4), (1, 2, 4))):
    """Two samples, 5 and 3 tokens, of which 3 and 3 ran."""
    regions = torch.tensor([[1, 2, 2, 2, 4], [1, 2, 4, 0, 0]], device=device)
    rows_regions = torch.tensor(rows, device=device)
    rows = Rows.whole(rows_regions, rows_regions)
    return StepRecord(regions, rows, [(0, 2, rows)], state, kept or {})


@pytest.mark.parametrize(
    ("step", "batch_idx", "options", "ended", "logs"),
    [
        (2, 1, {}, True, True),
        (3, 2, {}, True, False),
        (2, 4, {"accumulate": 4}, False, False),  # a micro-batch of the step after a logging step
        (2, 7, {"accumulate": 4}, True, True),
        (2, 5, {"accumulate": 4, "last": True}, True, True),
        (2, 1, {"every": 0}, True, False),
    ],
)
def test_logging_steps(step, batch_idx, options, ended, logs):
    found = trainer(step, **options)
    assert stepped(found, batch_idx) is ended
    assert logs_now(found, batch_idx) is logs
    assert logs_next(trainer(step - 1, **options)) == (options.get("every", 2) > 0 and step % 2 == 0)


@pytest.mark.parametrize("panel", [Throughput, RoutingPanel])
def test_the_device_is_read_on_logging_steps_only(panel):
    """Tensors on the meta device have no values: reading one is an error."""
    panel, pl = panel(), module()
    empty = torch.zeros(2, 3, dtype=torch.long, device="meta")
    state = RoutingState(empty == 0, empty == 1, empty, empty[:, 0])
    state.masks[0] = torch.ones(2, 3, 4, dtype=torch.bool, device="meta")
    pl.last_step = record("meta", state)
    panel.on_train_batch_end(trainer(1), pl, None, None, 0)
    assert not pl.logged
    with pytest.raises((RuntimeError, NotImplementedError)):
        panel.on_train_batch_end(trainer(2), pl, None, None, 1)


def test_throughput_counts_every_micro_batch_since_the_last_reading():
    panel, pl = Throughput(), module()
    pl.last_step = record()
    panel.watch.seconds = lambda: 4.0
    panel.on_train_batch_end(trainer(1), pl, None, None, 0)
    panel.on_train_batch_end(trainer(2), pl, None, None, 1)
    speeds = {"tokens_per_s/before": 2 * 8 / 4, "tokens_per_s/after": 2 * 6 / 4, "learning_rate/lora": 0.5}
    assert pl.logged == speeds | {"train/kept_visual_fraction": 2 / 4, "train/kv_fraction": 2 / 4}


def test_routing_panel_counts_the_tokens_that_a_context_reducer_kept():
    panel, pl = RoutingPanel(), module()
    zeros = torch.zeros(1, 3, dtype=torch.long)
    state = RoutingState(torch.tensor([[True, True, True]]), zeros == 1, zeros, zeros[:, 0])
    state.masks[1] = torch.tensor([[[True, False], [True, True], [True, False]]])  # the second is not kept
    pl.last_step = record(state=state, kept={1: torch.tensor([[True, False, True]])}, rows=((2, 2, 2),))
    panel.on_train_batch_end(trainer(2), pl, None, None, 1)
    assert NOTES.step == 1
    entropies = {"mask_entropy/layer_1": 0.0, "group_usage_entropy/layer_1": 0.0}
    assert NOTES.taken() == entropies | {"group_usage_max/layer_1": 1.0}


def test_trained_panel_takes_a_layers_tensors_together():
    tensors = {
        LAYER.format(0, "q_proj", "B"): parameter([0.0, 0.0], [3.0, 0.0]),
        LAYER.format(0, "v_proj", "B"): parameter([6.0, 8.0], [0.0, 4.0]),
        ROUTER.format(1): parameter([2.0], [12.0]),
    }
    pl = module(**tensors)
    panel = TrainedPanel()
    panel.on_before_optimizer_step(trainer(0), pl, None)
    assert NOTES.taken() == {}
    panel.on_before_optimizer_step(trainer(1), pl, None)
    norms = {"gradient_norm/lora_B/layer_0": 5.0, "gradient_norm/router/layer_1": 12.0, "gradient_norm/total": 13.0}
    assert NOTES.taken() == norms | {"weight_norm/lora_B/layer_0": 10.0, "weight_norm/router/layer_1": 2.0}


def test_deepspeed_keeps_its_gradients(caplog):
    pl = module(**{ROUTER.format(0): parameter([2.0]), ROUTER.format(1): parameter([])})
    strategy = DeepSpeedStrategy.__new__(DeepSpeedStrategy)
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        TrainedPanel().on_train_start(trainer(0, strategy=strategy), pl)
    assert "gradient_norm is not logged" in caplog.text
    TrainedPanel().on_before_optimizer_step(trainer(1, strategy=strategy), pl, None)
    assert NOTES.taken() == {"weight_norm/router/layer_0": 2.0}  # stage 3 leaves empty tensors


def test_silent_tensors_are_named_once(recwarn):
    moves = parameter([0.0], [1.0])
    tensors = {
        LAYER.format(0, "q_proj", "B"): moves,
        LAYER.format(1, "q_proj", "B"): parameter([0.0], [0.0]),
        LAYER.format(2, "v_proj", "B"): parameter([0.0], [1.0]),
        LAYER.format(2, "v_proj", "A"): parameter([1.0], [0.0]),  # A is not watched: its gradient starts at zero
        ROUTER.format(3): parameter([1.0], [0.0]),
    }
    pl, watcher = module(**tensors), SilentTensors(after=2)
    watcher.on_train_start(trainer(0), pl)
    for step in range(4):
        watcher.on_before_optimizer_step(trainer(step, every=50), pl, None)
        with torch.no_grad():
            moves += 1
        watcher.on_train_batch_end(trainer(step + 1, every=50), pl, None, None, step)
    assert [str(warning.message) for warning in recwarn] == [
        "some of what should train does not, after 2 steps. no gradient but zeros: lora_B of layers 1 and router of "
        "layers 3; no change: lora_B of layers 2. Check that the learning rate is not 0 and that labels and routed "
        "tokens reach the loss"
    ]


def test_flops_of_a_module_know_where_its_weights_train(tiny_family):
    first, second = "q_proj", "v_proj"
    tensors = {
        LAYER.format(1, first, "A"): parameter([1.0, 2.0]),
        LAYER.format(1, second, "B"): parameter([1.0]),
        ROUTER.format(3): parameter([1.0] * 5),
    }
    flops = flops_of(tiny_family, module(**tensors).trained())
    assert flops.trained == [0, 3, 0, 5]
    weights = [p.numel() for name, p in tiny_family.decoder.layers[0].named_parameters() if p.dim() == 2]
    assert flops.size.layer_weights == sum(weights)


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


def of_samples(tmp_path, consumed):
    data = SimpleNamespace(batches_consumed=lambda: consumed)
    process = SimpleNamespace(broadcast=lambda folder: str(tmp_path))  # what process 0 says
    return SimpleNamespace(
        default_root_dir="elsewhere", strategy=process, global_rank=1, global_step=consumed // 2, datamodule=data
    )


def consume(log, tmp_path, number):
    log.on_train_batch_start(of_samples(tmp_path, number), None, (SimpleNamespace(record_ids=[f"r{number}"]), 1, 1), 0)


def test_lines_after_the_checkpoint_are_dropped_on_resume(tmp_path):
    path = tmp_path / "logs" / "samples-rank1.jsonl"
    log = SampleLog()
    log.on_train_start(of_samples(tmp_path, 0), None)
    for number in range(4):
        consume(log, tmp_path, number)
    with path.open("a") as file:
        file.write('{"batch": 4, "ids')  # killed while writing
    again = SampleLog()
    again.on_train_start(of_samples(tmp_path, 2), None)
    consume(again, tmp_path, 2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"batch": n, "step": n // 2, "ids": [f"r{n}"]} for n in range(3)]


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


def scored_trainer(score: float, step: int) -> SimpleNamespace:
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
        now = scored_trainer(scores.get(step, 0.0), step)
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
