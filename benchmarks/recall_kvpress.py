"""The half of ``recall_peers.py`` that runs kvpress's presses, in an environment of its own.

    python benchmarks/recall_kvpress.py FOLDER    # reads contexts.json there; writes peers.json and kvcompose.pt

It imports kvpress 0.5.4 and transformers 5.2, and nothing of this package. As in kvpress's own pipeline,
the press acts on the context alone, then the question is read at the positions after the whole context, and the answer
is greedy.

Under KVCompose the question is read a token at a time: read whole, as by that pipeline, it gets a mask of the first
layer's length, and transformers 5.2 stops (sizes that do not match) where layers keep unlike numbers of entries.
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
PRESSES = {
    "KVCompose": "KVComposePress",
    "SnapKV": "SnapKVPress",
    "KeyDiff": "KeyDiffPress",
    "ExpectedAttention": "ExpectedAttentionPress",
    "KVzip": "KVzipPress",
    "Compactor": "CompactorPress",
}


class Noting(kvpress.KVComposePress):
    """The release, noting what it decided: scores and kept sets, [layers, h, N]."""

    def compress_cache(self, model: Any) -> None:
        """See the release."""
        masks = torch.stack([torch.stack(each) for each in self.important_mask_per_kv_head])
        self.noted = self.scores.clone(), masks
        super().compress_cache(model)


@torch.no_grad()
def run(folder: Path) -> None:
    """Run every press; write token ids of the answers, and KVCompose's scores and kept sets."""
    drawn = json.loads((folder / "contexts.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    presses: dict[str, Callable[..., Any]] = {name: getattr(kvpress, press) for name, press in PRESSES.items()}
    answers: dict[str, dict[str, list[list[int]]]] = {}
    noted: dict[str, list[Any]] = {}
    for name, press_class in {"none": None, **presses, "KVCompose": Noting}.items():
        answers[name] = {}
        for kept in (1.0,) if press_class is None else KEPT:
            rows = answers[name][str(kept)] = []
            for sample in drawn["samples"]:
                context, cache = torch.tensor([sample["context"]]), DynamicCache()
                if press_class is None:
                    model.model(input_ids=context, past_key_values=cache)
                else:
                    press = press_class(compression_ratio=1 - kept)
                    with press(model):
                        model.model(input_ids=context, past_key_values=cache)
                    if name == "KVCompose":
                        noted.setdefault(str(kept), []).append(press.noted)
                rows.append(_answer(model, cache, sample, drawn["max_new_tokens"]))
            print(name, kept, flush=True)
    versions = {each: version(each) for each in ("kvpress", "transformers", "torch")}
    (folder / "peers.json").write_text(json.dumps({"answers": answers, "versions": versions}))
    torch.save(noted, folder / "kvcompose.pt")


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
    run(Path(sys.argv[1]))
