r"""Pre-train checkpoints/tiny-llama from scratch on key-value recall over English (see README.md here).

    MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=17179869184 \
        python checkpoints/pretrain_tiny_llama.py --out checkpoints/tiny-llama --work /tmp/tiny-llama

Every parameter is trained (fp32 weights, bf16 autocast, fp32 attention), with fresh samples in each step. Contexts grow
from 64 to 512 tokens: reading a fact back is learned on short contexts, where it is one of few, and then carried over
to long ones. A step's batch depends on the seed and the step alone; the state in --work is written every --save-every
steps, so that a second call goes on where the first stopped and ends at the same weights.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subtoken_train.datasets.recall import RecallRecords, RecallSample, RecallTask, recall_accuracy
from subtoken_train.datasets.text_batches import TextSample, collate_text
from subtoken_train.types import Batch, Region

from pretraining import PretrainingRun, parse_arguments, warmed_cosine
from tiny_llama import build_model, build_tokenizer

CONTEXT_WEIGHT = 0.2  # of the next-token loss on the context; the answers' has weight 1


class Phase(NamedTuple):
    """A stage of the curriculum: up to step ``last``, contexts of ``context_length`` tokens with ``facts`` (range)."""

    last: int
    context_length: int
    facts: tuple[int, int]
    questions: int
    relative_batch: int  # times --batch-size


CURRICULUM = (
    Phase(1000, 32, (1, 3), 6, 8),
    Phase(1500, 64, (2, 6), 6, 8),
    Phase(2500, 128, (6, 12), 8, 4),
    Phase(3500, 256, (8, 24), 12, 2),
    Phase(10**9, 512, (8, 40), 16, 1),
)
DEV_TASKS = {64: (6, 4), 128: (12, 8), 256: (16, 8), 512: (24, 8)}
"""Facts and questions of the dev figures by context length."""


def losses(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the answer tokens, and of the context's; right padding needs no mask: nothing looks ahead."""
    logits = model(input_ids=batch.input_ids_BN, use_cache=False).logits[:, :-1].float()
    targets, regions = batch.input_ids_BN[:, 1:], batch.regions_BN[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    return loss[regions == Region.ANSWER].mean(), loss[regions == Region.CONTEXT].mean()


@torch.no_grad()
def recall(model: nn.Module, samples: list[RecallSample], tokenizer: object) -> float:
    """Percentage of asked facts that are right under teacher forcing: names and codes before them are given."""
    model.eval()
    hits, total = 0.0, 0
    for start in range(0, len(samples), 16):
        some = samples[start : start + 16]
        batch = collate_text([sample.text for sample in some], tokenizer.pad_token_id)
        guess = model(input_ids=batch.input_ids_BN, use_cache=False).logits.argmax(-1)[:, :-1]
        for row, sample in enumerate(some):
            answer = guess[row, sample.text.prompt_length - 1 : len(sample.text.input_ids) - 1]
            hits += recall_accuracy(tokenizer.decode(answer, skip_special_tokens=True), sample.codes)
        total += len(some)
    model.train()
    return round(100 * hits / total, 2)


class Run(PretrainingRun):
    """The model, its tokenizer, and the tasks of the curriculum."""

    def build(self) -> dict[str, nn.Module]:
        """The model alone."""
        self.tokenizer = build_tokenizer()
        self.model = build_model()
        self.model.set_attn_implementation("fp32")
        self.dev = {
            length: self.dev_samples(length, facts, questions) for length, (facts, questions) in DEV_TASKS.items()
        }
        return {"model": self.model}

    def dev_samples(self, context_length: int, facts: int, questions: int, count: int = 32) -> list[RecallSample]:
        """Held-out samples: English of the dev split, facts drawn for it."""
        task = RecallTask(self.tokenizer, context_length, facts, questions)
        records = RecallRecords(task, "dev", count)
        return [records[i] for i in range(count)]

    def training_sample(self, rng: np.random.Generator, phase: Phase) -> TextSample:
        """One sample of a phase; how many facts it states is drawn, too."""
        facts = int(rng.integers(phase.facts[0], phase.facts[1] + 1))
        task = RecallTask(self.tokenizer, phase.context_length, facts, min(facts, phase.questions))
        return task.sample(rng, "train").text

    def train_step(self) -> dict[str, float]:
        """One optimiser step on fresh samples."""
        args = self.args
        rng = np.random.default_rng([args.seed, self.step])
        phase = next(phase for phase in CURRICULUM if self.step < phase.last)
        samples = [self.training_sample(rng, phase) for _ in range(args.batch_size * phase.relative_batch)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            answer, context = losses(self.model, collate_text(samples, self.tokenizer.pad_token_id))
        self.update(answer + CONTEXT_WEIGHT * context, warmed_cosine(self.step, 0, args.steps, warmup=200))
        return {"answers": answer.item(), "context": context.item()}

    def evaluate(self) -> dict[str, object]:
        """Recall by context length."""
        return {str(length): recall(self.model, samples, self.tokenizer) for length, samples in self.dev.items()}


def main() -> None:
    """Train, log dev recall, save model and tokenizer."""
    args = parse_arguments(__doc__, out="checkpoints/tiny-llama", steps=6000, batch_size=16, learning_rate=2e-3)
    run = Run(args)
    run.train()
    run.model.set_attn_implementation("sdpa")
    run.model.eval().save_pretrained(args.out)
    run.tokenizer.save_pretrained(args.out)
    print(json.dumps({"dev": recall(run.model, run.dev_samples(512, 24, 8, count=256), run.tokenizer)}), flush=True)


if __name__ == "__main__":
    main()
