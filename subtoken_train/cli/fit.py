"""``subtoken-train fit``: train a recipe, leave an adapter folder."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

HELP = """usage: subtoken-train fit --config RECIPE.yaml [--KEY VALUE ...] [--overwrite | --resume]

Trains LoRA and routers from a recipe. Any key of the recipe can be overridden after --config, for instance
  --trainer.max_steps 100   --model.routing.kept_groups 2   --data.batch_size 16   --output_dir runs/mine
--overwrite replaces an existing run, --resume goes on from its last checkpoint, --print_config prints the result.
--push_to_hub user/name publishes the adapter at the end (--private: for you alone); name and token are checked first.
'subtoken-train recipes ls' lists the shipped recipes."""


def run_raw(argv: list[str]) -> int:
    """Parse the recipe, train, write ``output_dir/adapter``."""
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP)
        return 0
    from subtoken_train.cli.quiet import quiet_libraries

    quiet_libraries()
    from subtoken_train.cli.publish import check_publishing, publish
    from subtoken_train.cli.recipe import RecipeCLI, expand_flags
    from subtoken_train.training.interrupt import TrainingInterrupted

    cli = RecipeCLI(expand_flags(argv))
    folder = cli.output_dir
    resume = checkpoint_to_resume(folder) if cli.config.resume else None
    destination = destination_of(cli)
    if is_first_process():
        if destination is not None:
            check_publishing(destination, cli.model.backbone_config.path)
        prepare(cli, folder, resume)
    try:
        cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=resume)
    except TrainingInterrupted as stopped:
        print(
            f"\nstopped at step {stopped.step}; checkpoint {stopped.path}\n"
            f"go on with: subtoken-train fit --config {folder / 'recipe.yaml'} --resume",
            file=sys.stderr,
        )
        return 130
    if not cli.trainer.is_global_zero:
        return 0
    adapter = export(cli, folder, None if destination is None else destination.repo_id)
    print(f"adapter folder: {adapter}\nnext: subtoken-train evaluate --adapter {adapter} --data FILE")
    if destination is not None:
        retry = ["subtoken-train", "export", str(adapter), str(folder / "published")]
        retry += ["--push-to-hub", destination.repo_id, *(["--private"] if destination.private else [])]
        publish(adapter, destination, retry)
    return 0


def destination_of(cli: Any) -> Any:
    """Where the recipe publishes its adapter; None: nowhere."""
    from subtoken_train.artifact.hub import Destination

    repo_id, private = cli.config.push_to_hub, cli.config.private
    if private and repo_id is None:
        raise ValueError("--private says how to publish; add --push_to_hub user/name, or leave it out")
    return None if repo_id is None else Destination(repo_id, private)


def is_first_process() -> bool:
    """Whether this is the process that the user started; the others of a run on several devices find it all done."""
    return all(os.environ.get(rank, "0") == "0" for rank in ("LOCAL_RANK", "NODE_RANK"))


def prepare(cli: Any, folder: Path, resume: Path | None) -> None:
    """Make the run's folder; what a user can get wrong comes out before anything is replaced.

    Raises:
        ValueError: there is a run already, or recipe, backbone and data do not fit each other.
    """
    from subtoken_train.training.preflight import nominal_prompt

    if resume is None and holds_run(folder) and not cli.config.overwrite:
        raise ValueError(f"{folder} holds a run; pass --overwrite, --resume, or another --output_dir")
    cli.datamodule.read()
    cli.model.configure_model()
    prompt = nominal_prompt(cli.model.family, cli.datamodule)
    cli.model.parts.reducer.kept_tokens(prompt.tokens)
    cli.datamodule.rehearse(cli.model.family, cli.trainer)
    if holds_first_stage(cli, folder):
        raise ValueError(f"stage2.adapter lies in {folder}, which this run would replace; choose another --output_dir")
    if resume is None and folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    cli.save_recipe(folder / "recipe.yaml")


def checkpoint_to_resume(folder: Path) -> Path:
    """The run's last checkpoint; a worded ``ValueError`` where there is none."""
    last = folder / "checkpoints" / "last.ckpt"
    if not last.is_file():
        raise ValueError(f"nothing to resume: {last} does not exist; run without --resume")
    return last


def holds_run(folder: Path) -> bool:
    """Whether a folder has anything to lose: a failed start leaves only the recipe and empty logs."""
    return folder.exists() and any(item.name not in ("recipe.yaml", "logs") for item in folder.iterdir())


def holds_first_stage(cli: Any, folder: Path) -> bool:
    """Whether what stage 2 starts from lies in the run's own folder."""
    stage2 = cli.model.stage2_config
    return stage2 is not None and Path(stage2.adapter).resolve().is_relative_to(folder.resolve())


def export(cli: Any, folder: Path, repo_id: str | None = None) -> Path:
    """Write the adapter folder of a finished run; ``repo_id`` is the Hub name that its card speaks of."""
    from subtoken_train.artifact.folder import write_adapter
    from subtoken_train.cli.card import card_sections
    from subtoken_train.training.export import adapter_config

    module = cli.model
    training = {"name": folder.name, "steps": cli.trainer.global_step, "seed": cli.config.seed_everything}
    config = adapter_config(module, module.family, training)
    sections = card_sections(cli, module.parts, folder / "recipe.yaml", folder.name, None)
    sections = replace(sections, repo_id=repo_id)
    return write_adapter(folder / "adapter", config, module.parts, module.peft_model, overwrite=True, sections=sections)
