"""The peak memory of the paper's appendix C.1: a language model's prefix of 2,048 tokens and a suffix of one.

Batch 1 in bfloat16 on one H100 NVL; no compression, Quest at 25 and 12.5 % of the prefix, and each of these with
routing. The prefix is the context and is compressed, the suffix asks; nothing is generated. LoRA is on in every arm.
GB are 10^9 bytes: between the printed peaks lie exactly the bytes of the tokens that Quest drops.

READING. Of the routed arms the paper says "slightly higher" and prints neither figures nor groups; S = 16 and K = 12,
the smallest of Table 3, stand for them. What it calls the measured KV cache (1.31 and 0.76 GB) is no cache size and is
not imitated: the cache's own bytes are printed.

What it does not do: it takes no times (the paper's Table 6 is of MMLU, see the report's table "Time").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from subtoken_train.benchmarking.benchmark_table import aligned_columns
from subtoken_train.benchmarking.comparison import Subject
from subtoken_train.benchmarking.dense_sides import dense_sides
from subtoken_train.benchmarking.latency_protocol import put_lora_on
from subtoken_train.benchmarking.rounds import hold
from subtoken_train.benchmarking.sides import PackedSide, Side
from subtoken_train.benchmarking.synthetic_prompts import PromptParts, draw_prompts
from subtoken_train.families.family import Family
from subtoken_train.families.lora import LoraSettings
from subtoken_train.reducers import build_reducer
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.bank import RouterBank
from subtoken_train.types import Batch

PREFIX_TOKENS, SUFFIX_TOKENS = 2048, 1
PAGES_KEPT = (0.25, 0.125)
"""Shares of the prefix that Quest keeps."""
ROUTED_GROUPS = RoutingConfig(num_groups=16, kept_groups=12, budget="global", query_conditioned=True)
MEMORY_LORA = LoraSettings(rank=32, alpha=16)
PEAK_GB: dict[str, dict[str, float]] = {
    "meta-llama/Llama-2-7b-hf": {"no compression": 14.791, "quest 25%": 13.985, "quest 12.5%": 13.851},
    "Qwen/Qwen2.5-7B": {},
}
"""Printed peaks by backbone and arm; of Qwen2.5-7B the paper says that savings are smaller, without figures."""
_GB = 1e9


def memory_prompt(family: Family) -> PromptParts:
    """Return the protocol's prompt.

    Raises:
        ValueError: a model that sees images.
    """
    if family.image_token_id is not None:
        raise ValueError(
            f"--peak-memory is about a language model's prefix, and {family.name} reads images; --table8 is about those"
        )
    with torch.device("meta"):
        RouterBank(ROUTED_GROUPS, family.hidden_size, family.shape)
    return PromptParts(0, 0, 0, SUFFIX_TOKENS, PREFIX_TOKENS)


def memory_sides(subject: Subject, prompts: Batch) -> dict[str, Side]:
    """Make the arms by name: transformers' own cache, Quest, and Quest with routing, all with the same LoRA."""
    family = subject.family
    put_lora_on(family, MEMORY_LORA)
    dynamic, *others = dense_sides(family, prompts, 0)
    for other in others:
        other.close()
    sides: dict[str, Side] = {"no compression": dynamic}
    bank = RouterBank(ROUTED_GROUPS, family.hidden_size, family.shape).to(family.device)
    groups = f"S{ROUTED_GROUPS.num_groups}K{ROUTED_GROUPS.kept_groups}"
    for keep_ratio in PAGES_KEPT:
        reducer, name = build_reducer("quest", keep_ratio), f"quest {100 * keep_ratio:g}%"
        for label, routers in ((name, None), (f"{name} + {groups}", bank)):
            sides[label] = PackedSide(label, label, family, prompts, reducer, routers, subject.compression)
    return sides


def measure_memory(subject: Subject) -> dict[str, Any]:
    """Run each arm once, no other one's cache alive, and record its peak and its cache as JSON."""
    parts = memory_prompt(subject.family)
    prompts = draw_prompts(subject.family, parts, 1)
    found = {}
    for name, side in memory_sides(subject, prompts).items():
        figures = hold(side, 0)
        held = figures.prompt_bytes
        found[name] = {"entries": figures.entries, "peak_bytes": figures.peak_bytes, "cache": asdict(held)}
        side.close()
    return {"prompt": {**asdict(parts), "length": parts.length}, "arms": found}


def peak_lines(row: Mapping[str, Any], path: str) -> list[str]:
    """Return the table for people, with the paper's figure where it prints one."""
    head = ("arm", "entries", "cache GB", "peak GB", "paper")
    cells = [head]
    for name, arm in row["arms"].items():
        paper = PEAK_GB.get(path, {}).get(name)
        cache = arm["cache"]["payload"] + arm["cache"]["index"]
        words = "" if paper is None else f"{paper:.3f}"
        cells.append((name, f"{arm['entries']:,}", f"{cache / _GB:.3f}", f"{arm['peak_bytes'] / _GB:.3f}", words))
    return aligned_columns(cells)
