"""All that a report says, before it takes a format."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from subtoken_train.evaluation.reporting.curves import Curve, make_curves
from subtoken_train.evaluation.reporting.paper import FRAME, compare_paper
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
class Report:
    """The parts of a report; a part without content is empty.

    Attributes:
        titles: arm -> what people call it, no two alike.
        tasks: conditions that two reports must share to be compared: a row for each task, more where arms differ.
        comparisons: printed numbers beside ours, see ``compare_paper``.
    """

    arms: tuple[ArmResults, ...]
    titles: dict[str, str]
    tables: tuple[ScoreTable, ...]
    tasks: pd.DataFrame
    curves: tuple[Curve, ...]
    kinds: tuple[KindScores, ...]
    comparisons: pd.DataFrame

    @property
    def task_names(self) -> list[str]:
        """All tasks, each once."""
        return list(self.tasks.task.unique())


def make_report(
    folders: Sequence[Path],
    paper: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Read results folders and work everything out.

    ``paper`` is a file of printed tables (None: no comparison). ``progress`` is called with (done, total) as runs are
    read and scored.
    """
    arms = ordered(read_results(folders, progress))
    return Report(
        tuple(arms),
        human_names({arm.name: arm.facts for arm in arms}),
        make_tables(arms),
        task_facts(arms),
        tuple(make_curves(arms)),
        tuple(make_kinds(arms)),
        pd.DataFrame(columns=FRAME) if paper is None else compare_paper(arms, paper),
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


def task_facts(arms: Sequence[ArmResults]) -> pd.DataFrame:
    """Return how each task was asked, and by which arms."""
    runs = [(arm.name, run) for arm in arms for runs in arm.runs.values() for run in runs.values()]
    frame = pd.DataFrame([{**_facts_of(run.manifest, run.asked), "arms": name} for name, run in runs])
    conditions = [name for name in frame.columns if name != "arms"]
    named = frame.drop_duplicates().groupby(conditions, sort=False, as_index=False).agg({"arms": ", ".join})
    return named.sort_values("task", kind="stable")


def _facts_of(manifest: Manifest, asked: str) -> dict[str, str]:
    whole = "" if manifest.expected_rows is None else f" of {manifest.expected_rows:,}"
    return {
        "task": manifest.task,
        "score": manifest.primary,
        "asked": asked,
        "options": json.dumps(manifest.options) if manifest.options else "-",
        "read from": manifest.source or "its own Hub id",
        "samples": f"{manifest.rows:,}{whole}",
        "digest": manifest.samples_sha256[:12],
    }
