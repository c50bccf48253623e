r"""Pre-train checkpoints/tiny-llava from scratch on digit scenes (see README.md here for measured figures).

    MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=17179869184 \
        python checkpoints/pretrain_tiny_llava.py --out checkpoints/tiny-llava --work /tmp/tiny-llava

Every parameter is trained (fp32 weights, bf16 autocast, fp32 attention: CPU kernels of bf16 attention are slow), with a
fresh batch of scenes in each step. A step's batch depends on the seed and the step alone, and the state in --work is
written every --save-every steps, so a second call goes on where the first stopped and ends at the same weights. The
two variables keep glibc from giving big buffers back to the system after each operation (1.6 times faster steps).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from subtoken_train.datasets.scenes import COLORS, KINDS

from scene_batches import SECOND_PHASE, SceneBatches, draw_kinds
from tiny_llava import WIDTH, build_model, build_processor

GROWTH, FIRST_LAYERS = 8500, 4


def attention_fp32(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: object
) -> tuple[Tensor, None]:
    """SDPA in fp32 under any autocast."""
    with torch.autocast("cpu", enabled=False):
        return sdpa_attention_forward(module, query.float(), key.float(), value.float(), mask, **kwargs)


def losses(model: nn.Module, heads: nn.ModuleList, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Answer cross-entropy, and the auxiliary one on the projector's output (digit and colour of the patch's cell).

    Right padding needs no attention mask: no real token ever looks ahead.
    """
    features = torch.stack(list(model.model.get_image_features(pixel_values=batch["pixel_values"]).pooler_output))
    embeds = model.get_input_embeddings()(batch["input_ids"])
    is_image = (batch["input_ids"] == model.config.image_token_id)[..., None]
    embeds = embeds.masked_scatter(is_image, features.to(embeds.dtype))
    logits = model(inputs_embeds=embeds, use_cache=False).logits[:, :-1]
    answer = F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"][:, 1:].flatten())
    auxiliary = [
        F.cross_entropy(head(features).flatten(0, 1).float(), batch["patch_targets"][:, part].flatten())
        for part, head in enumerate(heads)
    ]
    return answer, torch.stack(auxiliary).sum()


@torch.no_grad()
def token_accuracy(
    model: nn.Module, batches: SceneBatches, split: str, per_kind: int, shuffle_images: bool = False
) -> dict[str, float]:
    """Teacher-forced share of right answer tokens per question kind; every kind is asked of ``per_kind`` scenes."""
    model.eval()
    hits, total = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    rng = np.random.default_rng([7, ["train", "dev", "test"].index(split)])
    for start in range(0, per_kind * len(KINDS), 64):
        kinds = [KINDS[i % len(KINDS)] for i in range(start, min(start + 64, per_kind * len(KINDS)))]
        samples = [batches.sample(rng, split, [kind]) for kind in kinds]
        batch = batches.collate(samples)
        pixels = batch["pixel_values"].roll(1, 0) if shuffle_images else batch["pixel_values"]
        guess = model(input_ids=batch["input_ids"], pixel_values=pixels, use_cache=False).logits.argmax(-1)
        for row, (_, _, labels, token_kinds) in enumerate(samples):
            for position, kind in enumerate(token_kinds):
                if kind is not None:
                    total[kind] += 1
                    hits[kind] += int(guess[row, position - 1] == labels[position])
    model.train()
    return {kind: round(100 * hits[kind] / total[kind], 2) for kind in KINDS}


def learning_rate_scale(step: int, steps: int, warmup: int = 300) -> float:
    """Share of the peak rate: a warm-up and a cosine per phase; the first two cosines are left before their end."""
    if step < SECOND_PHASE:
        return min(1.0, (step + 1) / warmup) * (0.5 * (1 + math.cos(math.pi * step / 9000)) + 0.02)
    first, last = (SECOND_PHASE, 11500) if step < GROWTH else (GROWTH, steps)
    progress = (step - first) / max(1, last - first)
    return 0.6 * min(1.0, (step + 1 - first) / 100) * (0.5 * (1 + math.cos(math.pi * progress)) + 0.02)


def grow(model: nn.Module) -> nn.Module:
    """The same function with two more Llama layers on top, whose output projections start at zero."""
    deeper = build_model()
    state = deeper.state_dict()
    state.update(model.state_dict())
    for name in state.keys() - model.state_dict().keys():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            state[name].zero_()
    deeper.load_state_dict(state)
    deeper.set_attn_implementation("fp32")
    return deeper


def save_atomically(state: dict[str, object], path: Path) -> None:
    """Write a torch file so that a crash leaves the old one whole."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


class Run:
    """A pre-training run's state: model, auxiliary heads, optimiser, step and seconds; lives in ``work``."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.args = args
        self.batches = SceneBatches()
        self.model = build_model(text_layers=FIRST_LAYERS)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 11), nn.Linear(WIDTH, len(COLORS) + 1)])
        self.model.set_attn_implementation("fp32")
        self.step, self.seconds, self.file = 0, 0.0, args.work / "state.pt"
        if self.file.exists():
            self._load(torch.load(self.file, weights_only=True))
        else:
            self._new_optimizer()
        self.clock = time.perf_counter()

    def _new_optimizer(self) -> None:
        self.parameters = [*self.model.parameters(), *self.heads.parameters()]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=self.args.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
        )

    def _load(self, state: dict[str, object]) -> None:
        self.step, self.seconds = state["step"], state["seconds"]
        if self.step > GROWTH:
            self.model = grow(self.model)
        self._new_optimizer()
        self.model.load_state_dict(state["model"])
        self.heads.load_state_dict(state["heads"])
        self.optimizer.load_state_dict(state["optimizer"])

    def train_step(self) -> tuple[float, float]:
        """One optimiser step; returns (answer loss, auxiliary loss)."""
        args, step = self.args, self.step
        if step == GROWTH:
            torch.manual_seed(args.seed + 1)
            self.model = grow(self.model)
            self._new_optimizer()
        rng = np.random.default_rng([args.seed, step])
        samples = [self.batches.sample(rng, "train", draw_kinds(rng, step)) for _ in range(args.batch_size)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            answer, auxiliary = losses(self.model, self.heads, self.batches.collate(samples))
        (answer + (1.0 if step < 4500 else 0.1) * auxiliary).backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = args.learning_rate * learning_rate_scale(step, args.steps)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return answer.item(), auxiliary.item()

    def save(self) -> None:
        """Log dev accuracy, write the state atomically."""
        seconds = round(self.seconds + time.perf_counter() - self.clock)
        record = {"step": self.step, "seconds": seconds}
        record["dev"] = token_accuracy(self.model, self.batches, "dev", 64)
        print(json.dumps(record), flush=True)
        with (self.args.work / "log.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")
        state = {"model": self.model.state_dict(), "heads": self.heads.state_dict()}
        state |= {"optimizer": self.optimizer.state_dict(), "step": self.step, "seconds": seconds}
        save_atomically(state, self.file)


def main() -> None:
    """Train, log dev accuracy per kind, save model and processor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("checkpoints/tiny-llava"))
    parser.add_argument("--work", type=Path, required=True, help="state and log of this run; a second call resumes")
    parser.add_argument("--steps", type=int, default=13000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=500)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    AttentionInterface.register("fp32", attention_fp32)
    AttentionMaskInterface.register("fp32", sdpa_mask)
    run = Run(args)
    print(f"{sum(p.numel() for p in run.model.parameters()):,} parameters, step {run.step}", flush=True)
    while run.step < args.steps:
        answer, auxiliary = run.train_step()
        if run.step % 50 == 0:
            print(f"step {run.step} loss {answer:.3f} aux {auxiliary:.3f}", flush=True)
        if run.step % args.save_every == 0 or run.step == args.steps:
            run.save()
    model, batches = run.model, run.batches
    model.set_attn_implementation("sdpa")
    model.eval().save_pretrained(args.out)
    build_processor().save_pretrained(args.out)
    shuffled = token_accuracy(model, batches, "dev", 256, shuffle_images=True)
    print(json.dumps({"dev": token_accuracy(model, batches, "dev", 256), "dev_shuffled_images": shuffled}), flush=True)


if __name__ == "__main__":
    main()
