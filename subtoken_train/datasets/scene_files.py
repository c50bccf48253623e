"""Digit scenes as files: images and questions in LLaVA's instruction format, for training and evaluation alike."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from subtoken_train.artifact.whole_folder import FolderKind, whole_folder
from subtoken_train.datasets.record_format import IMAGE_PLACEHOLDER
from subtoken_train.datasets.scenes import DESCRIPTION_KINDS, SHORT_KINDS, SPLITS, ask, draw_scene

_DESCRIPTION_SHARE = 0.3  # of training questions: 15 % describe, 15 % list
_DESCRIPTION_EVERY = 10  # records, in dev and test
_SCENES = FolderKind("a folder of scenes", "subtoken-train data scenes")


def write_scenes(
    folder: str | Path, *, train: int = 12800, dev: int = 800, test: int = 4800, seed: int = 0, overwrite: bool = False
) -> None:
    """Write so many records of the splits, whole or not at all; ``overwrite`` renames an old folder to ``NAME.1``."""
    with whole_folder(Path(folder), overwrite, _SCENES) as partial:
        for split, count in zip(SPLITS, (train, dev, test), strict=True):
            write_scene_split(partial, split, count, seed)
            print(f"{split}: {count} records")


def write_scene_split(folder: Path, split: str, count: int, seed: int) -> None:
    """Write ``<folder>/<split>.json`` and ``<folder>/<split>/000000.jpg`` and on: one image and question per record.

    Training kinds are drawn (15 % describe, 15 % list, the rest even); in dev and test every tenth record is a
    description and the rest cycle through the short kinds.
    """
    (folder / split).mkdir(parents=True, exist_ok=True)
    records = []
    for index in range(count):
        rng = np.random.default_rng([seed, SPLITS.index(split), index])
        block, place = divmod(index, _DESCRIPTION_EVERY)
        kinds, number = SHORT_KINDS, block * (_DESCRIPTION_EVERY - 1) + place
        if place == _DESCRIPTION_EVERY - 1:
            kinds, number = DESCRIPTION_KINDS, block
        if split == "train":
            kinds = DESCRIPTION_KINDS if rng.random() < _DESCRIPTION_SHARE else SHORT_KINDS
            number = int(rng.integers(len(kinds)))
        kind = kinds[number % len(kinds)]
        scene = draw_scene(rng, split)
        question, answer = ask(rng, scene.objects, kind)
        name = f"{split}/{index:06d}.jpg"
        Image.fromarray(scene.pixels).save(folder / name, quality=90, subsampling=0)
        turns = [("human", f"{IMAGE_PLACEHOLDER}\n{question}"), ("gpt", answer)]
        conversations = [{"from": role, "value": value} for role, value in turns]
        records.append({"id": f"{split}-{index:06d}", "image": name, "kind": kind, "conversations": conversations})
    (folder / f"{split}.json").write_text(json.dumps(records, indent=1), encoding="utf-8")
