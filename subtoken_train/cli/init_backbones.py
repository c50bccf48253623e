"""Which backbone one's own data are trained on, and the shipped recipe whose settings it takes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from subtoken_train.datasets.unknown_tokens import TOLERATED, SomeTexts, say_unknown, unknown_tokens
from subtoken_train.documents import read_yaml
from subtoken_train.errors import unknown_name
from subtoken_train.families.backbone_config import BackboneConfig, check_backbone, is_hub_id, resolve
from subtoken_train.resources import recipe_files

_ARMS = {"fastv25_s16k4": True, "quest25_s16k12": False}
"""The arm of a backbone's folder that is taken, and whether it is one that sees images."""
EMBEDDED = {True: "tiny", False: "tinylm"}
"""The backbones that ship, by whether they see images."""
_PUBLISHED = "llava7b"
"""For images whose words the embedded one does not know."""


@dataclass(frozen=True)
class Chosen:
    """A backbone.

    Attributes:
        name: folder of the shipped recipe.
        path: folder or Hub id of the backbone.
        recipe: the shipped recipe's content.
        why: how it was chosen, in words.
    """

    name: str
    path: str
    recipe: dict[str, Any]
    why: str

    @property
    def is_embedded(self) -> bool:
        """Whether it ships with the project."""
        return self.name in EMBEDDED.values()


def backbone_names(sees: bool) -> list[str]:
    """What ``--backbone`` takes beside paths and Hub ids, for images or for texts."""
    return [name for name, (_, of_images) in _templates().items() if of_images == sees]


def choose_backbone(given: str | None, sees: bool, texts: Sequence[str]) -> Chosen:
    """The backbone that is meant, or one that suits the data.

    Args:
        given: a shipped recipe's folder (``llava7b``), a Hub id or a folder; None: chosen here.
        sees: whether the data are images.
        texts: what the records say; a backbone that is at hand and does not know their words is named in a warning.

    Raises:
        ValueError: there is no such backbone, or it is of the other kind.
    """
    if given is None:
        return _default(sees, texts)
    chosen = _named(given, sees)
    if (tokenizer := _tokenizer_at_hand(chosen.path)) is not None:
        say_unknown(tokenizer, SomeTexts(list(texts), None), "your data")
    return chosen


def _templates() -> dict[str, tuple[Path, bool]]:
    """By folder: a shipped recipe, and whether its backbone sees images."""
    found = {}
    for name, path in recipe_files().items():
        folder, _, stem = name.rpartition("/")
        arm = stem.removeprefix(f"{folder}_")
        if arm in _ARMS:
            found[folder] = (path, _ARMS[arm])
    return found


def _default(sees: bool, texts: Sequence[str]) -> Chosen:
    """The embedded one, unless its tokenizer does not know the words."""
    embedded = _taken(EMBEDDED[sees], "the embedded one, which knows your words; small, for trying things out")
    found = unknown_tokens(_tokenizer_at_hand(embedded.path), SomeTexts(list(texts), None))
    if found is None or found.share <= TOLERATED:
        return embedded
    words = ", ".join(map(repr, found.examples))
    return _taken(_PUBLISHED, f"the embedded one does not know your words ({words}); it wants a GPU and its weights")


def _taken(name: str, why: str, path: str | None = None) -> Chosen:
    recipe = read_yaml(_templates()[name][0])
    return Chosen(name, path or recipe["model"]["backbone"]["path"], recipe, why)


def _named(given: str, sees: bool) -> Chosen:
    check_backbone(BackboneConfig(given))
    templates = _templates()
    if given in templates:
        name, path = given, None
    else:
        by_path = {_same(read_yaml(file)["model"]["backbone"]["path"]): name for name, (file, _) in templates.items()}
        name, path = by_path.get(_same(given)) or _of_its_family(given), given
    if templates[name][1] != sees:
        data, other = ("images", "reads texts alone") if sees else ("texts without images", "is for images")
        raise ValueError(
            f"your data are {data}, and backbone {given!r} {other}; take one of {', '.join(backbone_names(sees))}"
        )
    return _taken(name, "as you said", path)


def _same(path: str) -> str:
    """One name for a backbone, however its folder is written."""
    return os.path.realpath(found) if Path(found := resolve(path)).is_dir() else path


def _of_its_family(given: str) -> str:
    """The shipped recipe of a backbone of the same family; its configuration is read."""
    if not Path(resolve(given)).is_dir() and not is_hub_id(given):
        raise unknown_name("backbone", given, _templates())
    from subtoken_train.families.load import family_class

    wanted = family_class(BackboneConfig(given))
    return next(
        name
        for name, (file, _) in _templates().items()
        if name not in EMBEDDED.values()
        and family_class(BackboneConfig(read_yaml(file)["model"]["backbone"]["path"])) is wanted
    )


def _tokenizer_at_hand(path: str) -> Any:
    """The tokenizer of a folder; None for a Hub id, which is not asked for now, and where there is none."""
    if not Path(resolve(path)).is_dir():
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(resolve(path), trust_remote_code=False)
    except Exception:  # whatever the readers of broken files raise: check and fit say it in words
        return None


def count_tokens(path: str, texts: Sequence[str]) -> tuple[int, bool]:
    """Tokens of texts, and whether they were counted: where the tokenizer is not at hand, four characters are one."""
    tokenizer = _tokenizer_at_hand(path)
    if tokenizer is None:
        return sum(map(len, texts)) // 4, False
    return sum(map(len, tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"])), True
