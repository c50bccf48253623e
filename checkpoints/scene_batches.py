"""Batches of digit scenes for pre-training: what is asked when, as tokens and pixels."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from checkpoints.tiny_llava import PATCH, VISUAL_TOKENS, build_processor
from subtoken_train.datasets.scenes import (
    CELL,
    COLOR_NAMES,
    COLORS,
    GRID,
    IMAGE_SIZE,
    SHORT_KINDS,
    Objects,
    Scene,
    ask,
    asked_color,
    draw_scene,
)

IGNORE = -100
SECOND_PHASE, THIRD_MIX = 7000, 9500
LATE_KINDS = {"exists_color": 4, "count": 4, "choice": 3}
LAST_KINDS = {"exists_color": 4, "exists_color_easy": 4, "count": 2, "choice": 5}
Sample = tuple[Scene, list[int], list[int], list[str | None]]


def ask_in_training(rng: np.random.Generator, objects: Objects, kind: str) -> tuple[str, str]:
    """Ask as in the data set, or of two kinds of this training alone.

    ``list_color`` teaches addressing by colour. ``exists_color_easy`` is ``exists_color``, but if the answer is no, no
    digit of the scene has the colour (if one is left).
    """
    if kind not in ("list_color", "exists_color_easy"):
        return ask(rng, objects, kind)
    some = objects[int(rng.integers(len(objects)))]
    if kind == "list_color":
        places = {name: [item.place for item in objects if item.color_name == name] for name in COLOR_NAMES}
        return "list color .", " ".join(" ".join([name, str(len(found)), *found]) for name, found in places.items())
    unused = sorted(set(range(len(COLORS))) - {item.color for item in objects})
    return asked_color(rng, some, unused or list(set(range(len(COLORS))) - {some.color}))


class SceneBatches:
    """Turns scenes and questions into token batches exactly as the processor's chat template does."""

    def __init__(self) -> None:
        tokenizer = build_processor().tokenizer
        self.ids = tokenizer.get_vocab()
        self.vocab_size = len(tokenizer)

    def sample(self, rng: np.random.Generator, split: str, kinds: list[str]) -> Sample:
        """One record: a scene and a turn per kind; ids, labels and each token's kind (None outside answers)."""
        scene = draw_scene(rng, split)
        ids = [self.ids["<s>"], self.ids["USER:"]] + [self.ids["<image>"]] * VISUAL_TOKENS
        labels, token_kinds = [IGNORE] * len(ids), [None] * len(ids)
        for turn, kind in enumerate(kinds):
            question, answer = ask_in_training(rng, scene.objects, kind)
            prompt = ["USER:"] * (turn > 0) + question.split() + ["ASSISTANT:"]
            target = [self.ids[word] for word in answer.split()] + [self.ids["</s>"]]
            ids += [self.ids[word] for word in prompt] + target
            labels += [IGNORE] * len(prompt) + target
            token_kinds += [None] * len(prompt) + [kind] * (len(target) - 1) + [None]
        return scene, ids, labels, token_kinds

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """Right-padded ids and labels, normalised pixels, and per patch the digit and colour of its cell."""
        length = max(len(ids) for _, ids, _, _ in samples)
        ids = torch.zeros(len(samples), length, dtype=torch.long)
        labels = torch.full_like(ids, IGNORE)
        cells = np.full((len(samples), 2, GRID * GRID), 0)
        cells[:, 0], cells[:, 1] = 10, len(COLORS)
        for row, (scene, sample_ids, sample_labels, _) in enumerate(samples):
            ids[row, : len(sample_ids)] = torch.tensor(sample_ids)
            labels[row, : len(sample_ids)] = torch.tensor(sample_labels)
            for item in scene.objects:
                cells[row, :, item.cell] = item.digit, item.color
        pixels = torch.from_numpy(np.stack([scene.pixels for scene, *_ in samples])).permute(0, 3, 1, 2)
        side = torch.arange(IMAGE_SIZE // PATCH) * PATCH // CELL
        patch_cell = (side[:, None] * GRID + side[None]).flatten()
        return {
            "input_ids": ids,
            "labels": labels,
            "pixel_values": pixels / 127.5 - 1,
            "patch_targets": torch.from_numpy(cells)[:, :, patch_cell],
        }


def draw_kinds(rng: np.random.Generator, step: int) -> list[str]:
    """The turns of one training record.

    First a quarter raster descriptions, a quarter lists by digit, half records of six short questions. The second
    phase has fewer of those, lists by colour (what teaches to address by colour: without them counting and
    colour-and-digit questions stay at chance), and records of eight short questions that lean on what arrives last.
    """
    draw, second, third = rng.random(), step >= SECOND_PHASE, step >= THIRD_MIX
    share = 0.06 if second else 0.25
    if draw < share:
        return ["describe"]
    if draw < 2 * share:
        return ["list"]
    if not second:
        return [str(kind) for kind in rng.choice(SHORT_KINDS, 6)]
    if draw < (0.22 if third else 0.45):
        return ["list_color"]
    kinds = (*SHORT_KINDS, "exists_color_easy") if third else SHORT_KINDS
    late = LAST_KINDS if third else LATE_KINDS
    weights = np.array([late.get(kind, 1) for kind in kinds], float)
    return [str(kind) for kind in rng.choice(kinds, 8, p=weights / weights.sum())]
