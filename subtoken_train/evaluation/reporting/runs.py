"""Results folders -> arms with their runs, one per task and seed.

Scores are computed anew from the records with the task's metric. Every table is a view of one frame of samples a run.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from subtoken_train.errors import unknown_name
from subtoken_train.evaluation import results
from subtoken_train.evaluation.tasks import TASKS, build_task

SAMPLES = ("kind", "score", "emptied", *results.COUNTS)
"""Columns of a frame of samples, whose index is their ids: what ``SampleRecord`` says, and the score computed anew."""
SEED_WORD = re.compile(r"[-_.]?seed[-_=]?\d+", re.IGNORECASE)
SAME_FACTS = ("reducer", "groups", "eviction", "protocol", "acts", "nominal_kv", "trained")
"""Facts that runs of one arm must share; paths of backbone and adapter differ between machines and seeds."""


@dataclass(frozen=True)
class Cost:
    """Bytes and seconds of a frame of samples; seconds of processes that ran beside each other are added up."""

    samples: pd.DataFrame

    @cached_property
    def total(self) -> dict[str, float]:
        """Sums of all ``COUNTS``, and how many samples lost a whole region in some layer (``emptied``)."""
        return {name: self.samples[name].sum() for name in ("emptied", *results.COUNTS)}

    @property
    def shares(self) -> dict[str, float | None]:
        """Return what stayed as a share of all that there was; None where there was nothing.

        ``measured`` is the compressed region as a nominal budget promises it, ``with_index`` with what finds its value
        groups, ``prompt`` everything; ``entries`` are (token, layer) entries that some head keeps.
        """
        sums = self.total
        parts = {
            "measured": (sums["region_bytes"] - sums["index_bytes"], sums["region_dense_bytes"]),
            "with_index": (sums["region_bytes"], sums["region_dense_bytes"]),
            "prompt": (sums["kv_bytes"], sums["dense_kv_bytes"]),
            "entries": (sums["entries_after"], sums["entries_before"]),
        }
        return {name: float(part / whole) if whole else None for name, (part, whole) in parts.items()}

    @property
    def spread(self) -> float | None:
        """Standard deviation over the samples of the share ``measured``; None for fewer than two."""
        own = self.samples[self.samples.region_dense_bytes > 0]
        shares = (own.region_bytes - own.index_bytes) / own.region_dense_bytes
        return float(shares.std()) if len(shares) > 1 else None

    @property
    def seconds(self) -> float:
        """Time of all passes, of prompts and of answers."""
        return float(self.total["prefill_seconds"] + self.total["decode_seconds"])

    @property
    def acted(self) -> bool:
        """Tell whether an entry or a value part left the cache, or what stayed takes fewer bytes or is read in part."""
        sums = self.total
        fewer = sums["entries_after"] < sums["entries_before"] or sums["values_after"] < sums["entries_after"]
        return bool(fewer or sums["region_bytes"] < sums["region_dense_bytes"] or sums["unread_bytes"] > 0)


@dataclass(frozen=True)
class Run:
    """An arm, seed and task; ``one_token``: what is scored is of prompts' last rows; ``subtasks``: answered ones."""

    folder: Path
    manifest: results.Manifest
    samples: pd.DataFrame
    scores: dict[str, float]
    higher_is_better: bool
    one_token: bool
    subtasks: tuple[str, ...] = ()
    asked: str = ""
    question_compressed: bool = False

    @property
    def cost(self) -> Cost:
        """Bytes and seconds of all samples together."""
        return Cost(self.samples)

    @property
    def is_mean(self) -> bool:
        """Tell whether the printed score is the mean of the samples' scores: only then may samples be resampled."""
        primary = self.scores.get(self.manifest.primary)
        return primary is not None and abs(primary - self.samples.score.mean()) <= 1e-5


@dataclass(frozen=True)
class ArmResults:
    """An arm with its seeds; ``runs`` by task, then seed; its name has no seed, its facts are the first run's."""

    name: str
    facts: results.ArmFacts
    runs: dict[str, dict[int | None, Run]]

    @property
    def seeds(self) -> list[int]:
        """All known seeds, ascending."""
        return sorted({seed for runs in self.runs.values() for seed in runs if seed is not None})

    @property
    def compressed(self) -> bool:
        """Tell whether anything acts on its cache."""
        return self.facts.acts != "-"

    def answered(self, task: str) -> dict[int | None, Run]:
        """Return the runs of a task with at least one sample, by seed."""
        return {seed: run for seed, run in self.runs.get(task, {}).items() if len(run.samples)}

    def is_moot(self, task: str) -> bool:
        """Tell whether all answers were beyond compression: it acted after the prompt, which gives the first token."""
        late = self.facts.acts == "after prefill" and self.facts.protocol == "query_aware"
        answered = self.answered(task).values()
        return late and bool(answered) and all(run.one_token for run in answered)


def read_results(folders: Sequence[Path], progress: Callable[[int, int], None] | None = None) -> list[ArmResults]:
    """Read all arms of some folders, which may share one by task or seed; ``progress`` gets (done, total)."""
    places: list[Path] = []
    for folder in folders:
        if not (found := sorted(path.parent for path in folder.glob(f"*/*/{results.MANIFEST_FILE}"))):
            writes = "'subtoken-train evaluate' writes them"
            raise ValueError(f"{folder} holds no results (ARM/TASK/{results.MANIFEST_FILE}; {writes})")
        if unnamed := sorted({path.parent for path in folder.glob(f"*/*/{results.SAMPLES_GLOB}")}.difference(found)):
            # an arm or a task would be missing from the tables without a word
            raise ValueError(
                f"{unnamed[0]} holds answers and no {results.MANIFEST_FILE}; evaluate it again, or move it away"
            )
        places += found
    arms: dict[str, ArmResults] = {}
    for done, place in enumerate(places, start=1):
        _add(arms, _read_run(place))
        if progress is not None:
            progress(done, len(places))
    return list(arms.values())


def _add(arms: dict[str, ArmResults], run: Run) -> None:
    facts, task = run.manifest.arm, run.manifest.task
    name = SEED_WORD.sub("", facts.name)
    facts = replace(facts, anchor=None if facts.anchor is None else SEED_WORD.sub("", facts.anchor))
    arm = arms.setdefault(name, ArmResults(name, facts, {}))
    for fact in (*SAME_FACTS, "anchor"):
        mine, other = getattr(facts, fact), getattr(arm.facts, fact)
        if mine != other:
            raise ValueError(f"{run.folder}: arm {name} has {fact} {mine}, but {other} elsewhere; rename one of them")
    runs = arm.runs.setdefault(task, {})
    if facts.seed in runs:
        both = f"{runs[facts.seed].folder} and {run.folder}"
        raise ValueError(f"arm {name}, seed {facts.seed} appears twice on {task}: {both}; name one of them")
    for other_run in runs.values():
        if other_run.manifest.samples_sha256 != run.manifest.samples_sha256:
            both, how = f"{other_run.folder} and {run.folder}", "evaluate both with the same files and options"
            raise ValueError(f"arm {name} answered different samples of {task} in {both}; {how}")
    runs[facts.seed] = run


def _read_run(folder: Path) -> Run:
    manifest, place = results.Manifest.read(folder), folder / results.MANIFEST_FILE
    # what acts on a terminal, or breaks a line of a table, is written out
    texts = [(key, value) for key, value in asdict(manifest.arm).items() if isinstance(value, str)]
    shown: Any = {key: "".join(x if x.isprintable() else ascii(x)[1:-1] for x in text) for key, text in texts}
    manifest = replace(manifest, arm=replace(manifest.arm, **shown))
    if manifest.task not in TASKS:
        raise ValueError(f"{place}: {unknown_name('task', manifest.task, TASKS)}")
    records = list(results.read_samples(folder).values())
    if len(records) > manifest.rows:
        words = f"holds {len(records)} samples, but its manifest says {manifest.rows}"
        raise ValueError(f"{folder} {words}; remove the folder")
    try:
        task = build_task(manifest.task, manifest.source, **manifest.options)
    except (TypeError, ValueError) as error:  # two options of one name, or a value that the task refuses
        raise ValueError(f"{place}: {error}") from None
    metric, answers = task.metric(), [(record.prediction, record.reference) for record in records]
    scores: dict[str, float] = {}
    own: list[float] = []
    if records:
        try:
            metric.update(*zip(*answers, strict=True))
            scores = {name: float(value) for name, value in metric.compute().items()}
            own = [metric.score(*answer) for answer in answers]
        except Exception as error:  # references are whatever the files hold, and metrics take theirs apart
            words = str(error)[:200] if type(error) is ValueError else "not of the form that the task gives them"
            raise ValueError(f"{folder}: its references and predictions cannot be scored ({words})") from error
        if manifest.primary not in scores:
            raise ValueError(f"{place}: {unknown_name('score', manifest.primary, scores)}")
    rows = [
        (record.kind, score, bool(record.emptied), *(getattr(record, name) for name in results.COUNTS))
        for record, score in zip(records, own, strict=True)
    ]
    # one token of an answer or choice is of the prompt's last row; an answer of two is one and its end, if more may be
    tokens = 1 if task.options.get("max_new_tokens") == 2 else 2
    told = [(each.new_tokens, each.prediction) for each in records]
    one_token = all(count == len(said) if isinstance(said, list) else count <= tokens for count, said in told)
    return Run(
        folder, manifest, pd.DataFrame(rows, index=[record.id for record in records], columns=SAMPLES), scores,
        bool(metric.higher_is_better), one_token, subtasks=tuple(name for name in metric.subtasks if name in scores),
        asked=task.asks, question_compressed=task.compresses_question,
    )  # fmt: skip
