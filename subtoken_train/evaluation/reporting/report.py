"""All that a report says, before it takes a format: arms, their tables, and sections of cells that every format writes.

A cell is text, an ``Estimate`` or None; ``cell_text`` makes it plain text, which each format escapes in its own way.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import pandas as pd

from subtoken_train.evaluation.reporting import score_tables
from subtoken_train.evaluation.reporting.curves import TOLERANCES, Curve, make_curves
from subtoken_train.evaluation.reporting.runs import ArmResults, read_results
from subtoken_train.evaluation.results import ArmFacts
from subtoken_train.ledger.kv_budget import share_words

_SAID = json.loads(files(__package__).joinpath("notes.json").read_text("utf-8"))
METHODS, SELECTORS = _SAID["methods"], _SAID["selectors"]
"""Spellings of methods and selectors in tables; others go by their own name."""
Cell = score_tables.Estimate | str | None
NOTHING = "-"
NOTES, CURVE_NOTE, TIME_NOTE = _SAID["all"], _SAID["curves"], _SAID["times"]
MATCHED = 0.01
"""Budgets differ where nominal or measured bytes are further apart than this share; then no verdict is given."""
_VERDICTS = ("better", "worse", "level", "without an interval", "not affected", "not paired")


@dataclass(frozen=True)
class Report:
    """The parts of a report; ``titles``: arm -> what people call it; ``tasks``: conditions, a row or more a task."""

    arms: tuple[ArmResults, ...]
    titles: dict[str, str]
    tables: tuple[score_tables.ScoreTable, ...]
    tasks: pd.DataFrame
    curves: tuple[Curve, ...]
    kinds: tuple[score_tables.KindScores, ...]

    @property
    def task_names(self) -> list[str]:
        """All tasks, each once."""
        return list(self.tasks.task.unique())


def make_report(folders: Sequence[Path], progress: Callable[[int, int], None] | None = None) -> Report:
    """Read results folders and work everything out; ``progress`` is called with (done, total)."""
    arms = score_tables.ordered(read_results(folders, progress))
    titles, kinds = human_names({arm.name: arm.facts for arm in arms}), tuple(score_tables.make_kinds(arms))
    return Report(
        tuple(arms), titles, score_tables.make_tables(arms), _task_facts(arms), tuple(make_curves(arms)), kinds
    )


def human_names(arms: Mapping[str, ArmFacts]) -> dict[str, str]:
    """Map each arm to ``FastV 25 % + S16K4 router``; where these words fit several, the arm's name is added."""
    words = {}
    for name, facts in arms.items():
        *shape, selector = facts.groups.split()
        groups = " ".join([*shape, SELECTORS.get(selector, f"{selector} router")])
        parts = {facts.reducer: spoken(facts.reducer), facts.groups: groups, facts.eviction: spoken(facts.eviction)}
        named = " + ".join(each for own, each in parts.items() if own != NOTHING)
        whole = "no compression" if facts.adapter is not None else "no compression, no adapter"
        words[name] = ", ".join([named, *score_tables.method_notes(facts)]) if named else whole
    alike = Counter(words.values())
    return {name: method if alike[method] == 1 else f"{method} ({name})" for name, method in words.items()}


def spoken(words: str) -> str:
    """Turn ``snapkv 0.15625 int8`` into ``SnapKV 15.6 % int8``."""
    shares = re.sub(r"(?<= )[01]?\.\d+(?= |$)", lambda share: f"{100 * float(share[0]):.3g} %", words)
    return re.sub(r"\w+", lambda name: METHODS.get(name[0], name[0]), shares)


def _task_facts(arms: Sequence[ArmResults]) -> pd.DataFrame:
    rows = []
    for name, run in [(arm.name, run) for arm in arms for runs in arm.runs.values() for run in runs.values()]:
        manifest = run.manifest
        whole = "" if manifest.expected_rows is None else f" of {manifest.expected_rows:,}"
        rows.append({
            "task": manifest.task, "score": manifest.primary, "asked": run.asked,
            "options": json.dumps(manifest.options) if manifest.options else NOTHING,
            "read from": manifest.source or "its own Hub id", "samples": f"{manifest.rows:,}{whole}",
            "digest": manifest.samples_sha256[:12], "arms": name,
        })  # fmt: skip
    frame = pd.DataFrame(rows).drop_duplicates()
    named = frame.groupby(list(frame.columns[:-1]), sort=False, as_index=False).agg({"arms": ", ".join})
    return named.sort_values("task", kind="stable")


@dataclass(frozen=True)
class Section:
    """A table under its heading; ``samples``: column of estimates -> samples that its largest cell rests on."""

    title: str
    frame: pd.DataFrame
    samples: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    level: int = 2
    about: score_tables.ScoreTable | score_tables.KindScores | tuple[Curve, ...] | None = None

    def written(self, write: Callable[[Cell, int], str]) -> pd.DataFrame:
        """Return the frame as text: ``write`` gets a cell and its column's samples, which stand in the heading."""
        columns = {}
        for name, cells in self.frame.items():
            counted = f" (n = {self.samples[name]:,})" if name in self.samples else ""
            columns[f"{name}{counted}"] = [write(cell, self.samples.get(name, 0)) for cell in cells]
        return pd.DataFrame(columns)


def sections(report: Report) -> list[Section]:
    """Return all tables of the report in order; charts and pictures are in the HTML page."""
    found = [part(table, report) for table in report.tables for part in (_scores, _budgets, _times)]
    if report.curves:
        methods = pd.DataFrame([_curve_row(curve) for curve in report.curves])
        found.append(Section("Accuracy against KV", methods, notes=(CURVE_NOTE,), about=report.curves))
    found += [_kinds(kinds, report) for kinds in report.kinds]
    return [*found, Section("How the tasks were asked", report.tasks)]


def verdicts(report: Report) -> list[str]:
    """Write a sentence for every arm with an anchor: where its paired differences say better, worse or neither."""
    lines = [_verdict(row, table, report) for table in report.tables for row in table.rows if row.anchor is not None]
    return lines or ["No arm was compared: none names an anchor that has results here."]


def _verdict(row: score_tables.ArmRow, table: score_tables.ScoreTable, report: Report) -> str:
    assert row.anchor is not None
    ours, its = row.arm.facts.nominal_kv, row.anchor.facts.nominal_kv
    who = f"{report.titles[row.arm.name]} against {report.titles[row.anchor.name]}"
    if row.anchor_ratio is None or max((abs(its / ours - 1) if ours else 1.0), abs(row.anchor_ratio - 1)) > MATCHED:
        measured = "not measured" if row.anchor_ratio is None else f"measured, anchor over arm {row.anchor_ratio:.4f}"
        shares = f"{share_words(ours)} against {share_words(its)}; {measured}"
        return f"{who}: no verdict, the budgets differ (nominal {shares})."
    found: dict[str, list[str]] = {}
    for column, heading in table.columns.items():
        cell = row.differences.get(column)
        if isinstance(cell, score_tables.Estimate):
            kind = "not affected" if cell.moot else cell.verdict or "without an interval"
            numbers = f" ({cell_text(cell, cell.n)})" if kind in {"better", "worse"} else ""
            found.setdefault(kind, []).append(heading + numbers)
        elif cell is not None:
            found.setdefault("not paired", []).append(f"{heading} ({cell})")
    parts = [f"{kind} on {', '.join(found[kind])}" for kind in _VERDICTS if kind in found]
    return f"{who}, both at {share_words(ours)} of the KV: {'; '.join(parts) or 'no task in common'}."


def cell_text(cell: Cell, samples: int = 0) -> str:
    """Return a whole cell as plain text: value, interval, and its own n where it is not the column's."""
    if cell is None or isinstance(cell, str):
        return cell or NOTHING
    remark = cell.remark(samples)
    return " ".join(filter(None, [cell.value_text, cell.interval_text, f"({remark})" if remark else ""]))


def _share_text(share: float | None) -> str:
    return NOTHING if share is None else share_words(share)


def nominal_text(facts: ArmFacts) -> str:
    """Return the share that an arm promises; for a threshold the recorded mean, ``measured`` if there is none."""
    return _share_text(facts.nominal_kv) if facts.promises else "measured"


def measured_text(row: score_tables.ArmRow) -> str:
    """Return the share that an arm took; for a threshold with its standard deviation, ``21.874% ± 3.120%``."""
    spread = row.cost.spread if row.arm.facts.by_threshold else None
    return _share_text(row.cost.shares["measured"]) + ("" if spread is None else f" ± {spread:.3%}")


def query_aware_text(arm: ArmResults, task: str | None = None) -> str:
    """Say whether the question was there when the cache was compressed: on a task, or on all (``yes on ruler``)."""
    if arm.facts.protocol == "query_aware":
        return "yes"
    holds = {name: any(run.question_compressed for run in runs.values()) for name, runs in arm.runs.items()}
    if task is not None:
        return "yes" if holds.get(task, False) else "no"
    named = [name for name, held in holds.items() if held]
    return "no" if not named else "yes" if len(named) == len(holds) else f"yes on {', '.join(named)}"


def _scores(table: score_tables.ScoreTable, report: Report) -> Section:
    rows, flags, printed = [], [], {key for row in table.rows for key in row.printed}
    for row in table.rows:
        title = report.titles[row.arm.name]
        budget = {
            "KV nominal": nominal_text(row.arm.facts),
            "KV measured": measured_text(row),
            "query-aware": query_aware_text(row.arm),
        }
        scores: dict[str, Cell] = {}
        for key, heading in table.columns.items():
            scores[heading] = row.scores[key]
            if key in printed:
                scores[f"{heading}, paper"] = f"{row.printed[key]:.2f}" if key in row.printed else None
        rows.append({"arm": title, "id": row.arm.name, **budget, **scores})
        if row.anchor is not None:
            apart = dict.fromkeys(scores, "") | {
                heading: row.differences[key] for key, heading in table.columns.items()
            }
            name = f"Δ to {report.titles[row.anchor.name]}"
            rows.append({"arm": name, "id": "", **dict.fromkeys(budget, ""), **apart})
        flags += [f"{title}: {flag}" for flag in row.flags]
    samples = {heading: table.samples[key] for key, heading in table.columns.items()}
    return Section(table.title, pd.DataFrame(rows, dtype=object), samples, tuple(flags), about=table)


def _budgets(table: score_tables.ScoreTable, report: Report) -> Section:
    rows = []
    for row in table.rows:
        facts, shares = row.arm.facts, row.cost.shares
        rows.append({
            "arm": report.titles[row.arm.name], "backbone": facts.backbone, "adapter": facts.adapter or NOTHING,
            "reducer": facts.reducer, "groups": facts.groups, "cache": facts.eviction,
            "trained": "yes" if facts.trained else "no", "seeds": ", ".join(map(str, row.arm.seeds)) or NOTHING,
            "acts": facts.acts, "with index": _share_text(shares["with_index"]),
            "KV prompt": _share_text(shares["prompt"]), "tokens that some head keeps": _share_text(shares["entries"]),
            "anchor": facts.anchor or NOTHING,
            "anchor KV / ours": NOTHING if row.anchor_ratio is None else f"{row.anchor_ratio:.4f}",
        })  # fmt: skip
    return Section("Budgets", pd.DataFrame(rows, dtype=object), level=3)


def _times(table: score_tables.ScoreTable, report: Report) -> Section:
    """The seconds of every arm, then of every method: the mean over its checkpoints (arms and seeds)."""
    tasks = [key for key in table.columns if key not in score_tables.MEANS]
    methods: dict[str, list[ArmResults]] = {}
    rows = []
    for row in table.rows:
        facts = row.arm.facts
        parts = [spoken(words.split()[0]) for words in (facts.reducer, facts.eviction) if words != NOTHING]
        parts += ["groups"] if facts.groups != NOTHING else []
        methods.setdefault(f"{' + '.join(parts) or 'no compression'}, {facts.backbone}", []).append(row.arm)
        rows.append({"arm": report.titles[row.arm.name], "id": row.arm.name, **_time_cells([row.arm], tasks, table)})
    rows += [{"arm": f"mean: {name}", "id": "", **_time_cells(arms, tasks, table)} for name, arms in methods.items()]
    return Section("Time", pd.DataFrame(rows, dtype=object), notes=(TIME_NOTE,), level=3)


def _time_cells(arms: list[ArmResults], tasks: list[str], table: score_tables.ScoreTable) -> dict[str, str]:
    """Mean seconds of each task and the minutes of all; no mean of checkpoints that answered unequal numbers."""
    runs = {task: [run for arm in arms for run in arm.runs.get(task, {}).values()] for task in tasks}
    cells, total = {"checkpoints": str(max(map(len, runs.values()), default=0))}, 0.0
    for task, found in runs.items():
        answered = {len(run.samples) for run in found}
        seconds = sum(run.cost.seconds for run in found) / len(found) if len(answered) == 1 and found else None
        whole = all(len(run.samples) == (run.manifest.expected_rows or run.manifest.rows) for run in found)
        part = "" if whole or len(answered) != 1 else f" ({answered.pop():,} samples)"
        cells[f"{table.columns[task]} (s)"] = NOTHING if seconds is None else f"{seconds:.1f}{part}"
        total = math.nan if seconds is None else total + seconds
    cells["total (min)"] = NOTHING if math.isnan(total) else f"{total / 60:.2f}"
    devices = {str(run.manifest.settings.get("device", NOTHING)) for found in runs.values() for run in found}
    return {**cells, "device": ", ".join(sorted(devices))}


def _kinds(kinds: score_tables.KindScores, report: Report) -> Section:
    columns, rows = {report.titles[arm]: scores for arm, scores in kinds.arms.items()}, []
    for kind in kinds.kinds:
        largest = max(scores[kind].n for scores in columns.values() if kind in scores)
        cells = {title: cell_text(scores.get(kind), largest) for title, scores in columns.items()}
        rows.append({"kind": f"{kind} (n = {largest:,})", **cells})
    return Section(f"{kinds.task} by question kind", pd.DataFrame(rows), about=kinds)


def _curve_row(curve: Curve) -> dict[str, str]:
    low, high = curve.span
    own = {task: sum(each.startswith(f"{task}/") for each in curve.scored) for task in curve.tasks}  # RULER's 13
    return {
        "method": spoken(curve.name),
        "tasks": ", ".join(f"{task} ({count} tasks)" if count else task for task, count in own.items()),
        "points": str(len(curve.points)),
        "r": f"{low:.4f} to {high:.4f}",
        "AUC": NOTHING if curve.area is None else f"{100 * curve.area:.2f}",
        **{f"r within {tolerance:.0%}": curve.reached_text(tolerance) or NOTHING for tolerance in TOLERANCES},
    }
