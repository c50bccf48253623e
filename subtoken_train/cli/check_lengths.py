"""What ``subtoken-train check`` prints of the lengths of samples, in tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median_low

from subtoken_train.datasets.corpus_datamodule import CorpusDataModule
from subtoken_train.datasets.datamodule import InstructionDataModule
from subtoken_train.families.family import Family
from subtoken_train.training.preflight import sample_lengths

MOST = 200
"""Records that are encoded, with their images."""


def length_lines(family: Family, data: InstructionDataModule, stops: list[str]) -> Iterator[str]:
    """Shortest, median and longest record, how many ``max_length`` cuts, and what cannot be encoded at all.

    Args:
        family: with its processor.
        data: read.
        stops: what would stop fit is appended, in words.
    """
    total, most = len(data.training_records), data.max_length
    found = sample_lengths(family, data.training_records, MOST, data.max_image_pixels, data.max_video_frames)
    if found.tokens:
        line = f"{_of(len(found.tokens), total, 'records')}: {_spread_words(found.tokens)}; max_length {most:,}"
        longer = [needed for length, needed in zip(found.tokens, found.needed, strict=True) if length > most]
        share = f"{len(longer):,} ({100 * len(longer) / len(found.tokens):.3g} %)" if longer else "none"
        inside = [needed for needed in longer if needed > most]
        yield f"{line} cuts {share}" + (f", {len(inside):,} of them in a question, where fit stops" if inside else "")
        if inside:
            stops.append(
                f"data.max_length {most:,} cuts the questions of {len(inside):,} of {len(found.tokens):,} records; "
                f"raise it to {max(inside):,}, or drop them"
            )
    if found.broken:
        yield f"{len(found.broken):,} of {len(found.broken) + len(found.tokens):,} cannot be used: {found.broken[0]}"
        stops.append(found.broken[0])


def document_line(family: Family, data: CorpusDataModule) -> str:
    """Shortest, median and longest document of those that come first, and what a block takes.

    Raises:
        ValueError: all documents together do not fill one block, which fit refuses.
    """
    texts, total = data.some_texts()
    texts = texts[:MOST]
    if not texts:
        raise ValueError(f"{data.train_source.name} holds no text")
    tokens = [len(ids) for ids in family.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]]
    line = f"{_of(len(tokens), total, 'documents')}: {_spread_words(tokens)}"
    if total != len(tokens):
        return line
    blocks = (sum(tokens) + len(tokens)) // data.block_length
    if blocks == 0:
        raise ValueError(
            f"{data.train_source.name} has {sum(tokens):,} tokens, fewer than one block of block_length "
            f"{data.block_length:,}; lower block_length or add text"
        )
    return f"{line}; {sum(tokens):,} together, about {blocks:,} blocks"


def _of(looked_at: int, total: int | None, what: str) -> str:
    if looked_at == total:
        return f"tokens of all {total:,} {what}"
    return f"tokens of {looked_at:,} {what}" + ("" if total is None else f" of {total:,}")


def _spread_words(tokens: Sequence[int]) -> str:
    return f"{min(tokens):,} shortest, {median_low(tokens):,} median, {max(tokens):,} longest"
