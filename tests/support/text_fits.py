"""Short fits of random tiny language models: recall under Quest with query-conditioned routers, from files on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml

from checkpoints.tiny_llama import build_tokenizer
from tests.support.text_families import text_model

QUEST = {"name": "quest", "keep_ratio": 0.5, "page_size": 4, "window": 8}
ROUTING = {"num_groups": 8, "kept_groups": 6, "query_conditioned": True, "budget": "global"}
RECALL = {"context_length": 64, "num_facts": 3, "num_questions": 2, "train_samples": 16, "batch_size": 4}
SIZES = {"hidden_size": 32, "intermediate_size": 48}


def save_language_model(folder: Path, kind: str = "llama", tokenizer: Any = None, **settings: Any) -> Path:
    """A random model of two layers and a tokenizer; None: the embedded one's."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer() if tokenizer is None else tokenizer
    text_model(kind, 2, vocab_size=len(tokenizer), **{**SIZES, **settings}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def text_recipe(path: Path, backbone: Path, data: dict[str, Any] = RECALL, **bands: Any) -> list[str]:
    """Write a recipe, ``bands`` in place of its model's own; ``--config`` and its file."""
    model = {"backbone": {"path": str(backbone)}, "reducer": QUEST, "routing": ROUTING}
    model["lora"] = {"rank": 2, "alpha": 4, "dropout": 0.0}
    model["optimizer"] = {"learning_rate": 0.01, "warmup_steps": 0}
    trainer = {"accelerator": "cpu", "max_steps": 3, "enable_progress_bar": False, "enable_model_summary": False}
    whole = {"model": {**model, **bands}, "data": data, "trainer": trainer}
    path.write_text(yaml.safe_dump({**whole, "output_dir": str(path.parent / "run")}))
    return ["--config", str(path)]
