"""Random tiny models of every family, made once, and prompts for them."""

from functools import cache

import torch

from subtoken_train.families.family import Family
from subtoken_train.types import Batch, Region
from tests.support.tiny import TinyPicture, tiny_families
from tests.support.tiny_parts import assembled

TINY = tiny_families()
FAMILIES = [name for name, tiny in TINY.items() if tiny.crossed]
TEXT = [name for name, tiny in TINY.items() if tiny.picture is None]
OF_TEXT = ("quest", "compactor", "expected_attention")
"""Reducers of a language model's context."""
SAMPLES = {
    "one": [(1, 6)],
    "three": [(1, 6), (2, 9), (1, 4)],
    "text": [(1, 6), (0, 7), (2, 9)],
    "last": [(1, 0), (2, 5), (2, 0)],
}
"""Per sample (images, text tokens after them); language models read (contexts, query tokens). In ``last``
two prompts end with their image."""
CONTEXT = 24  # context tokens that stand for an image in a language model's prompt


@cache
def family_of(name: str, dtype: torch.dtype = torch.float32) -> Family:
    """A family by its name; made once."""
    family = TINY[name].build()
    family.model.to(dtype)
    return family


def prompts(family: Family, kind: str, pad_left: bool, seed: int = 0, videos: bool = False) -> Batch:
    """Prompts without answers, see ``SAMPLES``; the tokens are at random. ``videos``: of a family that tells frames."""
    generator = torch.Generator().manual_seed(seed)
    draw = TINY[family.name].picture if family.name in TINY else None
    rows, codes, pictures = [], [], []
    for sample, (images, text) in enumerate(SAMPLES[kind]):
        ids, regions = _drawn(generator, 2), [Region.SYSTEM] * 2
        for image in range(images):
            if draw is None:
                ids += _drawn(generator, CONTEXT + 9 * sample)
                regions += [Region.CONTEXT] * (CONTEXT + 9 * sample)
                continue
            number = (1, 0) if videos else (sample, image)  # in these places they draw one
            shown = draw(family, generator, *number, images)
            after = shown.after if text or image + 1 < images else []
            ids += shown.before + shown.visual + after
            regions += [Region.QUERY if image else Region.SYSTEM] * len(shown.before)
            regions += [Region.VISUAL if is_visual else Region.QUERY for is_visual in _visual(family, shown)]
            regions += [Region.QUERY] * len(after)
            pictures.append(shown)
        ids += _drawn(generator, text)
        regions += [Region.QUERY] * text
        rows.append(torch.tensor(ids))
        codes.append(torch.tensor(regions))
    return _padded(family, rows, codes, [n for n, _ in SAMPLES[kind]], pictures, pad_left)


def _drawn(generator: torch.Generator, count: int) -> list[int]:
    return torch.randint(10, 60, (count,), generator=generator).tolist()


def _visual(family: Family, shown: TinyPicture) -> list[bool]:
    return family.is_visual(torch.tensor(shown.visual)).tolist()


def _padded(family, rows, codes, images, pictures: list[TinyPicture], pad_left: bool) -> Batch:
    sees = family.image_token_id is not None
    ranks = [len(row) - 1 if count or not sees else -1 for row, count in zip(rows, images, strict=True)]
    grids = [shown.grid for shown in pictures if shown.grid is not None]
    seconds = [shown.seconds for shown in pictures if shown.seconds is not None]
    more = {
        "pixel_values": torch.cat([shown.pixels for shown in pictures]) if pictures else None,
        "image_grid_I3": torch.tensor(grids) if grids else None,
        "seconds_I": torch.tensor(seconds) if any(seconds) else None,
    }
    counts = images if sees else [0] * len(rows)
    return assembled(rows, codes, ranks, pad_left, counts, family.tokenizer.pad_token_id, **more)
