"""``subtoken-train fit``: train a recipe, leave an adapter folder."""

from __future__ import annotations

from subtoken_train.cli.terminal import USER_ERRORS
from subtoken_train.errors import shell_words

ANCHOR = "--anchor"
HELP = """usage: subtoken-train fit --config RECIPE.yaml [--KEY VALUE ...] [--overwrite | --resume] [--anchor]

Trains LoRA and routers from a recipe. Any key of the recipe can be overridden after --config, for instance
  --trainer.max_steps 100   --model.routing.kept_groups 2   --data.batch_size 16   --output_dir runs/mine
--overwrite renames the run that is there to NAME.1 (the next free number), --resume continues from its newest
checkpoint, --print_config prints the resulting recipe.
--anchor trains the recipe's matched token-only anchor instead, into OUTPUT_DIR_anchor ('recipes anchor' writes it).
--push_to_hub user/name publishes the adapter at the end (--private: only for you); name and token are checked first.
'subtoken-train recipes ls' lists the shipped recipes: --config NAME uses one from any folder."""


def run_raw(argv: list[str]) -> int:
    """Parse the recipe, train, write ``output_dir/adapter``."""
    from subtoken_train.cli.recipe_source import read_source

    wants_anchor, argv = ANCHOR in argv, [word for word in argv if word != ANCHOR]
    source = read_source(argv)
    from subtoken_train.cli.terminal import quiet_libraries

    quiet_libraries()
    from subtoken_train.artifact.hub import check_destination, check_published
    from subtoken_train.cli.anchor import anchor_words
    from subtoken_train.cli.export import publish
    from subtoken_train.cli.fit_course import (
        check_held,
        checkpoint_to_resume,
        leave_adapter,
        open_run,
        train,
        trained,
    )
    from subtoken_train.cli.recipe import RecipeCLI
    from subtoken_train.training.run_folder import RunFolder

    if wants_anchor:
        source = read_source(anchor_words(argv))
    cli = RecipeCLI(source)
    resume = checkpoint_to_resume(cli.checkpoints) if cli.config.resume else None
    folder, destination, trainer = RunFolder(cli.output_dir, cli.replaces), cli.destination, cli.trainer
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
        folder.close(keep=trained(cli))
    print(f"adapter folder: {adapter}\nnext: subtoken-train evaluate --adapter {shell_words(adapter)} --data FILE")
    if destination is not None:
        retry = ["subtoken-train", "export", str(adapter), str(cli.output_dir / "published")]
        retry += ["--push-to-hub", destination.repo_id, *(["--private"] if destination.private else [])]
        publish(adapter, destination, retry)
    return 0
