"""The recipe of one's own data: a shipped one's settings, with files, sizes and steps that suit the data."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from subtoken_train.cli.init_backbones import EMBEDDED, Chosen, count_tokens
from subtoken_train.cli.init_lengths import longest_record
from subtoken_train.datasets.own.own_data import OwnData
from subtoken_train.datasets.record_format import used_turns
from subtoken_train.errors import plain

EPOCHS, LEAST_STEPS, WARMUP_SHARE = 3, 60, 0.05
_VALIDATIONS = 4
_BLOCK = {"block_length": 2048, "context_length": 1024, "prefix_tokens": 64}
_EMBEDDED_BLOCK = {"block_length": 640, "context_length": 512, "prefix_tokens": 16}
_HALVINGS = 2
"""How often a block is halved where there is little text."""


@dataclass(frozen=True)
class OwnRecipe:
    """A recipe as it is written.

    Attributes:
        content: its settings.
        said: what follows from the data, a line each.
    """

    content: dict[str, Any]
    said: tuple[str, ...]


def own_recipe(data: OwnData, chosen: Chosen, folder: Path, out: Path, name: str) -> OwnRecipe:
    """The recipe of one's own data.

    Args:
        data: what is trained on.
        chosen: the backbone.
        folder: where images are.
        out: where the records will lie.
        name: of the run.

    Raises:
        ValueError: too little text for one block, or a record too long for the embedded backbone.
    """
    content = deepcopy(chosen.recipe)
    content["output_dir"] = f"runs/{name}"
    content["model"]["backbone"]["path"] = chosen.path
    lengths = []
    if data.kind == "images":
        band, samples = _image_band(data, content["data"], folder, out), len(data.splits["train"])
        if chosen.is_embedded:
            lengths = _raise_length(band, *longest_record(data, chosen))
    else:
        band, samples = _text_band(data, chosen, out)
    trainer = content["trainer"]
    band["batch_size"] = min(band["batch_size"], samples)
    accumulate = min(trainer.get("accumulate_grad_batches", 1), samples // band["batch_size"])
    per_step = band["batch_size"] * accumulate
    wanted, most = max(LEAST_STEPS, math.ceil(EPOCHS * samples / per_step)), trainer["max_steps"]
    steps = min(wanted, most)
    cut = f", the most that the shipped recipe takes; {EPOCHS} passes are {wanted:,}" if wanted > most else ""
    trainer |= {
        "max_steps": steps,
        "accumulate_grad_batches": accumulate,
        "log_every_n_steps": min(10, samples // band["batch_size"]),
    }
    trainer |= {"val_check_interval": max(1, steps * accumulate // _VALIDATIONS), "check_val_every_n_epoch": None}
    content["model"]["optimizer"]["warmup_steps"] = max(1, round(WARMUP_SHARE * steps))
    return OwnRecipe({**content, "data": band}, (f"{steps:,} steps of {per_step:,} records{cut}", *lengths))


def recipe_text(content: dict[str, Any], chosen: Chosen, path: Path, data: Path) -> str:
    """The file, with what one may want to know on top."""
    header = (
        f"# {plain(str(data))} on {chosen.path}, with the settings of the shipped recipe of {chosen.name}\n"
        f"#\n#   check   subtoken-train check --config {path}\n"
        f"#   train   subtoken-train fit --config {path}\n"
        "#\n# Every key can be overridden behind --config; 'subtoken-train recipes show' prints commented recipes.\n"
    )
    return header + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)


def _image_band(data: OwnData, shipped: dict[str, Any], folder: Path, out: Path) -> dict[str, Any]:
    files = {"train_file": str(out / "train.json"), "val_file": str(out / "dev.json"), "image_folder": str(folder)}
    return {**files, **{key: value for key, value in shipped.items() if key not in files}}


def _raise_length(band: dict[str, Any], longest: int, positions: int) -> list[str]:
    """Set ``max_length`` so that no record is cut where the backbone has positions for it; says so in a line."""
    before, band["max_length"] = band["max_length"], max(band["max_length"], min(longest, positions))
    if band["max_length"] == before:
        return []
    beyond = f", and more than {positions:,} are cut" if longest > positions else ""
    return [f"data.max_length {band['max_length']:,} instead of {before:,}: a record takes {longest:,} tokens{beyond}"]


def _text_band(data: OwnData, chosen: Chosen, out: Path) -> tuple[dict[str, Any], int]:
    """The data, and how many blocks the training text fills."""
    as_records = {"documents": "conversations"} if data.kind == "conversations" else {}
    sources = {key: {"name": str(out / f"{split}.jsonl"), **as_records} for key, split in _SOURCES.items()}
    tokens = {key: count_tokens(chosen.path, said(data, split))[0] for key, split in _SOURCES.items()}
    sizes = dict(_EMBEDDED_BLOCK if chosen.name == EMBEDDED[False] else _BLOCK)
    for _ in range(_HALVINGS):
        if tokens["train"] >= 2 * sizes["block_length"] and tokens["val"] >= sizes["block_length"]:
            break
        sizes = {key: size // 2 for key, size in sizes.items()}
    blocks = tokens["train"] // sizes["block_length"]
    if blocks < 2 or tokens["val"] < sizes["block_length"]:
        raise ValueError(
            f"there is too little text: {tokens['train']:,} tokens to train on and {tokens['val']:,} for dev, and a "
            f"block takes {sizes['block_length']}; add text"
        )
    batch = 8 if chosen.is_embedded else chosen.recipe["data"]["batch_size"]
    return {**sources, **sizes, "batch_size": batch, "seed": 0}, blocks


_SOURCES = {"train": "train", "val": "dev"}


def said(data: OwnData, split: str) -> list[str]:
    """The texts of a split."""
    rows = data.splits[split]
    if data.kind == "texts":
        return [row["text"] for row in rows]
    return ["\n".join(turn["value"] for turn in used_turns(row)) for row in rows]
