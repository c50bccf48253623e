"""What ends a run early, of one process or two: signals, broken states, full disks; what is saved is never broken."""

import json
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import SLURMEnvironment

from subtoken_train.training.checkpoints import incomplete, newest_complete, read_marker, state_path
from subtoken_train.training.run_checkpoints import RandomState, RunStopped, weights_are_finite
from tests.support.eval_runs import free_port
from tests.support.training_memory import At, Toy, fit_toy, present_handlers, send


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def names(folder):
    return sorted(item.name for item in folder.iterdir())


def test_the_last_ones_stay(folder):
    fit_toy(Toy(), folder)
    assert names(folder) == ["step-5", "step-6"]
    marker = read_marker(folder / "step-6")
    assert (marker.step, marker.world_size, marker.strategy) == (6, 1, "SingleDeviceStrategy")
    assert marker.trained == {"layer.weight": [4, 4], "layer.bias": [4]}
    assert torch.load(state_path(folder / "step-6"), weights_only=True)["global_step"] == 6


def test_the_last_step_is_saved_whatever_ends_the_run(folder, tmp_path):
    fit_toy(Toy(), folder, every=4)
    assert names(folder) == ["step-4", "step-6"]
    fit_toy(Toy(), tmp_path / "steps", every=4, max_epochs=-1, max_steps=7)
    assert names(tmp_path / "steps") == ["step-4", "step-7"]
    fit_toy(Toy(), tmp_path / "stop", At(1, stop, end=True), every=4)
    assert names(tmp_path / "stop") == ["step-2"]


def stop(trainer):
    trainer.should_stop = True


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_a_stop_inside_an_accumulation_window_waits_for_its_step(folder, batch):
    assert fit_toy(Toy(), folder, At(batch, stop, end=True), accumulate_grad_batches=3).global_step == 1
    assert names(folder) == ["step-1"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("batch", [3, 4, 5])
def test_a_signal_finishes_the_step_saves_and_leaves(folder, number, code, batch):
    before = present_handlers()
    with pytest.raises(RunStopped, match=f"{signal.Signals(number).name}: stopped after step 2") as stopped:
        fit_toy(Toy(), folder, At(batch, send(number)), batches=9, every=100, accumulate_grad_batches=3)
    assert stopped.value.exit_code == code
    assert names(folder) == ["step-2"]
    assert present_handlers() == before


def test_the_second_signal_leaves_at_once(folder):
    twice = [At(batch, send(signal.SIGINT)) for batch in (4, 5)]
    with pytest.raises(RunStopped, match="stopped at once"):
        fit_toy(Toy(), folder, *twice, every=100, accumulate_grad_batches=6)
    assert not folder.exists()


def test_a_signal_before_training_leaves_at_once(folder):
    before = present_handlers()

    class Early(Toy):
        def configure_model(self):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(RunStopped, match="stopped at once") as stopped:
        fit_toy(Early(), folder)
    assert stopped.value.exit_code == 143
    assert present_handlers() == before


def test_a_signal_during_validation_need_not_wait_for_its_end(folder):
    class Validated(Toy):
        seen = 0

        def validation_step(self, batch, batch_idx):
            self.seen += 1
            os.kill(os.getpid(), signal.SIGTERM)

    module = Validated()
    with pytest.raises(RunStopped, match="after step 3"):
        fit_toy(module, folder, every=100, validate=4, val_check_interval=3)
    assert module.seen == 1
    assert names(folder) == ["step-3"]


def slurm(monkeypatch, tmp_path, code=0):
    """Pretend to be job 77 of a cluster; its ``scontrol`` notes what it is told."""
    for name, value in {"JOB_ID": "77", "NTASKS": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/told\necho no such job >&2\nexit {code}\n')
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def test_slurms_signal_saves_first_and_requeues(folder, tmp_path, monkeypatch):
    slurm(monkeypatch, tmp_path)
    with pytest.raises(RunStopped, match="SIGUSR1: stopped after step 2; job 77 is requeued") as stopped:
        fit_toy(Toy(), folder, At(1, send(signal.SIGUSR1)), every=100, plugins=[SLURMEnvironment()])
    assert stopped.value.exit_code == 138
    assert names(folder) == ["step-2"]
    assert (tmp_path / "told").read_text() == "requeue 77\n"


def test_a_requeue_that_fails_is_said(folder, tmp_path, monkeypatch):
    slurm(monkeypatch, tmp_path, code=1)
    with pytest.raises(RunStopped, match=r"job 77 could not be requeued \(no such job\)"):
        fit_toy(Toy(), folder, At(1, send(signal.SIGUSR1)), every=100, plugins=[SLURMEnvironment()])
    with pytest.raises(RunStopped, match=r"SIGTERM: stopped after step 4$"):  # which does not requeue
        fit_toy(Toy(), folder, At(3, send(signal.SIGTERM)), every=100, plugins=[SLURMEnvironment()])


def poison(name):
    """An action that makes the next loss or gradient NaN."""

    def action(trainer):
        layer = trainer.lightning_module.layer
        if name == "loss":
            layer.register_forward_hook(lambda module, inputs, output: output * float("nan"))
        else:
            layer.weight.register_hook(lambda gradient: gradient * float(name))

    return action


@pytest.mark.parametrize(("name", "reason"), [("loss", "loss"), ("nan", "gradient"), ("inf", "gradient")])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_broken_state_stops_the_run_and_is_not_saved(folder, name, reason, clip):
    with pytest.raises(RunStopped, match=f"{reason}.* after step 2") as stopped:
        fit_toy(Toy(), folder, At(3, poison(name)), batches=8, accumulate_grad_batches=2, gradient_clip_val=clip)
    assert stopped.value.exit_code == 1
    assert names(folder) == ["step-1"]
    assert all(torch.isfinite(t).all() for t in torch.load(folder / "step-1/state.ckpt")["state_dict"].values())


def test_frozen_and_empty_parts_do_not_count():
    module = Toy()
    module.frozen.data.fill_(float("nan"))
    module.layer.bias.ds_tensor = torch.zeros(0)  # this process holds nothing of it
    assert weights_are_finite(module)
    module.layer.weight.ds_tensor = torch.tensor([1.0, float("inf")])
    assert not weights_are_finite(module)


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.parametrize("end", ["whole", "half"])
def test_a_full_disk_leaves_the_previous_checkpoint(folder, end):
    module, limits = Toy(width=300), resource.getrlimit(resource.RLIMIT_FSIZE)  # 90,300 weights: 1.1 MB with Adam's

    def fill(trainer):  # the kernel refuses to let a file grow beyond it
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000 if end == "half" else 1, limits[1]))

    class Refill(At):
        def on_exception(self, trainer, pl_module, exception):
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    try:
        with pytest.raises(RunStopped, match=r"checkpoint of step 3 could not be written to .*: File too large"):
            fit_toy(module, folder, Refill(2, fill))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert newest_complete(folder) == folder / "step-2"
    assert incomplete(folder) == []
    torch.load(state_path(folder / "step-2"), weights_only=True)
    fit_toy(Toy(width=300), folder, resume=state_path(folder / "step-2"))
    assert names(folder) == ["step-5", "step-6"]


@pytest.mark.slow
def test_both_stop_and_go_on_alike(tmp_path):
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "NODE_RANK": "0"}
    environment = {**os.environ, **common, "OMP_NUM_THREADS": "1"}
    environment.pop("PL_GLOBAL_SEED", None)  # of a run in this process: both would start from it
    processes = [
        subprocess.Popen([sys.executable, __file__, tmp_path], env={**environment, "LOCAL_RANK": str(rank)})
        for rank in (0, 1)
    ]
    try:
        assert [process.wait(timeout=240) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    for rank in (0, 1):
        assert json.loads((tmp_path / f"found-{rank}.json").read_text()) == {
            "stopped": "SIGTERM: stopped after step 2",
            "diverged": "the loss is NaN or infinite after step 2; it was not saved",
            "failed": "the checkpoint of step 4: File too large",
            "newest": "step-2",
            "same": True,
            "moved": True,
            "states_differ": True,
        }


def reason(module: Toy, folder: Path, *callbacks: Callback, **settings: object) -> str:
    """Train, and say what ended it."""
    try:
        fit_toy(module, folder, *callbacks, **settings)
    except RunStopped as stopped:
        return str(stopped)
    return ""


def main(folder: Path, rank: int) -> None:
    """Train unbroken, then in two parts; note the steps, the random numbers and whether the weights are the same."""
    settings = {"strategy": "ddp", "devices": 2, "accumulate_grad_batches": 2, "batches": 16, "every": 100}
    torch.manual_seed(rank)
    unbroken = Toy()
    fit_toy(unbroken, folder / "unbroken", RandomState(), **settings)
    torch.manual_seed(rank)
    signals = [At(2, send(signal.SIGTERM))] if rank == 1 else []
    stopped = reason(Toy(), folder / "parts", RandomState(), *signals, **settings)
    newest = newest_complete(folder / "parts")
    torch.manual_seed(99)
    resumed = Toy()
    fit_toy(resumed, folder / "parts", RandomState(), resume=state_path(newest), **settings)
    states = torch.load(newest / "state.ckpt", weights_only=True)["random_state"]
    diverged = reason(Toy(), folder / "broken", *[At(3, poison("loss"))] if rank == 1 else [], **settings)
    limit = (100_000, resource.RLIM_INFINITY)  # bytes of any file of this process
    full = [At(3, lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, limit))] if rank == 0 else []
    failed = reason(Toy(width=300), folder / "full", *full, **settings)
    found = {
        "stopped": stopped,
        "diverged": diverged,
        "failed": failed.partition(" could not be written")[0] + failed[-16:],
        "newest": newest.name,
        "same": torch.equal(unbroken.layer.weight, resumed.layer.weight),
        "moved": not torch.equal(unbroken.layer.weight, Toy().layer.weight),
        "states_differ": len(states) == 2 and not torch.equal(states[0]["torch"], states[1]["torch"]),
    }
    (folder / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ["LOCAL_RANK"]))
