"""``subtoken-train preview``: training samples as the loss sees them."""

from __future__ import annotations

HELP = """usage: subtoken-train preview --config RECIPE.yaml [--KEY VALUE ...] [--count N] [--no-color]

Prints the first N (3) training samples of a recipe as the collator makes them: what each run of tokens is (region),
whether it is trained (the loss is on it) or masked, its tokens as text; a run of image tokens is one <image x COUNT>.
Samples come in the order of a run on one device; those of a text corpus in the corpus's own order.
Loads the tokenizer and image processor, no weights. What fit would refuse (a sample that is cut inside its images or
before its first answer, placeholders without images) is the same error here.
Colours are for terminals; --no-color leaves them out there, too."""


def run_raw(argv: list[str]) -> int:
    """Parse the recipe, encode samples, print them."""
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP)
        return 0
    count, color, recipe = _own_options(argv)
    from subtoken_train.cli.recipe_source import read_source

    source = read_source(recipe)
    from subtoken_train.cli.quiet import quiet_libraries

    quiet_libraries()
    from rich.console import Console

    from subtoken_train.cli.preview_lines import LEGEND, sample_lines
    from subtoken_train.cli.recipe import RecipeCLI
    from subtoken_train.families.load import layout_family, with_processor
    from subtoken_train.training.preflight import nominal_prompt

    cli = RecipeCLI(source)
    backbone = cli.model.backbone_config
    family = with_processor(layout_family(backbone), backbone)
    nominal_prompt(family, cli.datamodule)  # refuses text without images for a model that reads them, and vice versa
    console = Console(color_system="auto" if color else None, highlight=False, soft_wrap=True)
    console.print(LEGEND)
    for batch in cli.datamodule.samples(family, count):
        family.positions(batch)  # where images have their own sizes: as many image tokens as features, in order
        for line in sample_lines(batch, family.tokenizer):
            console.print(line)
    return 0


def _own_options(argv: list[str]) -> tuple[int, bool, list[str]]:
    """``--count N`` and ``--no-color``, and the words that are the recipe's."""
    count, color, rest = "3", True, []
    words = iter(argv)
    for word in words:
        if word == "--no-color":
            color = False
        elif word.split("=")[0] == "--count":
            count = word.partition("=")[2] or next(words, "")
        else:
            rest.append(word)
    if not count.isdecimal() or int(count) < 1:
        raise ValueError(f"--count is {count!r}; it must be a whole number, 1 or more")
    return int(count), color, rest
