"""How a run of ``subtoken-train fit`` goes and ends: its adapter, or where to go on."""

from __future__ import annotations

import sys
from pathlib import Path

from subtoken_train.artifact.folder import write_adapter
from subtoken_train.artifact.whole_folder import RECIPE_FILE
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.cli.run_scores import card_sections
from subtoken_train.cli.terminal import PROGRAM, USER_ERRORS, one_line
from subtoken_train.training.adapter_parts import adapter_config
from subtoken_train.training.checkpoints import newest_complete, state_path
from subtoken_train.training.interrupt import RunStopped
from subtoken_train.training.run_folder import RunFolder
from subtoken_train.training.trained_tensors import finished_parts


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
