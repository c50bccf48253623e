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

from subtoken_train.datasets.scenes import (
    CELL,
    COLORS,
    GRID,
    IMAGE_SIZE,
    KINDS,
    PRETRAINING_KIND,
    SHORT_KINDS,
    Scene,
    ask,
    draw_scene,
)

from tiny_llava import PATCH, VISUAL_TOKENS, WIDTH, build_model, build_processor

IGNORE = -100
SECOND_PHASE = 7000
LATE_KINDS = {"exists_color": 4, "count": 4, "choice": 3}
Sample = tuple[Scene, list[int], list[int], list[str | None]]


def attention_fp32(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: object
) -> tuple[Tensor, None]:
    """SDPA in fp32 under any autocast."""
    with torch.autocast("cpu", enabled=False):
        return sdpa_attention_forward(module, query.float(), key.float(), value.float(), mask, **kwargs)


class SceneBatches:
    """Turns scenes and questions into token batches exactly as the processor's chat template does."""

    def __init__(self) -> None:
        tokenizer = build_processor().tokenizer
        self.ids = tokenizer.get_vocab()
        self.vocab_size = len(tokenizer)

    def sample(self, rng: np.random.Generator, split: str, kinds: list[str]) -> Sample:
        """One record: a scene and a turn per kind; ids, labels and each token's kind (None outside answers)."""
        scene = draw_scene(rng, split)
        ids = [self.ids["<s>"], self.ids["USER:"]] + [self.ids["<image>"]] * VISUAL_TOKENS
        labels, token_kinds = [IGNORE] * len(ids), [None] * len(ids)
        for turn, kind in enumerate(kinds):
            question, answer = ask(rng, scene.objects, kind)
            prompt = ["USER:"] * (turn > 0) + question.split() + ["ASSISTANT:"]
            target = [self.ids[word] for word in answer.split()] + [self.ids["</s>"]]
            ids += [self.ids[word] for word in prompt] + target
            labels += [IGNORE] * len(prompt) + target
            token_kinds += [None] * len(prompt) + [kind] * (len(target) - 1) + [None]
        return scene, ids, labels, token_kinds

    def collate(self, samples: list[Sample]) -> dict[str, Tensor]:
        """Right-padded ids and labels, normalised pixels, and per patch the digit and colour of its cell."""
        length = max(len(ids) for _, ids, _, _ in samples)
        ids = torch.zeros(len(samples), length, dtype=torch.long)
        labels = torch.full_like(ids, IGNORE)
        cells = np.full((len(samples), 2, GRID * GRID), 0)
        cells[:, 0], cells[:, 1] = 10, len(COLORS)
        for row, (scene, sample_ids, sample_labels, _) in enumerate(samples):
            ids[row, : len(sample_ids)] = torch.tensor(sample_ids)
            labels[row, : len(sample_ids)] = torch.tensor(sample_labels)
            for item in scene.objects:
                cells[row, :, item.cell] = item.digit, item.color
        pixels = torch.from_numpy(np.stack([scene.pixels for scene, *_ in samples])).permute(0, 3, 1, 2)
        side = torch.arange(IMAGE_SIZE // PATCH) * PATCH // CELL
        patch_cell = (side[:, None] * GRID + side[None]).flatten()
        return {
            "input_ids": ids,
            "labels": labels,
            "pixel_values": pixels / 127.5 - 1,
            "patch_targets": torch.from_numpy(cells)[:, :, patch_cell],
        }


def draw_kinds(rng: np.random.Generator, step: int) -> list[str]:
    """The turns of one training record.

    First a quarter raster descriptions, a quarter lists by digit, half records of six short questions. The second
    phase has fewer of those, lists by colour (what teaches to address by colour: without them counting and
    colour-and-digit questions stay at chance), and records of eight short questions that lean on what arrives last.
    """
    draw, second = rng.random(), step >= SECOND_PHASE
    share = 0.06 if second else 0.25
    if draw < share:
        return ["describe"]
    if draw < 2 * share:
        return ["list"]
    if not second:
        return [str(kind) for kind in rng.choice(SHORT_KINDS, 6)]
    if draw < 0.45:
        return [PRETRAINING_KIND]
    weights = np.array([LATE_KINDS.get(kind, 1) for kind in SHORT_KINDS], float)
    return [str(kind) for kind in rng.choice(SHORT_KINDS, 8, p=weights / weights.sum())]


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
    """Share of the peak rate: warm-up and a cosine towards step 9,000; from SECOND_PHASE on, 0.6 and a new cosine."""
    if step < SECOND_PHASE:
        return min(1.0, (step + 1) / warmup) * (0.5 * (1 + math.cos(math.pi * step / 9000)) + 0.02)
    progress = (step - SECOND_PHASE) / max(1, steps - SECOND_PHASE)
    return 0.6 * min(1.0, (step + 1 - SECOND_PHASE) / 100) * (0.5 * (1 + math.cos(math.pi * progress)) + 0.02)


def save_atomically(state: dict[str, object], path: Path) -> None:
    """Write a torch file so that a crash leaves the old one whole."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def main() -> None:
    """Train, log dev accuracy per kind, save model and processor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("checkpoints/tiny-llava"))
    parser.add_argument("--work", type=Path, required=True, help="state and log of this run; a second call resumes")
    parser.add_argument("--steps", type=int, default=11500)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=500)
    parser.add_argument("--stop-at", type=int, help="leave early after this step (to test resuming)")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    AttentionInterface.register("fp32", attention_fp32)
    AttentionMaskInterface.register("fp32", sdpa_mask)
    model, batches = build_model(), SceneBatches()
    model.set_attn_implementation("fp32")
    heads = nn.ModuleList([nn.Linear(WIDTH, 11), nn.Linear(WIDTH, len(COLORS) + 1)])
    parameters = [*model.parameters(), *heads.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    state_file, start, seconds = args.work / "state.pt", 0, 0.0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        heads.load_state_dict(state["heads"])
        optimizer.load_state_dict(state["optimizer"])
        start, seconds = state["step"], state["seconds"]
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, step {start} of {args.steps}", flush=True)
    clock = time.perf_counter()
    for step in range(start, args.steps):
        rng = np.random.default_rng([args.seed, step])
        batch = batches.collate([batches.sample(rng, "train", draw_kinds(rng, step)) for _ in range(args.batch_size)])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            answer, auxiliary = losses(model, heads, batch)
        (answer + (1.0 if step < 4500 else 0.1) * auxiliary).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * learning_rate_scale(step, args.steps)
        optimizer.step()
        optimizer.zero_grad()
        done = step + 1
        if done % 50 == 0:
            print(f"step {done} loss {answer.item():.3f} aux {auxiliary.item():.3f}", flush=True)
        if done % args.save_every == 0 or done in (args.steps, args.stop_at):
            record = {"step": done, "seconds": round(seconds + time.perf_counter() - clock)}
            record["dev"] = token_accuracy(model, batches, "dev", 64)
            print(json.dumps(record), flush=True)
            with (args.work / "log.jsonl").open("a") as log:
                log.write(json.dumps(record) + "\n")
            state = {"model": model.state_dict(), "heads": heads.state_dict(), "optimizer": optimizer.state_dict()}
            save_atomically({**state, "step": done, "seconds": record["seconds"]}, state_file)
        if done == args.stop_at:
            return
    model.set_attn_implementation("sdpa")
    model.eval().save_pretrained(args.out)
    build_processor().save_pretrained(args.out)
    shuffled = token_accuracy(model, batches, "dev", 256, shuffle_images=True)
    print(json.dumps({"dev": token_accuracy(model, batches, "dev", 256), "dev_shuffled_images": shuffled}), flush=True)


if __name__ == "__main__":
    main()
