"""The adapter of one arm of a comparison and one seed: trained once, kept in a working folder, found again."""

import hashlib
import json
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.comparison_lists import ArmPlan
from subtoken_train.cli.main import main as subtoken
from subtoken_train.resources import recipe_text, shipped_recipe

ROOT = Path(__file__).resolve().parents[1]
TRAINED = "trained.json"


class Trainer:
    """Trains arms, each with each seed once.

    Args:
        arms: of the comparison, by name.
        work: folder of the adapters, one a name and seed.
    """

    def __init__(self, arms: Mapping[str, ArmPlan], work: Path) -> None:
        self.arms, self.work = arms, work

    def adapter(self, arm: ArmPlan, seed: int) -> tuple[Path, dict[str, Any]]:
        """The adapter that ``arm`` is asked with, trained unless it is there; commit and seconds of its training."""
        if arm.adapter_of is not None:
            arm = self.arms[arm.adapter_of]
        folder, key = self.work / f"{arm.name}-seed{seed}", run_key(arm)
        note = folder / TRAINED
        if note.exists() and (found := json.loads(note.read_text())).pop("key") == key:
            return folder / "adapter", found
        argv = ["fit", "--config", str(recipe_path(arm.recipe)), "--output_dir", str(folder), "--overwrite"]
        argv += ["--seed_everything", str(seed), "--data.seed", str(seed), "--trainer.enable_progress_bar", "false"]
        argv += arm.flags()
        if first := first_stage(arm.recipe):
            argv += ["--model.stage2.adapter", str(self.adapter(ArmPlan(first, first, first), seed)[0])]
        clock = time.perf_counter()
        if subtoken(argv) != 0:
            raise SystemExit(f"{arm.name} seed {seed} did not train")
        trained = {"commit": commit(), "train_seconds": round(time.perf_counter() - clock, 1)}
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        note.write_text(json.dumps({"key": key, **trained}))
        return folder / "adapter", trained


def first_stage(recipe: str) -> str | None:
    """The recipe whose run a stage-2 recipe starts from (``adapter: runs/NAME/adapter``); None for other recipes."""
    stage2 = yaml.safe_load(recipe_bytes(recipe))["model"].get("stage2")
    return None if stage2 is None else Path(stage2["adapter"]).parent.name


def run_key(arm: ArmPlan) -> str:
    """A digest of the arm and of the one it starts from: an adapter with another key is trained anew."""
    if (first := first_stage(arm.recipe)) is None:
        return digest(arm)
    return sha256(digest(arm).encode() + run_key(ArmPlan(first, first, first)).encode())


def digest(arm: ArmPlan) -> str:
    """SHA-256 of what makes the arm what it is."""
    return sha256(arm.content(yaml.safe_load(recipe_bytes(arm.recipe))))


def recipe_path(recipe: str) -> Path:
    """The file of a recipe that ships with the project."""
    path = shipped_recipe(recipe)
    if path is None:
        raise SystemExit(f"no recipe has the name {recipe}")
    return path


def recipe_bytes(recipe: str) -> bytes:
    """Return the recipe's text."""
    return recipe_text(recipe_path(recipe)).encode()


def sha256(content: bytes) -> str:
    """The digest in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def commit() -> str:
    """The commit that the working tree stands on."""
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
