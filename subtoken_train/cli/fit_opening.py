"""How a run of ``subtoken-train fit`` begins: from which checkpoint, after which checks, in which folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from subtoken_train.artifact.whole_folder import RECIPE_FILE, check_target
from subtoken_train.cli.earlier_run import compare_recipes
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.datasets.unknown_tokens import say_unknown
from subtoken_train.families.load import with_processor
from subtoken_train.training.checkpoint_writing import trained_shapes
from subtoken_train.training.checkpoints import incomplete, newest_complete
from subtoken_train.training.nominal_prompt import nominal_prompt
from subtoken_train.training.preflight import lay_out
from subtoken_train.training.run_checkpoints import RunCheckpoints
from subtoken_train.training.run_folder import RunFolder
from subtoken_train.training.strategies import check_fit, check_parts, shares_weights
from subtoken_train.training.trained_tensors import check_resumable


def is_first_process() -> bool:
    """Whether this is process 0 of a run, as far as the environment says before there is a trainer."""
    return getattr(rank_zero_only, "rank", 0) == 0


def checkpoint_to_resume(checkpoints: Path) -> Path:
    """The run's newest complete checkpoint; a worded ``ValueError`` where there is none."""
    if newest := newest_complete(checkpoints):
        return newest
    ignored = "".join(f"; {folder.name} is not complete" for folder in incomplete(checkpoints))
    raise ValueError(f"nothing to resume: no complete checkpoint in {checkpoints}{ignored}; run without --resume")


def open_run(cli: RecipeCLI, resume: Path | None, folder: RunFolder) -> None:
    """Make the run's folder, once all that a user can get wrong has come out.

    Raises:
        ValueError: recipe, backbone, data and checkpoint do not fit each other, or see ``RunFolder.open``.
    """
    saved, note = cli.output_dir / RECIPE_FILE, ""
    if resume:
        note = compare_recipes(saved, cli.recipe_text()) if saved.is_file() else ""
        check_target(cli.output_dir / "adapter", overwrite=True)  # which the run writes anew at its end
    check_fit(cli.trainer, cli.model)
    cli.datamodule.read()
    cli.datamodule.check_images()
    module = cli.model
    if shares_weights(cli.trainer.strategy):  # no process loads weights before the others are there to share them
        parts = lay_out(module)
        family = with_processor(parts.family, module.backbone_config)
    else:
        parts, family = module.parts, module.family
    check_parts(type(cli.trainer.strategy), parts)
    if resume:
        here = {f"compressed.{name}": shape for name, shape in trained_shapes(parts).items()}
        check_resumable(resume, cli.trainer, here)
        say_what_is_resumed(cli, resume, note)
    prompt = nominal_prompt(family, cli.datamodule)
    parts.reducer.kept_tokens(prompt.tokens)
    cli.datamodule.rehearse(family, cli.trainer)
    if line := say_unknown(family.tokenizer, cli.datamodule.some_texts(), "training data"):
        print(line, file=sys.stderr)
    folder.open(resume is not None)
    cli.save_recipe(folder.current / RECIPE_FILE)
    if folder.staged:
        hand_over(cli, folder)


def say_what_is_resumed(cli: RecipeCLI, checkpoint: Path, note: str) -> None:
    """Name the checkpoint, what is ignored, and what differs from the first part of the run."""
    print(f"resuming from {checkpoint}", file=sys.stderr)
    if ignored := incomplete(cli.checkpoints):
        print(f"ignored, not complete: {', '.join(folder.name for folder in ignored)}", file=sys.stderr)
    if note:
        print(f"differs from the first part, as does the learning rate's schedule: {note}", file=sys.stderr)


def hand_over(cli: RecipeCLI, folder: RunFolder) -> None:
    """Let the run take its place as soon as its first checkpoint stands."""
    trainer: Any = cli.trainer

    def stands() -> None:
        for logger in trainer.loggers:
            logger.save()  # nothing of it is under way while folders are renamed
        folder.take_place()

    for callback in trainer.callbacks:
        if isinstance(callback, RunCheckpoints):
            callback.on_whole = stands
