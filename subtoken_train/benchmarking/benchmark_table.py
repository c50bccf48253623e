"""A benchmark's rows for people, made from the record alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from subtoken_train.benchmarking.pairs import cell
from subtoken_train.benchmarking.rounds import middle_ms

_MIB = 2**20


def row_lines(row: Mapping[str, Any]) -> list[str]:
    """The table of one length and batch size."""
    ours = row["subject"]
    title = f"{row['prompt']['words']}, batch {row['batch_size']}, {row['new_tokens']} forced tokens"
    head = ["side", "entries", "cache MiB", "index", "slack", "peak MiB", "prefill ms", f"{ours}/it"]
    head += ["step ms", f"{ours}/it"]
    table = [head]
    for name, side in row["sides"].items():
        held = side["prompt_bytes"]
        room = side["final_bytes"]["slack"]
        cells = [name, f"{side['entries']:,}", f"{(held['total'] - held['slack']) / _MIB:.3f}"]
        cells += [f"{held['index'] / max(1, held['payload']):.2%}", f"{room / _MIB:.3f}"]
        cells.append(f"{side['peak_bytes'] / _MIB:.1f}")
        for part in ("prefill", "step"):
            found = row["ratios"][part].get(name)
            cells += [f"{middle_ms(side[f'{part}_seconds']):.2f}", "" if found is None else _ratio(found, row)]
        table.append(cells)
    rounds = f"{row['pairs']} rounds" if row["pairs"] > 1 else "1 round: no intervals"
    lines = [f"{title}, {rounds}", *aligned_columns(table)]
    lines += [f"{name}: {side['words']}; kernel: {side['kernel']}" for name, side in row["sides"].items()]
    lines += _share_lines(row)
    return lines + [f"note: {note}" for note in row["notes"]]


def _ratio(found: Sequence[float], row: Mapping[str, Any]) -> str:
    """With its interval, where there is one."""
    return cell((found[0], found[1], found[2])) if row["pairs"] > 1 else f"{found[0]:.2f}"


def _share_lines(row: Mapping[str, Any]) -> list[str]:
    """Attention's rate of reading over a copy's."""
    if "share_of_copy" not in row:
        return []
    table = [["one layer's attention", "reads MiB", "GB/s", "copy GB/s", "share of copy"]]
    for name, found in row["share_of_copy"].items():
        rates = [
            times * found["read_bytes"] / middle_ms(found[f"{part}_seconds"]) / 1e6
            for part, times in (("attention", 1), ("copy", 2))
        ]
        share = "{:.1%} [{:.1%}, {:.1%}]".format(*found["share"]) if row["pairs"] > 1 else f"{found['share'][0]:.1%}"
        table.append([name, f"{found['read_bytes'] / _MIB:.3f}", *(f"{rate:.2f}" for rate in rates), share])
    return aligned_columns(table)


def aligned_columns(table: Sequence[Sequence[str]]) -> list[str]:
    """Columns of equal width: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            [cells[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(cells[1:], widths[1:], strict=True))]
        )
        for cells in table
    ]
