"""``subtoken-train fit``: train a recipe, leave an adapter folder."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from subtoken_train.artifact.whole_folder import RECIPE_FILE
from subtoken_train.cli.terminal import PROGRAM, USER_ERRORS, one_line

if TYPE_CHECKING:
    from subtoken_train.training.run_folder import RunFolder

ANCHOR = "--anchor"
HELP = """usage: subtoken-train fit --config RECIPE.yaml [--KEY VALUE ...] [--overwrite | --resume] [--anchor]

Trains LoRA and routers from a recipe. Any key of the recipe can be overridden after --config, for instance
  --trainer.max_steps 100   --model.routing.kept_groups 2   --data.batch_size 16   --output_dir runs/mine
--overwrite replaces a run (the old one goes when the new one is whole), --resume goes on from its newest checkpoint,
--print_config prints the result.
--anchor trains the recipe's matched token-only anchor instead, into OUTPUT_DIR_anchor ('recipes anchor' writes it).
--allow-code lets a recipe name classes that are not on the list of docs/recipe_safety.md: its code runs.
--push_to_hub user/name publishes the adapter at the end (--private: for you alone); name and token are checked first.
'subtoken-train recipes ls' lists the shipped recipes: in any folder, --config NAME means the one of that name."""


def run_raw(argv: list[str]) -> int:
    """Parse the recipe, train, write ``output_dir/adapter``."""
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP)
        return 0
    from subtoken_train.cli.recipe_source import read_source

    wants_anchor, argv = ANCHOR in argv, [word for word in argv if word != ANCHOR]
    source = read_source(argv)
    from subtoken_train.cli.quiet import quiet_libraries

    quiet_libraries()
    from subtoken_train.artifact.hub import check_destination, check_published
    from subtoken_train.cli.anchor import anchor_words
    from subtoken_train.cli.export import publish
    from subtoken_train.cli.loggers import finish_remote
    from subtoken_train.cli.recipe import RecipeCLI
    from subtoken_train.cli.run_checks import check_held
    from subtoken_train.training.run_folder import RunFolder
    from subtoken_train.training.run_places import settle_after_kill

    if wants_anchor:
        source = read_source(anchor_words(argv))
    cli = RecipeCLI(source)
    if is_first_process() and settle_after_kill(cli.output_dir):
        cli = RecipeCLI(source)  # the folder holds another run now
    resume = checkpoint_to_resume(cli.checkpoints) if cli.config.resume else None
    folder, destination, trainer = RunFolder(cli.output_dir, cli.place), cli.destination, cli.trainer
    try:
        if trainer.is_global_zero:  # the others of a run wait for it where they start to talk to each other
            check_held(cli)
            folder.check(resume is not None)
            if destination is not None:
                check_published(cli.model.backbone_config.path)
                check_destination(destination)
            open_run(cli, resume, folder)
        code = train(cli, resume, folder)
        if code or not trainer.is_global_zero:
            return code
        adapter = leave_adapter(cli, folder, None if destination is None else destination.repo_id)
    except USER_ERRORS:
        folder.close(keep=False)
        raise
    finally:
        if folder.staged:
            finish_remote(trainer.loggers)
        folder.close(keep=trained(cli))
    print(f"adapter folder: {adapter}\nnext: subtoken-train evaluate --adapter {adapter} --data FILE")
    if destination is not None:
        retry = ["subtoken-train", "export", str(adapter), str(cli.output_dir / "published")]
        retry += ["--push-to-hub", destination.repo_id, *(["--private"] if destination.private else [])]
        publish(adapter, destination, retry)
    return 0


def leave_adapter(cli: Any, folder: RunFolder, repo_id: str | None) -> Path:
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


def is_first_process() -> bool:
    """Whether this is process 0 of a run, as far as the environment says before there is a trainer."""
    from lightning.pytorch.utilities import rank_zero_only

    return getattr(rank_zero_only, "rank", 0) == 0


def open_run(cli: Any, resume: Path | None, folder: RunFolder) -> None:
    """Make the run's folder, once all that a user can get wrong has come out.

    Raises:
        ValueError: recipe, backbone, data and checkpoint do not fit each other, or see ``RunFolder.open``.
    """
    from subtoken_train.artifact.whole_folder import check_target
    from subtoken_train.cli.run_checks import compare_recipes
    from subtoken_train.datasets.unknown_tokens import say_unknown
    from subtoken_train.families.load import with_processor
    from subtoken_train.training.checkpoint_writing import trained_shapes
    from subtoken_train.training.nominal_prompt import nominal_prompt
    from subtoken_train.training.preflight import lay_out
    from subtoken_train.training.strategies import check_fit, check_parts, shares_weights
    from subtoken_train.training.trained_tensors import check_resumable

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


def say_what_is_resumed(cli: Any, checkpoint: Path, note: str) -> None:
    """Name the checkpoint, what is ignored, and what differs from the first part of the run."""
    from subtoken_train.training.checkpoints import incomplete

    print(f"resuming from {checkpoint}", file=sys.stderr)
    if ignored := incomplete(cli.checkpoints):
        print(f"ignored, not complete: {', '.join(folder.name for folder in ignored)}", file=sys.stderr)
    if note:
        print(f"differs from the first part, as does the learning rate's schedule: {note}", file=sys.stderr)


def checkpoint_to_resume(checkpoints: Path) -> Path:
    """The run's newest complete checkpoint; a worded ``ValueError`` where there is none."""
    from subtoken_train.training.checkpoints import incomplete, newest_complete

    if newest := newest_complete(checkpoints):
        return newest
    ignored = "".join(f"; {folder.name} is not complete" for folder in incomplete(checkpoints))
    raise ValueError(f"nothing to resume: no complete checkpoint in {checkpoints}{ignored}; run without --resume")


def export(cli: Any, folder: Path, repo_id: str | None = None) -> Path:
    """Write the adapter folder of a finished run; ``repo_id`` is the Hub name that its card speaks of."""
    from subtoken_train.artifact.folder import write_adapter
    from subtoken_train.cli.run_scores import card_sections
    from subtoken_train.training.adapter_parts import adapter_config
    from subtoken_train.training.trained_tensors import finished_parts

    module = cli.model
    parts, peft_model = finished_parts(module)
    training = {"name": folder.name, "steps": cli.trainer.global_step, "seed": cli.config.seed_everything}
    config = adapter_config(module, parts.family, training)
    sections = card_sections(cli, parts, folder / RECIPE_FILE, folder.name, None)
    sections = replace(sections, repo_id=repo_id)
    return write_adapter(folder / "adapter", config, parts, peft_model, overwrite=True, sections=sections)


def train(cli: Any, resume: Path | None, folder: RunFolder) -> int:
    """Fit; the exit code. Whatever ends it early, the user learns where to go on; user errors go on to ``guarded``."""
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
        command = f"subtoken-train fit --config {folder.current / RECIPE_FILE} --resume"
        print(f"last good checkpoint: {newest}\ngo on with: {command}", file=sys.stderr)
    else:
        logs = f"; its logs: {folder.current / 'logs'}" if trained(cli) else ""
        print(f"no checkpoint was written; start again with the same command{logs}", file=sys.stderr)
    if folder.staged:
        print(folder.said(), file=sys.stderr)
