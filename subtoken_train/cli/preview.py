"""``subtoken-train preview``: training samples as the loss sees them, a line per run of tokens of one kind.

Legend: B batch, N sequence positions.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from subtoken_train.cli.command_line import Parser, check_counts
from subtoken_train.cli.recipe_source import read_source
from subtoken_train.cli.terminal import quiet_libraries
from subtoken_train.errors import plain
from subtoken_train.types import Batch, Region

HELP = """usage: subtoken-train preview --config RECIPE.yaml [--KEY VALUE ...] [--count N]

Prints the first N (3) training samples of a recipe as the loss sees them: for each run of tokens the region, trained
(counts towards the loss) or masked, and the text; image tokens as one <image x COUNT>. It loads no weights. What fit
would refuse (a sample cut inside its images or before its first answer, placeholders without images) is refused."""


def run_raw(argv: list[str]) -> int:
    parser = Parser(prog="subtoken-train preview", add_help=False)
    parser.add_argument("--count", type=int, default=3)
    own, recipe = parser.parse_known_args(argv)
    check_counts(own, "count")
    source = read_source(recipe)
    quiet_libraries()
    from subtoken_train.cli.recipe import RecipeCLI
    from subtoken_train.families.load import layout_family, with_processor
    from subtoken_train.training.preflight import nominal_prompt

    cli = RecipeCLI(source)
    backbone = cli.model.backbone_config
    family = with_processor(layout_family(backbone), backbone)
    nominal_prompt(family, cli.datamodule)  # refuses text without images for a model that reads them, and vice versa
    for batch in cli.datamodule.samples(family, own.count):
        family.positions(batch)  # where images have their own sizes: as many image tokens as features, in order
        print(*sample_lines(batch, family.tokenizer), sep="\n")
    return 0


def sample_lines(batch: Batch, tokenizer: Any) -> Iterator[str]:
    """Write the samples of a batch, padding left out, each with its counts and a line per run of tokens."""
    from subtoken_train.functional.objective import IGNORE_INDEX

    ids_BN, regions_BN = batch.input_ids_BN.tolist(), batch.regions_BN.tolist()
    trained_BN = batch.labels_BN != IGNORE_INDEX
    trained_BN[:, 0] = False
    for row, name in enumerate(batch.record_ids):
        kinds = [(Region(region), bool(flag)) for region, flag in zip(regions_BN[row], trained_BN[row], strict=True)]
        real = [(token, kind) for token, kind in zip(ids_BN[row], kinds, strict=True) if kind[0] != Region.PADDING]
        regions, images = [region for _, (region, _) in real], int(batch.images_per_sample_B[row])
        counts = ", ".join(f"{regions.count(region):,} {region.label}" for region in Region if region in regions)
        count = sum(flag for _, (_, flag) in real)
        pictures = f", {images} image{'s' if images > 1 else ''}" if images else ""
        yield f"\n{name!r}{pictures}: {len(real):,} tokens ({counts}), {count:,} trained"
        if not count:
            yield "  warning: no token of this sample is trained"
        for (region, trained), run in groupby(real, key=lambda pair: pair[1]):
            ids = [token for token, _ in run]
            words = f"<image x {len(ids)}>"
            if region != Region.VISUAL:
                words = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
                words = plain(words.replace("\r", "\\r").replace("\n", "\\n"))  # a run is one line
            yield f"  {region.label:<8} {'trained' if trained else 'masked':<8} {len(ids):>5}  {words}"
