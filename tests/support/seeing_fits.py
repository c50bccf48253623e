"""Short fits of random tiny models that see: what moved, and whether the run's folder reads back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from subtoken_train.artifact.config import AdapterConfig
from subtoken_train.artifact.folder import read_adapter
from subtoken_train.cli.main import main
from subtoken_train.cli.recipe import RecipeCLI
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.family import Family
from tests.support.helpers import moved_by_fit, save_backbone

IN_TOWER_BF16 = [
    "--model.reducer.name=visionzip",
    "--model.routing.selector=mlp",
    "--model.gradient_checkpointing=true",
    "--trainer.precision=bf16-mixed",
]


def argv_of(tiny_run: Callable[..., list[str]], folder: Path, family: Family, *extra: str) -> list[str]:
    """As ``tiny_run``: three steps on the same scenes, seen by ``family``, which is saved below ``folder``."""
    path = save_backbone(family, folder / "seeing")
    settings = ["--data.max_length=512", "--model.reducer.keep_ratio=0.5", "--trainer.max_steps=3"]
    return tiny_run(f"--model.backbone.path={path}", *settings, "--model.optimizer.warmup_steps=0", *extra)


def assert_moves_exactly_the_trainables(argv: list[str], layers: int) -> None:
    """All that trains moved, nothing else did, and LoRA is on q and v of every layer."""
    cli = RecipeCLI(argv[1:])
    moved = moved_by_fit(cli)
    assert {f"compressed.{name}" for name in moved} == set(cli.model.trained())
    assert len([name for name in moved if "lora_" in name]) == layers * 2 * 2


def read_back(argv: list[str], folder: Path, model_type: str) -> tuple[AdapterConfig, CompressedBackbone]:
    """Fit, and read the run's adapter: it is of the backbone, and its LoRA moved."""
    assert main(argv) == 0
    config, backbone, _ = read_adapter(folder / "run" / "adapter")
    assert config.identity.model_type == model_type
    assert all(p.abs().sum() > 0 for name, p in backbone.named_parameters() if "lora_B" in name)
    return config, backbone
