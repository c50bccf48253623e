"""``subtoken-train fit``: train a recipe, leave an adapter folder."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

HELP = """usage: subtoken-train fit --config RECIPE.yaml [--KEY VALUE ...] [--overwrite | --resume]

Trains LoRA and routers from a recipe. Any key of the recipe can be overridden after --config, for instance
  --trainer.max_steps 100   --model.routing.kept_groups 2   --data.batch_size 16   --output_dir runs/mine
--overwrite replaces an existing run, --resume goes on from its last checkpoint, --print_config prints the result.
'subtoken-train recipes ls' lists the shipped recipes."""


def run_raw(argv: list[str]) -> int:
    """Parse the recipe, train, write ``output_dir/adapter``."""
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP)
        return 0
    from subtoken_train.cli.quiet import quiet_libraries

    quiet_libraries()
    from subtoken_train.cli.recipe import RecipeCLI, expand_flags
    from subtoken_train.training.interrupt import TrainingInterrupted

    cli = RecipeCLI(expand_flags(argv))
    folder = cli.output_dir
    resume = checkpoint_to_resume(folder) if cli.config.resume else None
    if cli.trainer.is_global_zero:  # the others of a run wait for it where they start to talk to each other
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
    adapter = export(cli, folder)
    print(f"adapter folder: {adapter}\nnext: subtoken-train evaluate --adapter {adapter} --data FILE")
    return 0


def prepare(cli: Any, folder: Path, resume: Path | None) -> None:
    """Make the run's folder; what a user can get wrong comes out before anything is replaced.

    Raises:
        ValueError: there is a run already, or recipe, backbone and data do not fit each other.
    """
    from subtoken_train.backbones.load import with_processor
    from subtoken_train.training.preflight import lay_out, nominal_prompt
    from subtoken_train.training.strategies import shares_weights
    from subtoken_train.training.strategies.check import check_fit, check_parts

    if resume is None and holds_run(folder) and not cli.config.overwrite:
        raise ValueError(f"{folder} holds a run; pass --overwrite, --resume, or another --output_dir")
    check_fit(cli.trainer, cli.model)
    cli.datamodule.read()
    module = cli.model
    if shares_weights(cli.trainer.strategy):  # no process loads weights before the others are there to share them
        parts = lay_out(module)
        family = with_processor(parts.family, module.backbone_config)
    else:
        parts, family = module.parts, module.family
    check_parts(cli.trainer, parts)
    prompt = nominal_prompt(family, cli.datamodule)
    parts.reducer.kept_tokens(prompt.tokens)
    cli.datamodule.rehearse(family, cli.trainer)
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


def export(cli: Any, folder: Path) -> Path:
    """Write the adapter folder of a finished run."""
    from subtoken_train.artifact.folder import AdapterConfig, write_adapter
    from subtoken_train.artifact.identity import identify
    from subtoken_train.training.trained_tensors import finished_parts

    module = cli.model
    parts, peft_model = finished_parts(module)
    training = {"name": folder.name, "steps": cli.trainer.global_step, "seed": cli.config.seed_everything}
    if module.first_stage is not None:
        training["stage1"] = {**module.first_stage.config.training, "sha256": module.first_stage_digest}
    config = AdapterConfig(
        backbone=module.backbone_config,
        lora=module.lora_settings,
        reducer=module.reducer_config,
        routing=module.routing_config,
        identity=identify(parts.family, module.backbone_config),
        stage2=module.stage2_config,
        training=training,
    )
    return write_adapter(folder / "adapter", config, parts, peft_model, overwrite=True)
