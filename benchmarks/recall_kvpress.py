"""The half of ``recall_peers.py`` that runs kvpress's presses, in an environment of its own.

    python benchmarks/recall_kvpress.py FOLDER [NAME ...]   # reads contexts.json there; a file NAME.pt per press

It imports kvpress 0.5.4 and transformers 5.2, and nothing of this package. As in kvpress's own pipeline,
the press acts on the context alone, then the question is read at the positions after the whole context, and the answer
is greedy. A press that keeps ``int(T * (1 - ratio))`` entries per head is given a ratio for which that is exact.

Where layers keep unlike numbers of entries (KVCompose) the question is read a token at a time: read whole, as by that
pipeline, it gets a mask of the first layer's length, and transformers 5.2 stops (sizes that do not match).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, DynamicCache

MODEL = Path(__file__).resolve().parents[1] / "checkpoints/tiny-llama"
KEPT = (0.5, 0.25, 0.125)
PRESSES: dict[str, Callable[..., Any]] = {
    "KVCompose": kvpress.KVComposePress,
    "SnapKV": kvpress.SnapKVPress,
    "TOVA": kvpress.TOVAPress,
    "Knorm": kvpress.KnormPress,
    "LagKV": kvpress.LagKVPress,
    "KeyDiff": kvpress.KeyDiffPress,
    "ExpectedAttention": kvpress.ExpectedAttentionPress,
    "KVzip": kvpress.KVzipPress,
    "Compactor": kvpress.CompactorPress,
}
"""Called with the ratio; a wrapper is a line here, for instance ``lambda ratio: AdaKVPress(SnapKVPress(ratio))``."""
DRAWS = {"Compactor": 5}
"""Presses that draw random numbers, and how often each context is compressed anew."""


def watch(press: Any) -> list[torch.Tensor]:
    """The list that a scorer's scores of every layer will stand in, [1, h, N] each."""
    noted: list[torch.Tensor] = []
    if isinstance(press, kvpress.ScorerPress):
        score = press.score

        def noting(*args: Any, **kwargs: Any) -> torch.Tensor:
            noted.append(score(*args, **kwargs))
            return noted[-1]

        press.score = noting
    return noted


def kept_sets(model: Any, press: Any, noted: list[torch.Tensor], length: int) -> tuple[torch.Tensor | None, Any]:
    """What the press decided: scores [L, h, N], or None where it shows none, and what stays, bool [L, h, N]."""
    if isinstance(press, kvpress.KVComposePress):
        return press.noted
    if noted:
        scores = torch.cat(noted)
        best = scores.topk(int(length * (1 - press.compression_ratio)), dim=-1).indices
        return scores, torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    kept = torch.ones(model.config.num_hidden_layers, model.config.num_key_value_heads, length, dtype=torch.bool)
    for layer, stays in zip(model.model.layers, kept, strict=True):
        _, heads, places = layer.self_attn.masked_key_indices
        stays[heads, places] = False
    return None, kept


class Noting(kvpress.KVComposePress):
    """The release, noting what it decided before it shortens the cache."""

    def compress_cache(self, model: Any) -> None:
        """See the release."""
        masks = torch.stack([torch.stack(each) for each in self.important_mask_per_kv_head])
        self.noted = self.scores.clone(), masks
        super().compress_cache(model)


@torch.no_grad()
def run(folder: Path, names: list[str]) -> None:
    """Run presses; write token ids of the answers, draw by draw, and what each decided in every context."""
    drawn = json.loads((folder / "contexts.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    versions = {each: version(each) for each in ("kvpress", "transformers", "torch")}
    for name in names or ["none", *PRESSES]:
        answers: dict[str, list[Any]] = {}
        sets: dict[str, list[Any]] = {}
        build = Noting if name == "KVCompose" else PRESSES.get(name)
        for kept in (1.0,) if build is None else KEPT:
            answers[str(kept)] = [[] for _ in range(DRAWS.get(name, 1))]
            for draw, rows in enumerate(answers[str(kept)]):
                torch.manual_seed(draw)
                for sample in drawn["samples"]:
                    context, cache = torch.tensor([sample["context"]]), DynamicCache()
                    if build is None:
                        model.model(input_ids=context, past_key_values=cache)
                    else:
                        press = build(compression_ratio=1 - kept)
                        noted = watch(press)
                        with press(model):
                            model.model(input_ids=context, past_key_values=cache)
                        if not draw:
                            sets.setdefault(str(kept), []).append(kept_sets(model, press, noted, context.shape[1]))
                    rows.append(_answer(model, cache, sample, drawn["max_new_tokens"]))
                    for layer in model.model.layers:  # what presses that only mask leave behind
                        layer.self_attn.masked_key_indices = None
            print(name, kept, flush=True)
        torch.save({"answers": answers, "sets": sets, "versions": versions}, folder / f"{name}.pt")


def _answer(model: Any, cache: Any, sample: dict[str, Any], most: int) -> list[int]:
    """Greedy ids after the question."""
    said: list[int] = []
    place, ending, question = len(sample["context"]), model.generation_config.eos_token_id, sample["question"]
    unlike = len({layer.keys.shape[2] for layer in cache.layers}) > 1
    for part in [[token] for token in question] if unlike else [question]:
        following = _next(model, cache, part, place)
        place += len(part)
    while len(said) < most and ending not in said:
        said.append(following)
        following = _next(model, cache, said[-1:], place)
        place += 1
    return said


def _next(model: Any, cache: Any, tokens: list[int], place: int) -> int:
    positions = torch.arange(place, place + len(tokens))[None]
    logits = model(input_ids=torch.tensor([tokens]), position_ids=positions, past_key_values=cache).logits
    return int(logits[0, -1].argmax())


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
