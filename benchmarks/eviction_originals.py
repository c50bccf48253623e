"""Outputs of CAKE's, LOOK-M's, MEDA's, HeadKV's, SparseMM's and RotateK's own code on small inputs, for their tests.

    git clone https://github.com/antgroup/cakekv; git clone https://github.com/SUSTechBruce/LOOK-M; ...
    python -m benchmarks.eviction_originals cakekv LOOK-M MEDA HeadKV SparseMM rotatek    # torch and safetensors alone

The functions and classes are taken out of the checkouts' files as they stand and run here: nothing of theirs is in this
project. One file is written, ``benchmarks/results/eviction_originals.safetensors``: inputs, scores, what stayed, and in
its header the commits.

Legend: L layers, H query heads, h key-value heads, N rows of the prompt, d head width.
"""

from __future__ import annotations

import argparse
import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from benchmarks.pruner_originals import taken, write

OUT = Path(__file__).resolve().parent / "results" / "eviction_originals.safetensors"
MODIFIED = "LLaVA-mix_merge_v1/llava/model/kv_token_merge/modify_llama.py"
LAYERS, HEADS, KV_HEADS, ROWS, WIDTH = 4, 4, 2, 60, 8
SIZE, WINDOW = 16, 6  # entries that a layer keeps on average, the window among them


def prompt() -> tuple[Tensor, Tensor]:
    """Queries [L, H, N, d] and keys [L, h, N, d] whose layers look more and more sharply."""
    sharp_L = torch.linspace(0.9, 1.6, LAYERS)[:, None, None, None]
    return sharp_L * torch.randn(LAYERS, HEADS, ROWS, WIDTH), torch.randn(LAYERS, KV_HEADS, ROWS, WIDTH)


def cake(checkout: Path) -> dict[str, Tensor]:
    """One prompt through its attention's forward, layer after layer: what stays after the last, with its cascade too.

    Values hold every entry's number, so that what is left in the cache says which they are.
    """
    utils = vars(taken(checkout, "cake/utils.py", ("calculate_entropy", "adjust_budgets"), np=numpy))
    caches = taken(checkout, "cake/cake_cache.py", ("CakeCache", "CakeprefillKVCache"), **utils, Cache=object)
    told = {"StaticCache": bytes, "DynamicCache": bytes, "logger": SimpleNamespace(warning_once=lambda text: None)}
    told |= {"apply_rotary_pos_emb": lambda query, key, cos, sin: (query, key)}
    told |= {"repeat_kv": lambda states, times: states.repeat_interleave(times, 1)}
    told |= {"_flash_attention_forward": lambda query, *rest, **more: query}
    code = taken(checkout, "cake/model/modify_llama.py", ("llama_attn_forward_cake",), **utils, **told)
    query, key = prompt()
    found = {"query": query, "key": key}
    for word, cascading in (("once", False), ("cascade", True)):
        evict = caches.CakeprefillKVCache(SIZE, WINDOW, num_heads=HEADS, num_layers=LAYERS, use_cascading=cascading)
        config = SimpleNamespace(gamma=200.0, tau1=1.6, tau2=0.4, prefill=[True] * LAYERS)
        config.window_size, config.key_size = [WINDOW] * LAYERS, [SIZE - WINDOW] * LAYERS
        config.decoding_evict, config.prefill_cake_evict = [None] * LAYERS, [evict] * LAYERS
        cache, scores = caches.CakeCache(), []
        for layer in range(LAYERS):
            module = attention(query[layer], key[layer], layer, config)
            positions = torch.zeros(0), torch.zeros(0)
            code.llama_attn_forward_cake(
                module, torch.zeros(1, ROWS, 1), past_key_value=cache, position_embeddings=positions
            )
            scores.append(cache.evict_scores[layer][0])
        found[f"{word}.kept"] = torch.stack([marked(values[0, :, :, 0]) for values in cache.value_cache])
        if not cascading:  # it cuts the scores of all layers once the last one is there
            found["scores"] = torch.stack(scores[:-1])
            found["preference"] = torch.tensor([float(each) for each in cache.pref_scores])
    return found


def attention(query_HNd: Tensor, key_hNd: Tensor, layer: int, config: SimpleNamespace) -> SimpleNamespace:
    """An attention module as CAKE's forward reads it, whose projections give what they are told."""
    number_hNd = torch.arange(ROWS).float()[None, :, None].expand(KV_HEADS, -1, WIDTH)
    own: dict[str, Any] = {"num_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": WIDTH, "config": config}
    own |= {"num_key_value_groups": HEADS // KV_HEADS, "layer_idx": layer, "training": False}
    own |= {"is_causal": True, "attention_dropout": 0.0, "_flash_attn_uses_top_left_mask": False}
    for name, states in (("q_proj", query_HNd), ("k_proj", key_hNd), ("v_proj", number_hNd)):
        own[name] = Given(states)
    return SimpleNamespace(**own, o_proj=nn.Identity())


class Given(nn.Module):
    """A projection that gives the heads' states that it was made with, [1, N, heads * d], whatever it is asked."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.weight = states.transpose(0, 1).flatten(1)[None]

    def forward(self, hidden_BND: Tensor) -> Tensor:
        """What it was made with."""
        return self.weight


def marked(number_hK: Tensor) -> Tensor:
    """The entries that are left, bool [h, N]."""
    return torch.zeros(len(number_hK), ROWS, dtype=torch.bool).scatter(1, number_hK.long(), True)


def lookm(checkout: Path) -> dict[str, Tensor]:
    """Text, an image of 576 tokens, text: what its pivotal merging leaves of the column sums that it is given.

    Sums are whole eighths, which its offset of 65,516 leaves as they are in fp32; keys are small whole numbers in the
    first channels of the 128 that it takes for granted, and values are the keys with their channels turned round.
    """
    code = taken(checkout, MODIFIED, ("TextPivotMerge_LayerWise",), print=lambda *words: None)
    before, after, channels = 10, 14, 12
    rows = before + 576 + after
    sums_hN = torch.stack([torch.randperm(rows) for _ in range(KV_HEADS)]) / 8
    key_hNd = torch.randint(-9, 10, (KV_HEADS, rows, channels))
    method = code.TextPivotMerge_LayerWise(hh_ratio=0.1, recent_ratio=0.02)
    method.image_position = torch.tensor([before])
    wide = [nn.functional.pad(each.float(), (0, 128 - channels)) for each in (key_hNd, key_hNd.flip(-1))]
    halves = (sums_hN / 2)[None, :, None].expand(1, -1, 2, -1)
    key_out, value_out = method([each[None] for each in wide], halves)
    kept_hN = method.hh_score >= 0  # what it masks by
    found = {"sums": sums_hN, "key": key_hNd.to(torch.int8), "kept": kept_hN, "image_start": torch.tensor(before)}
    return found | {"key_out": key_out[0, ..., :channels], "value_out": value_out[0, ..., :channels]}


def meda(checkout: Path) -> dict[str, Tensor]:
    """The cross-modal entropy of layers with text before, between and after visual rows."""
    file = f"Dynamic-MLLMs/{MODIFIED}"
    code = taken(checkout, file, ("compute_crossmodal_entropy",))
    query, _ = prompt()
    key = torch.randn(query.shape)
    visual = (torch.arange(ROWS) % 25 > 4) & (torch.arange(ROWS) < 50)
    found = []
    for layer in range(LAYERS):
        owner = SimpleNamespace()
        kinds = [marks.nonzero()[:, 0] for marks in (~visual, visual)]
        code.compute_crossmodal_entropy(owner, query[layer][None], key[layer][None], *kinds)
        found.append(owner.multimodal_entropy)
    return {"query": query, "key": key, "visual": visual, "entropy": torch.stack(found)}


def headkv(checkout: Path) -> dict[str, Tensor]:
    """What every head of every layer keeps under head scores from a file, drawn here; each query head has its keys."""
    query, _ = prompt()
    key, score = torch.randn(query.shape), torch.rand(LAYERS, HEADS).double() ** 2
    written = json.dumps({str(i): [each] for i, each in enumerate(score.flatten().tolist())})
    told = {"np": numpy, "json": json, "os": os, "__file__": "", "open": lambda *given: io.StringIO(written)}
    code = taken(checkout, "headkv/snapkv_utils.py", ("ReasonSnapKVCluster",), **told)
    sizes = {"window_size": WINDOW, "base_capacity": SIZE, "beta": 1.25, "temp": 1, "head_choice": "copy"}
    kept = []
    for layer in range(LAYERS):
        sizes |= {"layer_idx": layer, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "model": "llama"}
        kept.append(by_head(code.ReasonSnapKVCluster(**sizes), query[layer], key[layer]))
    return {"query": query, "key": key, "score": score, "kept": torch.stack(kept)}


def sparsemm(checkout: Path) -> dict[str, Tensor]:
    """What every key-value head of every layer keeps under head scores that are drawn here, one for each query head."""
    query, key = prompt()
    score = torch.rand(LAYERS, HEADS).double() ** 2
    held = {str(i): [each] for i, each in enumerate(score.flatten().tolist())}
    told = {"np": numpy, "load_head_score": lambda model: held, "repeat_kv": lambda x, n: x.repeat_interleave(n, 1)}
    code = taken(checkout, "sparsemm/sparsemm_utils.py", ("SparseMM",), **told)
    sizes: dict[str, Any] = {"window_size": WINDOW, "base_capacity": SIZE, "ratio": 0.1, "head_score": "visual"}
    sizes |= {"kernel_size": 5, "pooling": "avgpool", "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    kept = []
    for layer in range(LAYERS):
        method = code.SparseMM(**sizes, layer_idx=layer, num_key_value_groups=HEADS // KV_HEADS)
        kept.append(by_head(method, query[layer], key[layer]))
    return {"query": query, "key": key, "score": score, "kept": torch.stack(kept)}


def by_head(method: Any, query_HNd: Tensor, key_hNd: Tensor) -> Tensor:
    """What a method that gives its heads' entries one after another leaves, bool [h, N]; values hold their numbers."""
    number = torch.arange(ROWS).float()[None, None, :, None].expand(1, len(key_hNd), -1, WIDTH)
    _, left = method.update_kv(key_hNd[None], query_HNd[None], number)
    heads = torch.split(left[:, 0].long(), method.head_lens.tolist())
    return torch.stack([torch.zeros(ROWS, dtype=torch.bool).scatter(0, own, True) for own in heads])


def rotatek(checkout: Path) -> dict[str, Tensor]:
    """Text, an image, text: the logits of new queries on the image's keys that keep a quarter and three quarters.

    Eigenvectors are exact (``ROTATEK_SOLVER=eigh``); with and without the weights of the queries.
    """
    file, before, after = "integrations/lmms_eval/models/model_utils/kv_pruning_utils.py", 9, 12
    mixed = torch.randn(KV_HEADS, WIDTH, WIDTH)
    key = (torch.randn(1, KV_HEADS, ROWS, WIDTH) + 2 * torch.randn(1, KV_HEADS, 1, WIDTH)) @ mixed
    query = torch.randn(1, HEADS, ROWS, WIDTH) * torch.rand(HEADS, 1, WIDTH) ** 2
    found = {"query": query, "key": key, "image": torch.tensor([before, ROWS - after]), "window": torch.tensor(WINDOW)}
    for word, aware in (("weighted", True), ("plain", False)):
        told = {"QUERY_WINDOW": WINDOW, "_ROTATEK_SOLVER": "eigh", "_ROTATEK_QUERY_AWARE": aware}
        code = taken(checkout, file, ("_split_spans", "ChannelPruner"), **told)
        for kept in (WIDTH // 4, 3 * WIDTH // 4):
            pruner = code.ChannelPruner(1 - kept / WIDTH, before, after)
            thin, *_ = pruner.update_rotatek(key, query, key, None, HEADS // KV_HEADS)
            asks = query.view(1, KV_HEADS, -1, WIDTH)  # of all rows and heads of a group
            shift = asks @ pruner.current_rotatek_delta_mu[..., None]
            logits = asks @ pruner.current_rotatek_R_partial @ thin.mT + shift
            found[f"{word}.{kept}.logits"] = logits
    return found


CASES = {"cake": cake, "lookm": lookm, "meda": meda, "headkv": headkv, "sparsemm": sparsemm, "rotatek": rotatek}


def main() -> None:
    """Run all and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in CASES:
        parser.add_argument(name, type=Path, help=f"checkout of {name}")
    args = vars(parser.parse_args())
    write(OUT, {name: (case, args[name]) for name, case in CASES.items()})


if __name__ == "__main__":
    main()
