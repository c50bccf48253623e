"""A run of ``subtoken-train fit``: how it begins, goes and ends; its adapter, or where to go on."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from subtoken_train.artifact.folder import write_adapter
from subtoken_train.artifact.whole_folder import RECIPE_FILE, check_target
from subtoken_train.cli.earlier_run import compare_recipes
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.cli.run_picture import picture_of_run
from subtoken_train.cli.run_scores import card_sections
from subtoken_train.cli.terminal import PROGRAM, USER_ERRORS, one_line
from subtoken_train.datasets.unknown_tokens import say_unknown
from subtoken_train.families.load import family_class, with_processor
from subtoken_train.training.adapter_parts import adapter_config
from subtoken_train.training.checkpoint_writing import trained_shapes
from subtoken_train.training.checkpoints import incomplete, newest_complete, state_path
from subtoken_train.training.interrupt import RunStopped
from subtoken_train.training.nominal_prompt import nominal_prompt
from subtoken_train.training.preflight import lay_out
from subtoken_train.training.run_checkpoints import RunCheckpoints
from subtoken_train.training.run_folder import RunFolder
from subtoken_train.training.strategies import check_fit, check_parts, shares_weights
from subtoken_train.training.trained_tensors import check_resumable, finished_parts


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
    cli.datamodule.check_images(family_class(cli.model.backbone_config))
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
    parts.reducer.layer_tokens(prompt.tokens, parts.family.shape.num_layers)
    cli.datamodule.rehearse(family, cli.trainer)
    if module.first_stage is not None:
        print(f"stage 2 on {module.first_stage.folder}: {module.first_stage.reading}", file=sys.stderr)
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


def train(cli: RecipeCLI, resume: Path | None, folder: RunFolder) -> int:
    """Fit; the exit code. Whatever ends it early, the user learns where to go on; user errors go on to ``guarded``."""
    try:
        # weights_only: a checkpoint is data, nothing in it is run
        cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=resume and state_path(resume), weights_only=True)
    except RunStopped as stopped:
        if not (cli.trainer.is_global_zero or stopped.alone):
            return 0  # all stop alike; another code, and Lightning kills process 0 before it has said why
        say_where_to_go_on(cli, folder, f"{PROGRAM}: {stopped.reason}")
        return stopped.exit_code
    except USER_ERRORS:
        raise
    except OSError as error:  # a full disk or a dropped network under a logger
        say_where_to_go_on(cli, folder, f"{PROGRAM}: stopped: {one_line(error)}")
        return 1
    except Exception:
        say_where_to_go_on(cli, folder, f"{PROGRAM}: stopped by an error")
        raise
    return 0


def leave_adapter(cli: RecipeCLI, folder: RunFolder, repo_id: str | None) -> Path:
    """Write the adapter, then remove what the run replaces."""
    try:
        folder.take_place()  # a run of no step has no checkpoint
        adapter = export(cli, cli.output_dir, repo_id)
    except BaseException:
        say_where_to_go_on(cli, folder, f"{PROGRAM}: the adapter could not be written")
        raise
    for line in folder.finish():
        print(line, file=sys.stderr)
    return adapter


def export(cli: RecipeCLI, folder: Path, repo_id: str | None = None) -> Path:
    """Write the adapter folder of a finished run; ``repo_id`` is the Hub name that its card speaks of."""
    module = cli.model
    parts, peft_model = finished_parts(module)
    training = {"name": folder.name, "steps": cli.trainer.global_step, "seed": cli.config.seed_everything}
    config = adapter_config(module, parts.family, training)
    sections = card_sections(cli, parts, folder / RECIPE_FILE, folder.name, None, repo_id)
    sections = replace(sections, picture=picture_of_run(folder))
    return write_adapter(folder / "adapter", config, parts, peft_model, overwrite=True, sections=sections)


def trained(cli: RecipeCLI) -> bool:
    """Whether a step was made, so that the logs of a run without a checkpoint are worth keeping."""
    return int(cli.trainer.global_step) > 0


def say_where_to_go_on(cli: RecipeCLI, folder: RunFolder, reason: str) -> None:
    """Tell the user why a run ended, what is left of it, and where the run is that it was to replace."""
    print(f"\n{reason}", file=sys.stderr)
    if not cli.trainer.is_global_zero:
        return
    if newest := newest_complete(folder.current / "checkpoints"):
        command = f"subtoken-train fit --config {folder.current / RECIPE_FILE} --resume"
        print(f"last good checkpoint: {newest}\ngo on with: {command}", file=sys.stderr)
    else:
        logs = f"; its logs: {folder.current / 'logs'}" if trained(cli) else ""
        print(f"no checkpoint was written; start again with the same command{logs}", file=sys.stderr)
    if folder.staged:
        print(folder.said(), file=sys.stderr)
