r"""Pre-train checkpoints/tiny-llama from scratch on key-value recall over English (see README.md here).

    MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=17179869184 \
        python checkpoints/pretrain_tiny_llama.py --out checkpoints/tiny-llama --work /tmp/tiny-llama

Every parameter is trained (fp32 weights, bf16 autocast, fp32 attention), with fresh samples in each step. Contexts grow
from 32 to 512 tokens: reading a fact back is learned on short contexts, where it is one of few, and then carried over
to long ones; the next length begins when MASTERED of the answer tokens are right. The state in --work is written every
--save-every steps, so that a second call goes on where the first stopped and ends at the same weights.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpoints.pretraining import PretrainingRun, parse_arguments, warmed_cosine
from checkpoints.tiny_llama import build_model, build_tokenizer
from subtoken_train.datasets.recall import RecallRecords, RecallSample, RecallTask, recall_accuracy
from subtoken_train.datasets.text_batches import TextSample, collate_text
from subtoken_train.types import Batch, Region

CONTEXT_WEIGHT = 0.2  # of the next-token loss on the context; the answers' has weight 1


class Phase(NamedTuple):
    """A stage of the curriculum: contexts of ``context_length`` tokens that state ``facts`` (range)."""

    context_length: int
    facts: tuple[int, int]
    questions: int
    relative_batch: int  # times --batch-size


CURRICULUM = (
    Phase(32, (2, 5), 5, 2),
    Phase(48, (3, 7), 7, 2),
    Phase(64, (4, 10), 10, 2),
    Phase(96, (6, 15), 12, 1),
    Phase(128, (6, 20), 12, 1),
    Phase(192, (8, 28), 16, 1),
    Phase(256, (8, 32), 16, 1),
    Phase(512, (8, 48), 16, 1),
)
PRESENT = 0.7  # share of the steps that the present phase gets; the others go to any phase so far
MASTERED, MEMORY = 0.96, 0.97  # running mean of the answer tokens that are right, and its decay per step
DEV_TASKS = {64: (6, 4), 128: (12, 8), 256: (16, 8), 512: (24, 8)}
"""Facts and questions of the dev figures by context length."""


def losses(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, float]:
    """Cross-entropy of the answer tokens and of the context's, and the share of answer tokens that are right.

    Right padding needs no mask: nothing looks ahead.
    """
    logits = model(input_ids=batch.input_ids_BN, use_cache=False).logits[:, :-1].float()
    targets, regions = batch.input_ids_BN[:, 1:], batch.regions_BN[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    answers = regions == Region.ANSWER
    right = (logits[answers].argmax(-1) == targets[answers]).float().mean().item()
    return loss[answers].mean(), loss[regions == Region.CONTEXT].mean(), right


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
        """One sample of a phase; how many facts it states, and how many are asked, is drawn, too."""
        facts = int(rng.integers(phase.facts[0], phase.facts[1] + 1))
        questions = int(rng.integers(1, min(facts, phase.questions) + 1))
        task = RecallTask(self.tokenizer, phase.context_length, facts, questions)
        return task.sample(rng, "train").text

    def train_step(self) -> dict[str, float]:
        """One optimiser step on fresh samples of the present phase, or of an earlier one, so that none is forgotten.

        The next phase begins when this one is mastered.
        """
        args, rng = self.args, np.random.default_rng([self.args.seed, self.step])
        stage, accuracy = int(self.progress.get("stage", 0)), self.progress.get("accuracy", 0.0)
        place = stage if rng.random() < PRESENT else int(rng.integers(stage + 1))
        phase = CURRICULUM[place]
        samples = [self.training_sample(rng, phase) for _ in range(args.batch_size * phase.relative_batch)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            answer, context, right = losses(self.model, collate_text(samples, self.tokenizer.pad_token_id))
        self.update(answer + CONTEXT_WEIGHT * context, warmed_cosine(self.step, 0, args.steps, warmup=200))
        if place == stage:
            accuracy = MEMORY * accuracy + (1 - MEMORY) * right
        if accuracy > MASTERED and stage + 1 < len(CURRICULUM):
            stage, accuracy = stage + 1, 0.0
        self.progress = {"stage": stage, "accuracy": accuracy}
        return {"answers": answer.item(), "context": context.item(), "right": right, "stage": stage}

    def evaluate(self) -> dict[str, object]:
        """Recall by context length."""
        return {str(length): recall(self.model, samples, self.tokenizer) for length, samples in self.dev.items()}


def main() -> None:
    """Train, log dev recall, save model and tokenizer."""
    args = parse_arguments(__doc__, out="checkpoints/tiny-llama", steps=3000, batch_size=16, learning_rate=1e-3)
    run = Run(args)
    run.train()
    run.model.set_attn_implementation("sdpa")
    run.model.eval().save_pretrained(args.out)
    run.tokenizer.save_pretrained(args.out)
    print(json.dumps({"dev": recall(run.model, run.dev_samples(512, 24, 8, count=256), run.tokenizer)}), flush=True)


if __name__ == "__main__":
    main()
