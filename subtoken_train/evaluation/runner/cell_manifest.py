"""What a cell's folder says of its answers, written before the first: only answers of the same kind may join them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.evaluation.results.manifest import MANIFEST_FILE, Manifest
from subtoken_train.evaluation.runner.cell import Cell
from subtoken_train.evaluation.runner.processes import Processes
from subtoken_train.evaluation.tasks.task import Sample
from subtoken_train.reducers import split_settings
from subtoken_train.version import __version__


def write_manifest(cell: Cell, backbone: CompressedBackbone, processes: Processes) -> None:
    """Write the cell's manifest, or compare it with the one that is there.

    Raises:
        ValueError: the folder's records were made by another arm, task or setting, or of other samples.
    """
    family, task, arm = backbone.family, cell.task, cell.arm
    metric = task.metric()
    manifest = Manifest(
        arm=arm.facts,
        task=task.name,
        options=_as_read(task.options),
        source=None if task.source is None else str(task.source),
        rows=len(cell.samples),
        expected_rows=task.expected_rows,
        primary=task.primary,
        points=sorted(metric.points),
        samples_sha256=samples_digest(cell.samples),
        settings={
            "batch_size": cell.batch_size,
            "max_length": cell.max_length,
            "dtype": str(family.model.dtype).removeprefix("torch."),
            "device": family.model.device.type,
            "processes": processes.count,
            "adapter_sha256": arm.adapter_sha256,
            "reducer": _as_read(asdict(arm.reducer)),
            "eviction_options": _as_read(dict(arm.spec.eviction_options)),
            "calibration_sha256": arm.calibration_sha256,
            "seed": arm.spec.seed,
            "versions": {"subtoken_train": __version__, **{name: version(name) for name in ("torch", "transformers")}},
        },
    )
    if (cell.folder / MANIFEST_FILE).is_file():
        _check_same(Manifest.read(cell.folder), manifest, cell)
    manifest.write(cell.folder)


SAME = ("dtype", "max_length", "adapter_sha256", "reducer", "eviction_options", "calibration_sha256", "seed")
"""Settings that change answers and that ``ArmFacts`` do not tell."""


COUNTED_ANEW = frozenset({"quest", "visionzip", "fastervlm", "prumerge"})
"""Reducers that kept other numbers of tokens, by page or by image, in the records of 0.2, which know no ``matches``."""


def _check_same(there: Manifest, now: Manifest, cell: Cell) -> None:
    """Records may only be joined by records of the same arm, task and samples; more samples may be asked.

    The anchor is no part of it: it only says whom the arm is compared with.
    """
    before, after = _pinned(there), _pinned(now)
    for name, new in after.items():
        if before[name] != new:
            raise ValueError(
                f"{cell.folder} holds answers with {name} {before[name]!r}, and now it is {new!r}; choose another "
                "results folder"
            )
    if there.rows > now.rows:
        raise ValueError(
            f"{cell.folder} is of {there.rows:,} samples, and {now.rows:,} are asked; raise limit, or choose another "
            "results folder"
        )
    if there.samples_sha256 != samples_digest(cell.samples[: there.rows]):
        raise ValueError(
            f"{cell.folder} holds answers to other samples than the task's files have now; choose another results "
            "folder"
        )


def _pinned(manifest: Manifest) -> dict[str, Any]:
    """What all answers of a folder share, by the name that messages give it."""
    facts = {f"arm.{key}": value for key, value in asdict(manifest.arm).items() if key != "anchor"}
    settings = {key: manifest.settings.get(key) for key in SAME}
    if isinstance(settings["reducer"], dict):  # version 0.1 wrote every method's settings
        settings["reducer"], _ = split_settings(settings["reducer"])
        if settings["reducer"].get("name") not in COUNTED_ANEW:
            settings["reducer"].setdefault("matches", None)
    return {**facts, "task options": manifest.options, **settings}


def samples_digest(samples: Sequence[Sample]) -> str:
    """SHA-256 of what is asked and of the references, in hexadecimal; images are not in it."""
    asked = [
        [s.id, s.prompt, s.choices, dict(s.reference), s.context_characters, s.max_new_tokens, s.stop] for s in samples
    ]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def _as_read(settings: dict[str, Any]) -> dict[str, Any]:
    """As a manifest gives them back."""
    content: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return content
