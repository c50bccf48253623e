"""The half of ``real_peers.py`` that runs kvpress's presses, in an environment of its own.

    python -m benchmarks.real_kvpress FOLDER    # reads contexts.json there; a file for each context

It imports kvpress 0.5.4 and transformers 5.2, and nothing of this package. A press acts on a layer once the layer has
run, and changes nothing that later layers read, so all presses are given the layers of one pass, by their own
``compress``. KVzip and KVCompose run their second passes, each after a pass of its own.

Both sides keep the same number of entries: a press is given a ratio for which its rounding leaves exactly that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

NUDGE = 1e-9
"""Added to a share of entries, so that a product with their number is not rounded down past a whole number."""


def expected(ratio: float, **options: Any) -> Any:
    """Return ExpectedAttention."""
    return kvpress.ExpectedAttentionPress(ratio, **options)


def finch(ratio: float, asked: int) -> Any:
    """Return Finch, told how many of the last tokens ask; positions stay as they are."""
    press = kvpress.FinchPress(ratio, rerotate_keys=False)
    press.window_size = asked
    return press


PRESSES: dict[str, Callable[[float], Any]] = {
    "Knorm": kvpress.KnormPress,
    "KeyDiff": kvpress.KeyDiffPress,
    "StreamingLLM": kvpress.StreamingLLMPress,
    "SnapKV": kvpress.SnapKVPress,
    "TOVA": kvpress.TOVAPress,
    "LagKV": kvpress.LagKVPress,
    "ExpectedAttention": expected,
    "Compactor": kvpress.CompactorPress,
    "PyramidKV": kvpress.PyramidKVPress,
    "CUR": kvpress.CURPress,
    "SimLayerKV": lambda ratio: kvpress.SimLayerKVPress(lazy_threshold=ratio, n_recent=64),  # no share: all it knows
    "ChunkKV(SnapKV)": lambda ratio: kvpress.ChunkKVPress(kvpress.SnapKVPress(ratio)),
    "CriticalKV(SnapKV)": lambda ratio: kvpress.CriticalKVPress(kvpress.SnapKVPress(ratio)),
    "CriticalKV(ExpectedAttention)": lambda ratio: kvpress.CriticalKVPress(expected(ratio, use_vnorm=False)),
    "AdaKV(SnapKV)": lambda ratio: kvpress.AdaKVPress(kvpress.SnapKVPress(ratio)),
    "AdaKV(ExpectedAttention)": lambda ratio: kvpress.AdaKVPress(expected(ratio, epsilon=1e-2)),
    "CriticalAdaKV(ExpectedAttention)": lambda ratio: kvpress.CriticalAdaKVPress(expected(ratio, use_vnorm=False)),
}
EAGER: dict[str, Callable[[float], Any]] = {"ObservedAttention": kvpress.ObservedAttentionPress}
"""Presses that need the attention matrix."""


class Spy(kvpress.BasePress):
    """Presses that look at the same layers and leave the cache as it is.

    Args:
        presses: by name.
        counts: entries that each keeps in a head.
    """

    def __init__(self, presses: dict[str, Callable[[float], Any]], counts: list[int]) -> None:
        self.presses, self.counts = presses, counts
        self.kept: dict[str, list[list[Tensor]]] = {name: [[] for _ in counts] for name in presses}
        self.scores: dict[str, list[list[Tensor]]] = {name: [[] for _ in counts] for name in presses}

    def compress(self, module: Any, hidden: Tensor, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any) -> Any:
        """Run every press with every count, and return keys and values as they came."""
        length = keys.shape[2]
        for name, build in self.presses.items():
            for place, count in enumerate(self.counts):
                press = build(1 - count / length - NUDGE)
                seen: list[Tensor] = []
                if isinstance(press, kvpress.ScorerPress | kvpress.FinchPress):
                    score = press.score
                    press.score = lambda *args, score=score, seen=seen: seen.append(score(*args)) or seen[-1]
                torch.manual_seed(module.layer_idx)  # Compactor then draws the sketch that ours draws from seed 0
                module.masked_key_indices = None
                left, _ = press.compress(module, hidden, keys.clone(), values.clone(), attentions, kwargs)
                self.kept[name][place].append(marks(keys[0], left[0], module.masked_key_indices))
                self.scores[name][place] += [each[0].float() for each in seen]
        module.masked_key_indices = None
        return keys, values

    def found(self) -> dict[str, Any]:
        """Return by press and count the kept marks [L, h, N], and the scores or None."""
        return {
            name: [
                {"kept": torch.stack(kept), "scores": torch.stack(scores) if scores else None}
                for kept, scores in zip(self.kept[name], self.scores[name], strict=True)
            ]
            for name in self.presses
        }


def marks(keys_hNd: Tensor, left_hKd: Tensor, masked: Any) -> Tensor:
    """Mark the entries that a press left, [h, N]: those that it does not mask, or whose keys it returned."""
    if masked is not None:
        kept = torch.ones(keys_hNd.shape[:2], dtype=torch.bool)
        kept[masked[1], masked[2]] = False
        return kept
    whole, some = (each[..., ::8] for each in (keys_hNd, left_hKd))  # enough channels to tell two keys apart
    kept = (whole[:, :, None] == some[:, None]).all(-1).any(-1)
    assert kept.sum() == left_hKd.shape[0] * left_hKd.shape[1]
    return kept


@contextmanager
def attending(model: Any, how: str) -> Iterator[None]:
    """Run a block under another attention."""
    before = model.config._attn_implementation
    model.config._attn_implementation = how
    try:
        yield
    finally:
        model.config._attn_implementation = before


def zipped(model: Any, tokenizer: Path, ids: list[int], ratio: float, length: int) -> dict[str, Any]:
    """Return what KVzip decides: scores and kept marks, [L, h, N].

    Args:
        model: the model.
        tokenizer: folder whose chat template, if it has one, the press takes.
        ids: what runs.
        ratio: what goes.
        length: of the ids, those at the end that are returned.
    """
    noted: list[Tensor] = []

    class Noting(kvpress.KVzipPress):
        def compress_post(self, model: Any) -> None:
            noted.append(self.score_val[:, 0].clone())
            super().compress_post(model)

    model.config._name_or_path = str(tokenizer)
    with Noting(ratio)(model):
        model.model(input_ids=torch.tensor([ids]), past_key_values=DynamicCache())
    kept = torch.ones_like(noted[0], dtype=torch.bool)
    for layer, own in zip(model.model.layers, kept, strict=True):
        own[layer.self_attn.masked_key_indices[1], layer.self_attn.masked_key_indices[2]] = False
        layer.self_attn.masked_key_indices = None
    return {"kept": kept[..., -length:].clone(), "scores": noted[0][..., -length:].float().clone()}


def composed(model: Any, ids: list[int], ratio: float) -> dict[str, Any]:
    """Return what KVCompose decides."""
    noted: list[Any] = []

    class Noting(kvpress.KVComposePress):
        def compress_cache(self, model: Any) -> None:
            masks = torch.stack([torch.stack(each) for each in self.important_mask_per_kv_head])
            noted.append({"kept": masks, "scores": self.scores.clone()})
            super().compress_cache(model)

    with Noting(compression_ratio=ratio)(model):
        model.model(input_ids=torch.tensor([ids]), past_key_values=DynamicCache())
    return noted[0]


@torch.no_grad()
def run(folder: Path) -> None:
    """Write what each press decides of each context."""
    given = json.loads((folder / "contexts.json").read_text())
    torch.set_num_threads(1)
    path = Path(given["model"])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.config.head_dim = model.model.layers[0].self_attn.head_dim  # CriticalKV asks for it, Qwen2's has none
    plain = folder / "plain_tokenizer"
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(plain)
    versions = {each: version(each) for each in ("kvpress", "transformers", "torch")}
    for number, ids in enumerate(given["contexts"]):
        target, found = folder / f"theirs-{number}.pt", {}
        if target.exists():
            continue
        counts, context, wanted = given["counts"][number], torch.tensor([ids]), given["presses"]
        seeing = PRESSES | {"Finch": partial(finch, asked=given["asked"])}
        for presses, how in ((seeing, "sdpa"), (EAGER, "eager")):
            spy = Spy({name: build for name, build in presses.items() if name in wanted}, counts)
            with attending(model, how), spy(model):
                model.model(input_ids=context, past_key_values=DynamicCache())
            found.update(spy.found())
        removed = [1 - count / len(ids) for count in counts]
        if "KVCompose" in wanted:
            found["KVCompose"] = [composed(model, ids, ratio - NUDGE) for ratio in removed]
        if "KVzip, no template" in wanted:
            found["KVzip, no template"] = [zipped(model, plain, ids, ratio + NUDGE, len(ids)) for ratio in removed]
        if "KVzip" in wanted:
            framed, sinks = [*given["opening"], *ids], 4  # of the opening the press keeps its sinks alone
            found["KVzip"] = [
                zipped(model, path, framed, 1 - (count + sinks) / len(framed) + NUDGE, len(ids)) for count in counts
            ]
        torch.save({"found": found, "versions": versions}, target)
        print(f"context {number + 1} of {len(given['contexts'])}", flush=True)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
