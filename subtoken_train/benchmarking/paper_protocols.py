"""The paper's protocols of time and memory: Table 8, and the peak memory of appendix C.1. LoRA is on in every arm.

Table 8: what routing adds to prompt and steps of a VLM over the token-only arm of the same keep ratio
(``same_tokens``): one image of 336 x 336 pixels and a short question, batch 1, FastV (stage ``embeds``) and VisionZip
at 25 and 12.5 %, S = 16, K = 4, 256 forced tokens in bfloat16 on one H100 NVL. ``departures`` says where a run is
another. The paper does not print its prompt; its lengths (595 to 163/91, 171 to 63/45) fix how many text tokens it has.

Appendix C.1: the peak memory of a language model's prefix of 2,048 tokens, which is compressed, and a suffix of one,
which asks; nothing is generated: no compression, Quest at 25 and 12.5 %, and these with routing. GB are 10^9 bytes.

READING. Of the routed arms the paper says "slightly higher" and prints neither figures nor groups; S = 16 and K = 12,
the smallest of Table 3, stand for them. What it calls the measured KV cache (1.31 and 0.76 GB) is no cache size and is
not imitated: the cache's own bytes are printed. No times are taken there (the paper's Table 6 is of MMLU).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from subtoken_train.benchmarking.comparison import ROUTED, TOKEN_ONLY, Subject, aligned_columns
from subtoken_train.benchmarking.rounds import hold
from subtoken_train.benchmarking.sides import PackedSide, Side, dense_sides
from subtoken_train.benchmarking.synthetic_prompts import PromptParts, draw_prompts
from subtoken_train.families.family import Family, check_served
from subtoken_train.families.load import published_config
from subtoken_train.families.lora import LoraSettings, add_lora
from subtoken_train.reducers import build_reducer
from subtoken_train.routing import RoutingConfig
from subtoken_train.routing.bank import RouterBank
from subtoken_train.types import Batch

REDUCERS = ("fastv", "visionzip")
KEEP_RATIOS = (0.25, 0.125)
NEW_TOKENS, DTYPE, GPU = 256, "bfloat16", "H100 NVL"
SCALED_TOKENS, SCALED_DTYPE, SCALED_LAYERS, SCALED_NARROWER = 32, "float32", 4, 4
"""Settings of a run without a GPU; layers and width of a backbone that is drawn at random there."""
PAPER: dict[str, dict[str, Any]] = {
    "llava-hf/llava-1.5-7b-hf": {"peak_gb": (14.4, 14.7), "prefill": (0.289, 0.461), "step": (0.356, 0.552)},
    "llava-hf/llava-1.5-13b-hf": {"peak_gb": (27.0, 27.5), "prefill": (0.148, 0.452), "step": (0.223, 0.403)},
    "Qwen/Qwen2.5-VL-3B-Instruct": {"peak_gb": (7.6, 8.8), "prefill": (0.130, 0.297), "step": (0.348, 0.471)},
    "Qwen/Qwen2.5-VL-7B-Instruct": {"peak_gb": (16.7, 17.9), "prefill": (0.105, 0.414), "step": (0.309, 0.556)},
}
"""Table 8 by backbone: peak allocation, and the least and the greatest overhead."""


def check_protocol(family: Family) -> None:
    """Raise a worded ``ValueError`` where a backbone cannot run it: the reducers of the protocol are part of it."""
    if family.image_token_id is None:
        words = "leave it out, or name a backbone that does (llava-hf/llava-1.5-7b-hf)"
        raise ValueError(f"--table8 is about a prompt with an image, and {family.name} sees none; {words}")
    for name in REDUCERS:
        check_served(build_reducer(name, KEEP_RATIOS[0]), type(family), family.model.config)
    with torch.device("meta"):
        RouterBank(RoutingConfig(), family.hidden_size, family.shape)


def protocol_subjects(subject: Subject) -> Iterator[tuple[str, Subject]]:
    """Yield the routed arms with their names; routers are drawn, and LoRA is put on where there is none."""
    family = subject.family
    _put_lora_on(family, LoraSettings())
    bank = RouterBank(RoutingConfig(), family.hidden_size, family.shape).to(family.device)
    for name in REDUCERS:
        for ratio in KEEP_RATIOS:
            yield f"{name} {ratio:.1%}", replace(subject, reducer=build_reducer(name, ratio), bank=bank)


def _put_lora_on(family: Family, settings: LoraSettings) -> None:
    if not hasattr(family.model, "peft_config"):
        add_lora(family, settings)
        family.model.to(family.device).eval()


def departures(
    family: Family, path: str, parts: PromptParts, new_tokens: int, dtype: str, quantization: str = "none"
) -> list[str]:
    """List in which points a run is not the paper's; empty where it is."""
    found = other_machine(family, path, PAPER, dtype, quantization)
    found += [f"{new_tokens} forced tokens instead of {NEW_TOKENS}"] if new_tokens != NEW_TOKENS else []
    found += [f"an image of {parts.image_tokens} tokens"] if parts.image_tokens not in (576, 144) else []
    return found


def other_machine(
    family: Family, path: str, backbones: Collection[str], dtype: str, quantization: str = "none"
) -> list[str]:
    """List in which points model, device and precision are not the paper's, which measures on one ``GPU``."""
    found, device, known = list[str](), family.device.type, published_config(path)
    if path not in backbones or known is None:
        found.append(f"{path} is none of the paper's backbones")
    else:
        own, text = family.model.config.get_text_config(), known.get_text_config()
        names = {"num_hidden_layers": "layers", "hidden_size": "width", "num_attention_heads": "heads"}
        compared = [(word, getattr(own, name), getattr(text, name), ",") for name, word in names.items()]
        if family.image_token_id is not None:
            have, whole = (config.vision_config.to_dict().get for config in (family.model.config, known))
            tower = "layers of the vision tower"
            compared += [(tower, have(name), whole(name), "") for name in ("num_hidden_layers", "depth")]
        found += [f"{word} {ours:{form}} instead of {its:{form}}" for word, ours, its, form in compared if ours != its]
    if device != "cuda":
        found.append(f"on a {device.upper()}, without its memory allocator's peak")
    elif GPU not in (name := torch.cuda.get_device_name(family.device)):
        found.append(f"on {name} instead of {GPU}")
    found += [f"{dtype} instead of {DTYPE}"] if dtype != DTYPE else []
    found += [f"weights in {quantization}"] if quantization != "none" else []
    return found


def overhead_line(label: str, row: Mapping[str, Any], path: str) -> str:
    """Write input length and overheads of one arm, with the paper's range where it has the backbone."""
    words = []
    for part, what in (("prefill", "prefill"), ("step", "decode")):
        middle, low, high = (100 * (each - 1) for each in row["ratios"][part][TOKEN_ONLY])
        interval = f" [{low:+.1f}, {high:+.1f}]" if row["pairs"] > 1 else ""
        paper = " (paper {:+.1%} to {:+.1%})".format(*PAPER[path][part]) if path in PAPER else ""
        words.append(f"{what} {middle:+.1f} %{interval}{paper}")
    lengths = f"{row['prompt']['length']:,} -> {row['sides'][ROUTED]['entries']:,} tokens"
    return f"{label}: {lengths}; {', '.join(words)} over token-only at the same keep ratio"


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
    """Return the protocol's prompt; a ``ValueError`` for a model that sees images."""
    if family.image_token_id is not None:
        raise ValueError(f"--peak-memory is about a language model's prefix, not {family.name}: --table8 is")
    with torch.device("meta"):
        RouterBank(ROUTED_GROUPS, family.hidden_size, family.shape)
    return PromptParts(0, 0, 0, SUFFIX_TOKENS, PREFIX_TOKENS)


def memory_sides(subject: Subject, prompts: Batch) -> dict[str, Side]:
    """Make the arms by name: transformers' own cache, Quest, and Quest with routing, all with the same LoRA."""
    family = subject.family
    _put_lora_on(family, MEMORY_LORA)
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


def measure_memory(
    subject: Subject, progress: Callable[[int, int], object] = lambda done, total: None
) -> dict[str, Any]:
    """Run each arm alone, and record its peak and cache as JSON; ``progress`` gets (done, total)."""
    parts, found = memory_prompt(subject.family), dict[str, Any]()
    sides = memory_sides(subject, draw_prompts(subject.family, parts, 1))
    for name, side in sides.items():
        figures = hold(side, 0)
        found[name] = {"entries": figures.entries, "peak_bytes": figures.peak_bytes, "cache": figures.prompt_bytes}
        side.close()
        progress(len(found), len(sides))
    return {"prompt": {**asdict(parts), "length": parts.length}, "arms": found}


def peak_lines(row: Mapping[str, Any], path: str) -> list[str]:
    """Return the table for people, with the paper's figure where it prints one."""
    cells = [("arm", "entries", "cache GB", "peak GB", "paper")]
    for name, arm in row["arms"].items():
        paper = PEAK_GB.get(path, {}).get(name)
        cache = arm["cache"]["payload"] + arm["cache"]["index"]
        words = "" if paper is None else f"{paper:.3f}"
        cells.append((name, f"{arm['entries']:,}", f"{cache / _GB:.3f}", f"{arm['peak_bytes'] / _GB:.3f}", words))
    return aligned_columns(cells)
