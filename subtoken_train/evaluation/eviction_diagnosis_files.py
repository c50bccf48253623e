"""The files of an eviction's diagnosis: CSV tables, and the picture drawn from the same numbers.

eviction_layers.csv   per layer, means over the prompts
eviction_prompts.csv  per prompt and layer: how many entries compete and stay
eviction.png          budget per layer, sparsity, and how well the choice foresees what is read
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from subtoken_train.evaluation.charts import axes_in_a_row, draw_bars, draw_lines, image_of
from subtoken_train.evaluation.eviction_diagnosis import PromptLayer


def eviction_layers(rows: list[PromptLayer]) -> pd.DataFrame:
    """A row per layer: means over the prompts that have a figure; ``kept_share`` is what chance would hit."""
    means = pd.DataFrame(rows).drop(columns="record").groupby("layer", as_index=False).mean()
    means.insert(3, "kept_share", means["kept"] / means["entries"])
    return means


def write_eviction_tables(rows: list[PromptLayer], folder: Path) -> None:
    """Write the CSV files into an existing folder."""
    prompts = pd.DataFrame(rows)[["record", "layer", "entries", "kept"]]
    for name, frame in (("eviction_layers", eviction_layers(rows)), ("eviction_prompts", prompts)):
        frame.to_csv(folder / f"{name}.csv", index=False, float_format="%.6g", lineterminator="\r\n")


def draw_eviction(rows: list[PromptLayer], label: str, folder: Path) -> None:
    """Draw the PNG file into an existing folder; ``label`` names the compression."""
    means = eviction_layers(rows)
    figure, (left, middle, right) = axes_in_a_row(3)
    draw_bars(left, means["kept"].tolist(), f"budget per layer, {label}", "layer", "entries that stay, mean")
    sparsity = {
        "sparsity, rows that ask": means["sparsity"].tolist(),
        "sparsity, generated tokens": means["generated_sparsity"].tolist(),
        "their share on image or context": means["body_attention"].tolist(),
    }
    draw_lines(middle, sparsity, "attention", "layer", "share")
    foreseen = {
        "hit rate": means["hit_rate"].tolist(),
        "attention kept": means["attention_kept"].tolist(),
        "rank agreement": means["rank_agreement"].tolist(),
        "hit rate by chance": means["kept_share"].tolist(),
    }
    draw_lines(right, foreseen, "what stays, against what is read", "layer", "share, correlation")
    right.set_ylim(min(0.0, float(means["rank_agreement"].min())), None)  # a correlation may be negative
    image_of(figure).save(folder / "eviction.png")
