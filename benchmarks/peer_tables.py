"""Tables of ``peer_accuracy.py`` from its records: every cell, and routed arms less the strongest peers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from subtoken_train.datasets.scenes import DESCRIPTION_KINDS
from subtoken_train.evaluation.intervals import bootstrap_interval

AWARENESS = ("blind", "reread", "aware")
GROUPS = {"scenes": ("questions", "descriptions"), "recall": ("recall",)}
ARM = "arm-"
STRONGEST = 3
Cell = dict[str, Any]


def read_cells(path: Path) -> list[Cell]:
    """The lines of a file of records; none where it is not there."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_task(folder: Path) -> dict[str, list[Cell]]:
    """Name of a method or an arm -> its cells, of one task.

    Raises:
        ValueError: cells were asked different questions.
    """
    found = {path.stem: read_cells(path) for path in sorted(folder.glob("*.jsonl"))}
    if len({json.dumps(cell["asked"], sort_keys=True) for cells in found.values() for cell in cells}) > 1:
        raise ValueError(f"the records of {folder} were asked different questions; they cannot stand in one table")
    return found


def scores_of(cell: Cell, group: str) -> list[float]:
    """Scores of ``questions``, ``descriptions`` or one kind, in an order that all cells of a task share."""
    kinds = cell["scores"]
    chosen = {
        "questions": [kind for kind in kinds if kind not in DESCRIPTION_KINDS],
        "descriptions": [kind for kind in kinds if kind in DESCRIPTION_KINDS],
    }.get(group, [group])
    return [score for kind in sorted(chosen) for score in kinds[kind]]


def peer_markdown(folder: Path) -> str:
    """A section for each task that has records."""
    tasks = {task: read_task(folder / task) for task in GROUPS}
    return "\n\n".join(_section(task, found) for task, found in tasks.items() if found)


def _section(task: str, found: dict[str, list[Cell]]) -> str:
    groups = GROUPS[task]
    shares = sorted({cell["share"] for cells in found.values() for cell in cells}, reverse=True)
    some = next(cell for cells in found.values() for cell in cells)
    sights = [
        sight for sight in AWARENESS if sight == "reread" or any(cell["awareness"] == sight for cell in _peers(found))
    ]
    heads = [f"{sight}, {group}" for sight in sights for group in groups]
    lines = [f"| {task} | KV nominal | measured | with index | {' | '.join(heads)} |", "|---" * (len(heads) + 4) + "|"]
    for share in shares:
        for name, cells in sorted(found.items(), key=lambda pair: not pair[0].startswith(ARM)):
            there = {cell["awareness"]: cell for cell in cells if cell["share"] == share and "scores" in cell}
            if there:
                lines.append(_row(name, share, there, sights, groups))
    asked = ", ".join(f"{len(scores_of(_scored(found)[0], group))} {group}" for group in groups)
    lines += ["", f"Asked: {asked} ({', '.join(f'{k} {v}' for k, v in some['asked'].items() if 'sha' not in k)})."]
    lines += [f"Refused: {words}" for words in _refusals(found)]
    return "\n".join([*lines, "", *_differences(found, groups, shares)])


def _scored(found: dict[str, list[Cell]]) -> list[Cell]:
    return [cell for cells in found.values() for cell in cells if "scores" in cell]


def _peers(found: dict[str, list[Cell]]) -> list[Cell]:
    return [cell for name, cells in found.items() if not name.startswith(ARM) for cell in cells if "scores" in cell]


def _row(name: str, share: float, there: dict[str, Cell], sights: list[str], groups: tuple[str, ...]) -> str:
    """An arm acts in prefill by the question, so that its scores stand where the question reads what was kept."""
    by_sight = {"reread": there["aware"]} if name.startswith(ARM) else there
    cells = [
        f"{100 * np.mean(scores_of(by_sight[sight], group)):.1f}" if sight in by_sight else "-"
        for sight in sights
        for group in groups
    ]
    measured, indexed = (max(cell[key] for cell in there.values()) for key in ("measured", "with_index"))
    words = f"**{name.removeprefix(ARM)}**" if name.startswith(ARM) else name
    return f"| {words} | {share:.3%} | {measured:.3%} | {indexed:.3%} | {' | '.join(cells)} |"


def _refusals(found: dict[str, list[Cell]]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name, cells in found.items():
        for cell in cells:
            if "refused" in cell and name not in (names := reasons.setdefault(cell["refused"], [])):
                names.append(name)
    return [f"{', '.join(names)}: {reason}." for reason, names in reasons.items()]


def _differences(found: dict[str, list[Cell]], groups: tuple[str, ...], shares: list[float]) -> list[str]:
    """Each compressed arm less the peers of its share that are strongest in a group, question by question."""
    lines = [
        f"| arm less peer | KV nominal | sight | {' | '.join(groups)} |",
        "|---" * (3 + len(groups)) + "|",
    ]
    for share in [share for share in shares if share < 1]:
        arms = [(name, cell) for name, cells in found.items() if name.startswith(ARM) for cell in cells]
        own = [(name.removeprefix(ARM), cell) for name, cell in arms if cell["share"] == share]
        for awareness in ("reread", "blind"):
            peers = {
                name: cell
                for name, cells in found.items()
                for cell in cells
                if not name.startswith(ARM)
                and "scores" in cell
                and (cell["share"], cell["awareness"]) == (share, awareness)
            }
            best = {name for group in groups for name in _strongest(peers, group)}
            for arm, cell in own:
                for peer in sorted(best):
                    cells = [_difference(cell, peers[peer], group) for group in groups]
                    lines.append(f"| {arm} - {peer} | {share:.3%} | {awareness} | {' | '.join(cells)} |")
    return lines


def _strongest(peers: dict[str, Cell], group: str) -> list[str]:
    return sorted(peers, key=lambda name: -float(np.mean(scores_of(peers[name], group))))[:STRONGEST]


def _difference(first: Cell, second: Cell, group: str) -> str:
    values = 100 * (np.array(scores_of(first, group)) - np.array(scores_of(second, group)))
    low, high = bootstrap_interval(values)
    return f"{values.mean():+.1f} [{low:+.1f}, {high:+.1f}]"
