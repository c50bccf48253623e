"""One training sample as coloured lines of text, a line per run of tokens of one kind.

Legend: B batch, N sequence positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rich.text import Text

from subtoken_train.errors import plain
from subtoken_train.functional.objective import IGNORE_INDEX
from subtoken_train.types import Batch, Region

_COLORS = {
    Region.SYSTEM: "cyan",
    Region.VISUAL: "magenta",
    Region.CONTEXT: "blue",
    Region.QUERY: "yellow",
    Region.ANSWER: "green",
}
_TRAINED, _MASKED = "bold underline", "dim"
LEGEND = Text.assemble(
    "regions: ",
    *((f"{region.label} ", color) for region, color in _COLORS.items()),
    ("trained", _TRAINED),
    " ",
    ("masked", _MASKED),
)


def sample_lines(batch: Batch, tokenizer: Any) -> Iterator[Text]:
    """The samples of a batch, padding left out, each with its counts and a line per run of tokens.

    A token is trained where the loss asks for it: it has a label and is not the first of its sequence.
    """
    ids_BN, regions_BN = batch.input_ids_BN.tolist(), batch.regions_BN.tolist()
    trained_BN = batch.labels_BN != IGNORE_INDEX
    trained_BN[:, 0] = False
    for row, name in enumerate(batch.record_ids):
        kinds = [(Region(region), bool(flag)) for region, flag in zip(regions_BN[row], trained_BN[row], strict=True)]
        real = [(token, kind) for token, kind in zip(ids_BN[row], kinds, strict=True) if kind[0] != Region.PADDING]
        yield from _head(name, int(batch.images_per_sample_B[row]), [kind for _, kind in real])
        for (region, trained), run in groupby(real, key=lambda pair: pair[1]):
            yield _run_line(region, trained, [token for token, _ in run], tokenizer)


def _head(name: str, images: int, kinds: list[tuple[Region, bool]]) -> Iterator[Text]:
    regions = [region for region, _ in kinds]
    counts = ", ".join(f"{regions.count(region):,} {region.label}" for region in Region if region in regions)
    trained = sum(flag for _, flag in kinds)
    pictures = f", {images} image{'s' if images > 1 else ''}" if images else ""
    yield Text(f"\n{name!r}{pictures}: {len(kinds):,} tokens ({counts}), {trained:,} trained", style="bold")
    if not trained:
        yield Text("  warning: no token of this sample is trained", style="bold red")


def _run_line(region: Region, trained: bool, ids: list[int], tokenizer: Any) -> Text:
    if region == Region.VISUAL:
        words = f"<image x {len(ids)}>"
    else:
        words = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        words = plain(words.replace("\r", "\\r").replace("\n", "\\n"))  # a run is one line
    style = _TRAINED if trained else _MASKED
    head = f"  {region.label:<8} {'trained' if trained else 'masked':<8} {len(ids):>5}  "
    return Text.assemble(head, (words, f"{_COLORS[region]} {style}"))
