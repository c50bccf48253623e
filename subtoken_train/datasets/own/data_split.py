"""Records into train, dev and test: by picture, so that none is seen in training and asked about afterwards."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeVar

from subtoken_train.datasets.own.question_table import OwnRecord
from subtoken_train.datasets.record_format import image_names, used_turns

SHARE = 0.1
"""Of the pictures (or questions, or texts) that dev gets, and test; one at least, ``MOST_HELD`` at most."""
MOST_HELD = 1000
SPLITS = ("train", "dev", "test")
T = TypeVar("T")


def split_by(groups: Mapping[str, Sequence[T]], seed: int, what: str) -> dict[str, list[T]]:
    """Whole groups by split, in their own order; which group goes where depends on its name and the seed alone.

    Args:
        groups: what belongs together, by a name.
        seed: another one deals anew.
        what: a group in words, for the message.

    Raises:
        ValueError: fewer than three groups.
    """
    if len(groups) < len(SPLITS):
        raise ValueError(f"too few different {what} ({len(groups)}): train, dev and test need one each, three at least")
    held = min(max(1, round(SHARE * len(groups))), MOST_HELD)
    drawn = sorted(groups, key=lambda name: hashlib.sha256(f"{seed}\0{name}".encode()).digest())
    parts = {"dev": {*drawn[:held]}, "test": {*drawn[held : 2 * held]}, "train": {*drawn[2 * held :]}}
    return {split: [each for name in groups if name in parts[split] for each in groups[name]] for split in SPLITS}


def group_records(records: Sequence[OwnRecord], same: Mapping[str, str]) -> dict[str, list[OwnRecord]]:
    """Records that share a picture, directly or through others; those without one that ask the same.

    Args:
        records: with paths of images.
        same: see ``same_pictures``.
    """
    roots: dict[str, str] = {}

    def root(name: str) -> str:
        while roots.setdefault(name, name) != name:
            roots[name] = name = roots[roots[name]]
        return name

    keys = []
    for record in records:
        names = [f"image {same[name]}" for name in image_names(record.row)] or [f"asks {_asked(record)}"]
        for name in names[1:]:
            roots[root(name)] = root(names[0])
        keys.append(names[0])
    groups: dict[str, list[OwnRecord]] = defaultdict(list)
    for record, key in zip(records, keys, strict=True):
        groups[root(key)].append(record)
    return dict(groups)


def check_answers(records: Sequence[OwnRecord], same: Mapping[str, str]) -> None:
    """Raise a ``ValueError`` where one question about the same images has two answers."""
    said: dict[tuple[str, ...], tuple[str, str]] = {}
    for record in records:
        turns = used_turns(record.row)
        if len(turns) != 2:
            continue  # conversations differ in what was said before
        question = (*(same[name] for name in image_names(record.row)), " ".join(turns[0]["value"].split()))
        answer, place = said.setdefault(question, (turns[1]["value"].strip(), record.place))
        if answer != turns[1]["value"].strip():
            about = "about the same image " if image_names(record.row) else ""
            raise ValueError(
                f"{record.place} answers a question {about}otherwise than {place.rpartition(', ')[2]} does "
                f"({turns[1]['value'].strip()[:40]!r}, {answer[:40]!r}); keep one of them"
            )


def _asked(record: OwnRecord) -> str:
    turns = used_turns(record.row)
    return " ".join(turns[0]["value"].split()) if turns else ""
