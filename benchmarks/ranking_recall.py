"""What each layer's attention ranking finds on the embedded VLM: recall of the asked objects' patches at 25 %.

    python benchmarks/ranking_recall.py

For every layer, the 16 of 64 patches that the last prompt token attends to most (FastV's ranking with L_f = layer + 1,
layers counted from 0); recall = found patches of the asked objects / min(16, their number). Dev digits.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from subtoken_train.datasets.collate import Collator
from subtoken_train.datasets.records import Record
from subtoken_train.datasets.scenes import CELL, GRID, KINDS, PLACES, Scene, ask, draw_scene
from subtoken_train.engine.attention_rows import attention_row
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.families.load import load_family
from subtoken_train.types import Region, Turn

PER_KIND = 100
PATCHES = 8
TOP = 16


def asked_cells(scene: Scene, kind: str, question: str) -> set[int]:
    """Cells of the objects that a question is about; empty where it asks for something absent."""
    words = set(question.split())
    if kind == "read":
        wanted = {PLACES.index(word) for word in words & set(PLACES)}
        return {item.cell for item in scene.objects if item.cell in wanted}
    if kind == "count":
        return {item.cell for item in scene.objects if item.color_name in words}
    if kind in ("describe", "list"):
        return {item.cell for item in scene.objects}
    return {item.cell for item in scene.objects if str(item.digit) in words}


def main() -> None:
    """Print a markdown table: kinds by layers."""
    family = load_family(BackboneConfig())
    collate = Collator(family, 512, generation=True)
    folder = Path(tempfile.mkdtemp())
    layers = range(family.shape.num_layers)
    side = np.arange(PATCHES) * (GRID * CELL // PATCHES) // CELL
    cell_of_patch = torch.from_numpy((side[:, None] * GRID + side[None]).flatten())
    print("| kind | " + " | ".join(f"L_f = {layer + 1}" for layer in layers) + " |")
    print("|---|" + "---|" * len(layers))
    rng = np.random.default_rng(5)
    for kind in KINDS:
        found: list[list[float]] = [[] for _ in layers]
        while len(found[0]) < PER_KIND:
            scene = draw_scene(rng, "dev")
            question, answer = ask(rng, scene.objects, kind)
            cells = asked_cells(scene, kind, question)
            if not cells:
                continue
            path = folder / "scene.png"
            Image.fromarray(scene.pixels).save(path)
            batch = collate([Record("scene", [path], [Turn("<image>\n" + question, answer)], kind)])
            wanted = torch.isin(cell_of_patch, torch.tensor(sorted(cells)))
            visible = batch.regions_BN != Region.PADDING
            positions = family.positions(batch)
            with torch.no_grad():
                hidden = family.embed(batch)
                for layer in layers:
                    row = attention_row(family, layer, hidden, visible, positions, batch.rank_position_B)
                    top = row[batch.regions_BN == Region.VISUAL].topk(TOP).indices
                    found[layer].append(float(wanted[top].sum()) / min(TOP, int(wanted.sum())))
                    hidden = family.run_layers(hidden, visible, positions, start=layer, stop=layer + 1)
        print(f"| {kind} | " + " | ".join(f"{np.mean(values):.2f}" for values in found) + " |", flush=True)


if __name__ == "__main__":
    main()
