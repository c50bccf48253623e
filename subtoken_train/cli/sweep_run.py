"""One run of a sweep: its folder, its ``fit`` command, and how far it got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class SweepRun:
    """One combination of a sweep, or one fit of a grid; ``name`` is its overrides in short, and its folder's name."""

    name: str
    folder: Path
    configs: tuple[str, ...]
    overrides: tuple[tuple[str, str], ...]

    def fit_arguments(self) -> list[str]:
        """``fit --config ... --KEY=VALUE ... --output_dir=...``."""
        configs = [word for path in self.configs for word in ("--config", path)]
        overrides = [f"--{key}={value}" for key, value in self.overrides]
        return ["fit", *configs, *overrides, f"--output_dir={self.folder}"]

    @property
    def finished(self) -> bool:
        """True if the run has left its adapter, which is written last."""
        return (self.folder / "adapter" / "subtoken_config.json").is_file()

    @property
    def resumable(self) -> bool:
        """True if the run stopped after a checkpoint."""
        from subtoken_train.training.checkpoints import newest_complete

        return newest_complete(self.folder / "checkpoints") is not None

    def last_metrics(self, names: Sequence[str]) -> dict[str, float]:
        """The last value of each metric in the run's CSV logs, and the last ``step``; without what was never logged."""
        from subtoken_train.cli.loggers import logged

        courses = logged(self.folder)
        steps = {step for course in courses.values() for step in course}
        last = {name: courses[name][max(courses[name])] for name in names if name in courses}
        return {**last, "step": float(max(steps))} if steps else last
