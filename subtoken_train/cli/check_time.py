"""What ``subtoken-train check`` says of the time that a run will take: measured where that is quick, else nothing."""

from __future__ import annotations

from pathlib import Path

import torch

from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.families.backbone_config import resolve
from subtoken_train.training.step_time import seconds_per_batch

MOST_BYTES = 2**26
"""Of weights that are loaded for this."""
_BATCHES = 4


def time_line(cli: RecipeCLI, batches: int, stops: list[str]) -> str:
    """The expected time of ``batches`` training batches, or why it cannot be told before a run.

    Args:
        cli: the recipe.
        batches: of the whole run.
        stops: what would stop fit is appended, in words.
    """
    if why := _why_not(cli):
        return f"expected time: not measured ({why}); fit shows its pace from the first steps on"
    data, most = cli.datamodule, min(_BATCHES, batches)
    try:
        seconds = seconds_per_batch(cli.model, data.samples(cli.model.family, most, data.batch_size))
    except ValueError as error:  # of a record that cannot be used, which the line of lengths may not have looked at
        stops.append(str(error))
        return f"expected time: not measured ({error})"
    if seconds is None:
        if not getattr(data, "streaming", False):  # a stream goes on with another pass
            stops.append(f"the data do not fill one batch of {data.batch_size:,}; lower data.batch_size or add data")
        return "expected time: not measured (the data fill no batch)"
    return (
        f"expected time: {_duration(seconds * batches)} ({seconds:.2g} s a batch, measured now on this machine; "
        "start, logs, validation and checkpoints are not in it)"
    )


def _why_not(cli: RecipeCLI) -> str | None:
    trainer, module = cli.config.trainer, cli.model
    if trainer.accelerator != "cpu" and (trainer.accelerator != "auto" or torch.cuda.is_available()):
        return "training is to run on an accelerator"
    folder = Path(resolve(module.backbone_config.path))
    if not folder.is_dir():
        return "the backbone is not at hand"
    if sum(path.stat().st_size for path in folder.glob("*.safetensors")) > MOST_BYTES:
        return f"the backbone has more than {MOST_BYTES // 2**20} MiB"
    if str(trainer.precision or "32-true") != "32-true" or module.backbone_config.quantization != "none":
        return "in this precision"
    if module.distillation_config is not None or module.stage2_config is not None:
        return "with a teacher or in stage 2"
    return None


def _duration(seconds: float) -> str:
    size, unit = next((u for u in ((3600, "hours"), (60, "minutes")) if seconds >= 2 * u[0]), (1, "s"))
    return f"about {max(1, round(seconds / size))} {unit}"
