"""Find how much of a text a tokenizer does not know: that becomes its unknown token, without a word."""

import warnings
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

from subtoken_train.datasets.record_format import IMAGE_PLACEHOLDER
from subtoken_train.errors import SubTokenWarning

LOOKED_AT = 1000  # texts of a larger set that are looked at, and of each no more than ``_CUT`` characters
TOLERATED = 0.01
_CUT = 100_000
_SHOWN, _SHOWN_CHARACTERS = 3, 20


class SomeTexts(NamedTuple):
    """The texts of some records, and how many records there are; None where nobody knows."""

    texts: list[str]
    total: int | None


class UnknownTokens(NamedTuple):
    """Unknown tokens over all of some texts, in words, too, and the first words that the tokenizer does not know."""

    share: float
    words: str
    examples: tuple[str, ...]


def unknown_tokens(tokenizer: Any, some: SomeTexts) -> UnknownTokens | None:
    """Count unknown tokens, image placeholders left out; None for a tokenizer that has none, or without a text."""
    if (unknown_id := tokenizer.unk_token_id) is None or not some.texts:
        return None
    unknown = tokens = 0
    examples: dict[str, None] = {}
    for text in (text[:_CUT].replace(IMAGE_PLACEHOLDER, "") for text in some.texts):
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
        places = [i for i, token in enumerate(encoding["input_ids"]) if token == unknown_id]
        tokens += len(encoding["input_ids"])
        unknown += len(places)
        if places and tokenizer.is_fast and len(examples) < _SHOWN:
            spans = (encoding["offset_mapping"][place] for place in places[:_SHOWN])
            examples |= dict.fromkeys(text[start:stop][:_SHOWN_CHARACTERS] for start, stop in spans)
    share, texts = unknown / max(tokens, 1), f"{len(some.texts):,}"
    texts += "" if some.total in (None, len(some.texts)) else f" of {some.total:,}"
    counted = f"({unknown:,} of {tokens:,} tokens, in {texts} texts)"
    words = f"{100 * share:.3g} % of the text is unknown to the tokenizer {counted}"
    return UnknownTokens(share, words, tuple(examples)[:_SHOWN])


def say_unknown(tokenizer: Any, some: SomeTexts, what: str) -> str | None:
    """Return one line for people, None without an unknown token; warn past 1 %. ``what``: where the texts are from."""
    found = unknown_tokens(tokenizer, some)
    if found is None or not found.share:
        return None
    if found.share <= TOLERATED:
        return f"{what}: {found.words}"
    named = f", for instance {', '.join(map(repr, found.examples))}" if found.examples else ""
    instead = "the model can neither read nor say it; use a backbone that knows these words"
    warnings.warn(f"{what}: {found.words}{named}: {instead}", SubTokenWarning, stacklevel=2)
    return None


def spread(total: int, most: int = LOOKED_AT) -> Sequence[int]:
    """Pick at most ``most`` places, spread evenly over ``total``."""
    return range(total) if total <= most else [i * total // most for i in range(most)]


def first_texts(texts: Iterable[str], total: int | None) -> SomeTexts:
    """Return the first texts of a set that is read in order."""
    return SomeTexts(list(islice(texts, LOOKED_AT)), total)
