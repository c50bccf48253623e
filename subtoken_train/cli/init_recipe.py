"""The recipe of one's own data: a shipped one's settings, with files, sizes and steps that suit the data."""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from subtoken_train.cli.init_backbones import EMBEDDED, Chosen, count_tokens
from subtoken_train.datasets.own.own_data import OwnData
from subtoken_train.errors import plain

EPOCHS, LEAST_STEPS, WARMUP_SHARE = 3, 60, 0.05
_VALIDATIONS = 4
_BLOCK = {"block_length": 2048, "context_length": 1024, "prefix_tokens": 64}
_EMBEDDED_BLOCK = {"block_length": 640, "context_length": 512, "prefix_tokens": 16}
_HALVINGS = 2
"""How often a block is halved where there is little text."""


def recipe_content(data: OwnData, chosen: Chosen, folder: Path, out: Path, name: str) -> dict[str, Any]:
    """A recipe as it is written.

    Args:
        data: what is trained on.
        chosen: the backbone.
        folder: where images are.
        out: where the records will lie.
        name: of the run.

    Raises:
        ValueError: too little text for one block.
    """
    content = deepcopy(chosen.recipe)
    content["output_dir"] = f"runs/{name}"
    content["model"]["backbone"]["path"] = chosen.path
    if data.kind == "images":
        band, samples = _image_band(data, content["data"], folder, out), len(data.splits["train"])
    else:
        band, samples = _text_band(data, chosen, out)
    trainer = content["trainer"]
    band["batch_size"] = min(band["batch_size"], samples)
    accumulate = min(trainer.get("accumulate_grad_batches", 1), samples // band["batch_size"])
    per_step = band["batch_size"] * accumulate
    steps = min(max(LEAST_STEPS, math.ceil(EPOCHS * samples / per_step)), trainer["max_steps"])
    trainer |= {
        "max_steps": steps,
        "accumulate_grad_batches": accumulate,
        "log_every_n_steps": min(10, samples // band["batch_size"]),
    }
    trainer |= {"val_check_interval": max(1, steps * accumulate // _VALIDATIONS), "check_val_every_n_epoch": None}
    content["model"]["optimizer"]["warmup_steps"] = max(1, round(WARMUP_SHARE * steps))
    return {**content, "data": band}


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
    return ["\n".join(turn["value"] for turn in row["conversations"]) for row in rows]
