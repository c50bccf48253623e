r"""Pre-train checkpoints/tiny-llava from scratch on digit scenes (see README.md here for measured figures).

    MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=17179869184 \
        python checkpoints/pretrain_tiny_llava.py --out checkpoints/tiny-llava --work /tmp/tiny-llava

Every parameter is trained (fp32 weights, bf16 autocast, fp32 attention: CPU kernels of bf16 attention are slow), with a
fresh batch of scenes in each step. A step's batch depends on the seed and the step alone, and the state in --work is
written every --save-every steps, so a second call goes on where the first stopped and ends at the same weights. The
two variables keep glibc from giving big buffers back to the system after each operation (1.6 times faster steps).
"""

from __future__ import annotations

import json

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from checkpoints.pretraining import PretrainingRun, parse_arguments, warmed_cosine
from checkpoints.scene_batches import SECOND_PHASE, SceneBatches, draw_kinds
from checkpoints.tiny_llava import WIDTH, build_model, build_processor
from subtoken_train.datasets.scenes import COLORS, KINDS

GROWTH, FIRST_LAYERS = 8500, 4


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


def learning_rate_scale(step: int, steps: int) -> float:
    """Share of the peak rate: a warm-up and a cosine per phase; the first two cosines are left before their end."""
    if step < SECOND_PHASE:
        return warmed_cosine(step, 0, 9000, warmup=300)
    first, last = (SECOND_PHASE, 11500) if step < GROWTH else (GROWTH, steps)
    return 0.6 * warmed_cosine(step, first, last, warmup=100)


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


class Run(PretrainingRun):
    """The model, and auxiliary heads that read digit and colour off the projector's output."""

    def build(self) -> dict[str, nn.Module]:
        """Model and heads; the model is the deeper one after step GROWTH."""
        self.batches = SceneBatches()
        self.model = build_model(text_layers=FIRST_LAYERS)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 11), nn.Linear(WIDTH, len(COLORS) + 1)])
        self.model.set_attn_implementation("fp32")
        if self.step > GROWTH:
            self.model = grow(self.model)
        return {"model": self.model, "heads": self.heads}

    def train_step(self) -> dict[str, float]:
        """One optimiser step; grows the model at step GROWTH."""
        args, step = self.args, self.step
        if step == GROWTH:
            torch.manual_seed(args.seed + 1)
            self.model = self.modules["model"] = grow(self.model)
            self.new_optimizer()
        rng = np.random.default_rng([args.seed, step])
        samples = [self.batches.sample(rng, "train", draw_kinds(rng, step)) for _ in range(args.batch_size)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            answer, auxiliary = losses(self.model, self.heads, self.batches.collate(samples))
        weight = 1.0 if step < 4500 else 0.1
        self.update(answer + weight * auxiliary, learning_rate_scale(step, args.steps))
        return {"loss": answer.item(), "aux": auxiliary.item()}

    def evaluate(self) -> dict[str, object]:
        """Dev accuracy by kind."""
        return dict(token_accuracy(self.model, self.batches, "dev", 64))


def main() -> None:
    """Train, log dev accuracy per kind, save model and processor."""
    args = parse_arguments(__doc__, out="checkpoints/tiny-llava", steps=13000, batch_size=32, learning_rate=1.5e-3)
    run = Run(args)
    run.train()
    model, batches = run.model, run.batches
    model.set_attn_implementation("sdpa")
    model.eval().save_pretrained(args.out)
    build_processor().save_pretrained(args.out)
    shuffled = token_accuracy(model, batches, "dev", 256, shuffle_images=True)
    print(json.dumps({"dev": token_accuracy(model, batches, "dev", 256), "dev_shuffled_images": shuffled}), flush=True)


if __name__ == "__main__":
    main()
