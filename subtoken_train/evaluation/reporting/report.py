"""All that a report says, before it takes a format."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from subtoken_train.evaluation.reporting.curves import Curve, make_curves
from subtoken_train.evaluation.reporting.paper import PaperComparison, compare_paper
from subtoken_train.evaluation.reporting.runs import ArmResults, read_results
from subtoken_train.evaluation.reporting.score_tables import KindScores, ScoreTable, make_kinds, make_tables, ordered
from subtoken_train.evaluation.results import ArmFacts, Manifest

METHODS = {
    "fastv": "FastV",
    "visionzip": "VisionZip",
    "fastervlm": "FasterVLM",
    "prumerge": "PruMerge",
    "sparsevlm": "SparseVLM",
    "divprune": "DivPrune",
    "cdpruner": "CDPruner",
    "dart": "DART",
    "vispruner": "VisPruner",
    "evs": "EVS",
    "vidcom2": "VidCom2",
    "quest": "Quest",
    "aircache": "AirCache",
    "h2o": "H2O",
    "kvcompose": "KVCompose",
    "pyramidkv": "PyramidKV",
    "snapkv": "SnapKV",
    "streaming_llm": "StreamingLLM",
    "tgv_kv": "TGV-KV",
    "vl_cache": "VL-Cache",
    "expected_attention": "ExpectedAttention",
    "compactor": "Compactor",
    "keydiff": "KeyDiff",
    "tova": "TOVA",
    "lagkv": "LagKV",
}
SELECTORS = {"linear": "router", "mlp": "MLP router", "value_norm": "by value norm", "random": "at random"}
"""Spellings of methods and selectors in tables; others go by their own name."""


@dataclass(frozen=True)
class TaskFacts:
    """Conditions of a task that two reports must share to be compared."""

    task: str
    score: str
    asked: str
    options: str
    source: str
    samples: str
    digest: str
    arms: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """The parts of a report; a part without content is empty.

    Attributes:
        titles: arm -> what people call it, no two alike.
        tasks: how each task was asked; more than one line where arms differ in it.
        comparisons: printed rows beside ours.
    """

    arms: tuple[ArmResults, ...]
    titles: dict[str, str]
    tables: tuple[ScoreTable, ...]
    tasks: tuple[TaskFacts, ...]
    curves: tuple[Curve, ...]
    kinds: tuple[KindScores, ...]
    comparisons: tuple[PaperComparison, ...]

    @property
    def task_names(self) -> list[str]:
        """All tasks, each once."""
        return list(dict.fromkeys(fact.task for fact in self.tasks))


def make_report(
    folders: Sequence[Path],
    paper: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Read results folders and work everything out.

    ``paper`` is a file of printed tables (None: no comparison). ``progress`` is called with (done, total) as runs are
    read and scored.

    Raises:
        ValueError: what ``read_results`` and ``compare_paper`` refuse.
    """
    arms = ordered(read_results(folders, progress))
    return Report(
        tuple(arms),
        human_names({arm.name: arm.facts for arm in arms}),
        make_tables(arms),
        tuple(_task_facts(arms)),
        tuple(make_curves(arms)),
        tuple(make_kinds(arms)),
        () if paper is None else tuple(compare_paper(arms, paper)),
    )


def human_names(arms: Mapping[str, ArmFacts]) -> dict[str, str]:
    """Map each arm to ``FastV 25 % + S16K4 router``; where these words fit several, the arm's name is added."""
    words = {name: _method(facts) for name, facts in arms.items()}
    alike = Counter(words.values())
    return {name: method if alike[method] == 1 else f"{method} ({name})" for name, method in words.items()}


def _method(facts: ArmFacts) -> str:
    """Name reducer, groups and eviction, shares in %."""
    parts = [spoken(facts.reducer)] if facts.reducer != "-" else []
    if facts.groups != "-":
        shape, selector, *rest = [*facts.groups.split(), ""]
        parts.append(" ".join(filter(None, [shape, SELECTORS.get(selector, f"{selector} router"), *rest])))
    parts += [spoken(facts.eviction)] if facts.eviction != "-" else []
    if not parts:
        return "no compression" if facts.adapter is not None else "no compression, no adapter"
    untrained = [] if facts.trained else ["untrained"]
    return ", ".join([" + ".join(parts), *untrained, *(["context first"] if facts.protocol == "context_first" else [])])


def spoken(words: str) -> str:
    """Turn ``snapkv 0.15625 int8`` into ``SnapKV 15.6 % int8``."""
    shares = re.sub(r"(?<= )[01]?\.\d+(?= |$)", lambda share: f"{100 * float(share[0]):.3g} %", words)
    return re.sub(r"\w+", lambda name: METHODS.get(name[0], name[0]), shares)


def _task_facts(arms: Sequence[ArmResults]) -> list[TaskFacts]:
    found: dict[TaskFacts, dict[str, None]] = defaultdict(dict)
    for arm in arms:
        for runs in arm.runs.values():
            for run in runs.values():
                found[_facts_of(run.manifest, run.asked)][arm.name] = None
    return [replace(facts, arms=tuple(names)) for facts, names in sorted(found.items(), key=lambda item: item[0].task)]


def _facts_of(manifest: Manifest, asked: str) -> TaskFacts:
    """Return the facts of one run; who answered is added."""
    whole = "" if manifest.expected_rows is None else f" of {manifest.expected_rows:,}"
    options = json.dumps(manifest.options) if manifest.options else "-"
    samples, digest = f"{manifest.rows:,}{whole}", manifest.samples_sha256[:12]
    source = manifest.source or "its own Hub id"
    return TaskFacts(manifest.task, manifest.primary, asked, options, source, samples, digest, ())
