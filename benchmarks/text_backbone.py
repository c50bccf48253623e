r"""The embedded language model read on through WikiText: the frozen backbone of ``text_routed.py``.

    python -m benchmarks.text_backbone --source DIR --out runs/text/backbone --work runs/text/pretraining

The embedded model has read Python's manual alone: to it WikiText's contexts are worth next to nothing, and what is
kept of one could not matter. Here every weight is trained on the first ``PARTS`` of WikiText-2's validation split (its
training split would do better); the adapters of ``text_routed.py`` are trained on the next part, the last one is dev,
and the test split is asked. The state in ``--work`` is written as the run goes, and the same command goes on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoints.pretraining import PretrainingRun, parse_arguments, warmed_cosine
from subtoken_train.evaluation.tasks.file_rows import benchmark_text

ROOT = Path(__file__).resolve().parents[1]
START = ROOT / "checkpoints/tiny-llama"
PARTS = {"backbone": (0.0, 0.7), "adapters": (0.7, 0.95), "dev": (0.95, 1.0)}
"""Of the validation split, in its order: who reads which share of its bytes."""
BLOCK, SCORED = 736, 176
"""Tokens of a block, and how many at its end are scored for the log."""


def part_of(source: Path, part: str) -> str:
    """The text of a part of the validation split."""
    text = benchmark_text(source / "valid.txt")
    first, last = PARTS[part]
    return text[round(first * len(text)) : round(last * len(text))]


def blocks_of(tokenizer: Any, text: str) -> Tensor:
    """Token ids in blocks, [blocks, BLOCK] int64, each with a BOS before; what is left at the end is dropped."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    count = len(ids) // (BLOCK - 1)
    body = torch.tensor(ids[: count * (BLOCK - 1)]).view(count, BLOCK - 1)
    return F.pad(body, (1, 0), value=tokenizer.bos_token_id)


@torch.no_grad()
def nats_of(model: nn.Module, blocks: Tensor, context: bool) -> float:
    """Mean nats a token of the last ``SCORED`` of every block, with all that stands before or with 64 tokens of it."""
    model.eval()
    read = blocks if context else blocks[:, -(SCORED + 64) :]
    total = 0.0
    for some in read.split(16):
        logits = model(input_ids=some, use_cache=False).logits[:, -SCORED - 1 : -1].float()
        total += F.cross_entropy(logits.flatten(0, 1), some[:, -SCORED:].flatten(), reduction="sum").item()
    model.train()
    return total / (len(blocks) * SCORED)


class Run(PretrainingRun):
    """The embedded model, and WikiText's blocks under random offsets."""

    def build(self) -> dict[str, nn.Module]:
        """The model alone."""
        self.tokenizer = AutoTokenizer.from_pretrained(START)
        self.model = AutoModelForCausalLM.from_pretrained(START)
        ids = self.tokenizer(part_of(self.args.source, "backbone"), add_special_tokens=False, verbose=False)
        self.ids = torch.tensor(ids["input_ids"])
        self.dev = blocks_of(self.tokenizer, part_of(self.args.source, "dev"))
        return {"model": self.model}

    def train_step(self) -> dict[str, float]:
        """One optimiser step on blocks drawn anywhere in the part."""
        args, rng = self.args, np.random.default_rng([self.args.seed, self.step])
        starts = rng.integers(0, len(self.ids) - BLOCK, size=args.batch_size)
        batch = torch.stack([self.ids[start : start + BLOCK - 1] for start in starts])
        batch = F.pad(batch, (1, 0), value=self.tokenizer.bos_token_id)
        logits = self.model(input_ids=batch, use_cache=False).logits[:, :-1].float()
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.update(loss, warmed_cosine(self.step, 0, args.steps, warmup=100))
        return {"loss": loss.item()}

    def evaluate(self) -> dict[str, object]:
        """Nats a token of dev with the whole context, and with its last 64 tokens."""
        return {
            name: round(nats_of(self.model, self.dev, whole), 4) for name, whole in (("context", True), ("64", False))
        }


def main() -> None:
    """Train, log dev, save model and tokenizer."""
    args = parse_arguments(
        __doc__ or "",
        out="runs/text/backbone",
        steps=500,
        batch_size=8,
        learning_rate=1e-3,
        reads="folder with WikiText's validation split as valid.txt",
    )
    run = Run(args)
    run.train()
    run.model.eval().save_pretrained(args.out)
    run.tokenizer.save_pretrained(args.out)
    print(json.dumps(run.evaluate()), flush=True)


if __name__ == "__main__":
    main()
