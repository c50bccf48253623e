"""``subtoken-train fit``: train a recipe, leave an adapter folder."""

from pathlib import Path

from subtoken_train.cli.command_line import check_output
from subtoken_train.cli.recipe_help import keys_text
from subtoken_train.cli.recipe_source import read_source
from subtoken_train.cli.terminal import quiet_libraries
from subtoken_train.training.run_folder import RunFolder

ANCHOR = "--anchor"
HELP = """usage: subtoken-train fit --config RECIPE.yaml [--KEY VALUE ...] [--overwrite | --resume] [--anchor]

Trains LoRA and routers from a recipe. Any key of the recipe can be overridden after --config, for instance
  --trainer.max_steps 100   --model.routing.kept_groups 2   --data.batch_size 16   --output_dir runs/mine
--overwrite renames the run that is there to NAME.1 (the next free number), --resume continues from its newest
checkpoint, --print_config prints the resulting recipe.
--anchor trains the recipe's matched token-only anchor instead, into OUTPUT_DIR_anchor ('recipes anchor' writes it).
--push_to_hub user/name publishes the adapter at the end (--private: only for you); name and token are checked first.
'subtoken-train recipes ls' lists the shipped recipes: --config NAME uses one from any folder.
--config RECIPE --help lists the keys that this recipe may hold, with types and defaults; without a recipe, all keys:"""


def help_text(argv: list[str]) -> str:
    return f"{HELP}\n{keys_text(read_source([word for word in argv if word != ANCHOR]))}"


def run_raw(argv: list[str]) -> int:
    wants_anchor, argv = ANCHOR in argv, [word for word in argv if word != ANCHOR]
    source = read_source(argv)
    folder = next((d for each in (*source.contents, *source.pieces)[::-1] if (d := each.get("output_dir"))), None)
    may_hold_run = wants_anchor or {key for key, _ in source.words.options} & {"overwrite", "resume", "print_config"}
    if check_output(folder) and not may_hold_run:
        RunFolder(Path(str(folder))).check(resume=False)  # and again when all is loaded
    quiet_libraries()
    from subtoken_train.cli.fit_course import run_fit
    from subtoken_train.cli.recipe import RecipeCLI
    from subtoken_train.cli.recipes import anchor_words

    return run_fit(RecipeCLI(read_source(anchor_words(argv)) if wants_anchor else source))
