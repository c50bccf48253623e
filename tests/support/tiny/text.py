"""Language models of the shapes that the text family serves."""

from functools import partial

from subtoken_train.families.family import Family
from tests.support.helpers import sharpen
from tests.support.text_families import DECODERS, NAMED, WINDOWED, text_family
from tests.support.tiny import TinyFamily


def build(kind: str, seed: int) -> Family:
    """Its attention is less sharp than ``text_family`` makes it, which multiplies rounding errors."""
    return sharpen(text_family(kind, initializer_range=0.2, seed=seed), 1 / 8)


FAMILIES = tuple(
    TinyFamily(kind, partial(build, kind, 3 + i), windowed=kind in WINDOWED, order=2, crossed=kind not in DECODERS)
    for i, kind in enumerate((*NAMED, *DECODERS))
)
