"""The training of ``fit``: how it ends, and what the user is told then."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subtoken_train.training.run_folder import RunFolder


def train(cli: Any, resume: Path | None, folder: RunFolder) -> int:
    """Fit; the exit code. Whatever ends it early, the user learns where to go on; user errors go on to ``guarded``."""
    from subtoken_train.cli.terminal import PROGRAM, USER_ERRORS, one_line
    from subtoken_train.training.checkpoints import state_path
    from subtoken_train.training.interrupt import RunStopped

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


def trained(cli: Any) -> bool:
    """Whether a step was made, so that the logs of a run without a checkpoint are worth keeping."""
    return int(cli.trainer.global_step) > 0


def hand_over(cli: Any, folder: RunFolder) -> None:
    """Let the run take its place as soon as its first checkpoint stands."""
    from subtoken_train.training.run_checkpoints import RunCheckpoints

    def stands() -> None:
        for logger in cli.trainer.loggers:
            logger.save()  # nothing of it is under way while folders are renamed
        folder.take_place()

    for callback in cli.trainer.callbacks:
        if isinstance(callback, RunCheckpoints):
            callback.on_whole = stands


def say_where_to_go_on(cli: Any, folder: RunFolder, reason: str) -> None:
    """Tell the user why a run ended, what is left of it, and where the run is that it was to replace."""
    from subtoken_train.training.checkpoints import newest_complete

    print(f"\n{reason}", file=sys.stderr)
    if not cli.trainer.is_global_zero:
        return
    if newest := newest_complete(folder.current / "checkpoints"):
        command = f"subtoken-train fit --config {folder.recipe} --resume"
        print(f"last good checkpoint: {newest}\ngo on with: {command}", file=sys.stderr)
    else:
        logs = f"; its logs: {folder.current / 'logs'}" if trained(cli) else ""
        print(f"no checkpoint was written; start again with the same command{logs}", file=sys.stderr)
    if folder.staged:
        print(folder.said(), file=sys.stderr)
