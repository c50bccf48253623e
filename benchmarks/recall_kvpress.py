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
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, DynamicCache

MODEL = Path(__file__).resolve().parents[1] / "checkpoints/tiny-llama"
KEPT = (0.5, 0.25, 0.125)


class ShortKVzip(kvpress.KVzipPress):
    """The release, repeating 256 tokens at a time: 2,048, its default, run past this model's positions."""

    def prepare(self, model: Any, tokenizer: Any) -> Any:
        """See the release."""
        return super().prepare(model, tokenizer, chunk_size=256)


PRESSES: dict[str, Callable[..., Any]] = {
    "KVCompose": kvpress.KVComposePress,
    "SnapKV": kvpress.SnapKVPress,
    "TOVA": kvpress.TOVAPress,
    "Knorm": kvpress.KnormPress,
    "LagKV": kvpress.LagKVPress,
    "KeyDiff": kvpress.KeyDiffPress,
    "ExpectedAttention": kvpress.ExpectedAttentionPress,
    "KVzip": kvpress.KVzipPress,
    "KVzip, chunks of 256": ShortKVzip,
    "Compactor": kvpress.CompactorPress,
    "AdaKV(ExpectedAttention)": lambda compression_ratio: kvpress.AdaKVPress(
        kvpress.ExpectedAttentionPress(compression_ratio, epsilon=1e-2)
    ),
    "AdaKV(SnapKV)": lambda compression_ratio: kvpress.AdaKVPress(kvpress.SnapKVPress(compression_ratio)),
}
"""Called with the ratio; a wrapper is a line here. Epsilon under AdaKV is that of kvpress's own evaluation."""
DRAWS = {"Compactor": 5}
"""Presses that draw random numbers, and how often each context is compressed anew."""


@dataclass
class Compressed:
    """What is left of a context: keys and values of every layer, and what a press masks of them instead."""

    states: list[tuple[torch.Tensor, torch.Tensor]]
    masked: list[Any]


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
            answers[str(kept)] = []
            for draw in range(DRAWS.get(name, 1)):
                torch.manual_seed(draw)
                caches = []
                for sample in drawn["samples"]:
                    press = None if build is None else build(compression_ratio=1 - kept)
                    cache, decided = compress(model, press, sample["context"])
                    caches.append(cache)
                    if press is not None and not draw:
                        sets.setdefault(str(kept), []).append(decided)
                answers[str(kept)].append(answer(model, caches, drawn["samples"], drawn["max_new_tokens"]))
            print(name, kept, flush=True)
        torch.save({"answers": answers, "sets": sets, "versions": versions}, folder / f"{name}.pt")


def compress(model: Any, press: Any, ids: list[int]) -> tuple[Compressed, Any]:
    """One context by itself, as in kvpress's pipeline: its cache, and what the press decided."""
    context, cache = torch.tensor([ids]), DynamicCache()
    noted = watch(press)
    with nullcontext() if press is None else press(model):
        model.model(input_ids=context, past_key_values=cache)
    decided = None if press is None else kept_sets(model, press, noted, len(ids))
    masked = [getattr(layer.self_attn, "masked_key_indices", None) for layer in model.model.layers]
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    return Compressed([(layer.keys, layer.values) for layer in cache.layers], masked), decided


def answer(model: Any, caches: list[Compressed], samples: list[dict[str, Any]], most: int) -> list[list[int]]:
    """Greedy ids after the question of every context; contexts whose layers hold as many entries share a batch."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, cache in enumerate(caches):
        alike.setdefault((len(samples[i]["question"]), *(key.shape[2] for key, _ in cache.states)), []).append(i)
    found: list[list[int]] = [[] for _ in caches]
    for (_, *lengths), members in alike.items():
        together = DynamicCache()
        for number, layer in enumerate(model.model.layers):
            keys, values = zip(*(caches[i].states[number] for i in members), strict=True)
            together.update(torch.cat(keys), torch.cat(values), number)
            masked = [caches[i].masked[number] for i in members]
            layer.self_attn.masked_key_indices = None
            if masked[0] is not None:
                rows = torch.cat([each[0] + row for row, each in enumerate(masked)])
                layer.self_attn.masked_key_indices = rows, *(torch.cat([each[x] for each in masked]) for x in (1, 2))
        place, ending = len(samples[members[0]]["context"]), model.generation_config.eos_token_id
        question = torch.tensor([samples[i]["question"] for i in members])
        for part in question.split(1 if len(set(lengths)) > 1 else question.shape[1], dim=1):
            following = _next(model, together, part, place)
            place += part.shape[1]
        said = []
        for _ in range(most):
            said.append(following)
            following = _next(model, together, following, place)
            place += 1
        for i, ids in zip(members, torch.cat(said, 1).tolist(), strict=True):
            found[i] = ids[: ids.index(ending)] if ending in ids else ids
    return found


def _next(model: Any, cache: Any, tokens: torch.Tensor, place: int) -> torch.Tensor:
    positions = torch.arange(place, place + tokens.shape[1]).expand(tokens.shape)
    logits = model(input_ids=tokens, position_ids=positions, past_key_values=cache).logits
    following: torch.Tensor = logits[:, -1:].argmax(-1)
    return following


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2:])
