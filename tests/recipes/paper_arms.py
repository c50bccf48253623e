"""The list of shipped arms: the rows of the paper's Tables 1 to 4 (``recipes/paper_rows.csv``) and those beside them.

Table 4's rows are stage 2 of a token-only adapter at the same keep ratio, so the four stage-1 adapters are listed too.
The rows of LLaMA-2-7B, and a value-norm control, are there for the embedded language model as well, and so are arms
under two other scorers of a context (``SCORERS``). Backbones that the paper does not train have the same settings, at
25 % and 12.5 % of the tokens (``further_arms``), and so has LLaVA-1.5-7B under token reducers that it does not train
(``reducer_arms``). Beside the paper's rows under FastV stands the router that the embedded model chose
(``best_arms``), and beside its tables what it reports in Figure 1 and in section 3.5 (``reported_arms``).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from checkpoints import tiny_llama, tiny_llava
from subtoken_train.ledger.kv_budget import KVBudget, KVShape, geometry
from subtoken_train.reducers import REDUCERS as REGISTERED
from subtoken_train.reducers import build_reducer
from subtoken_train.reducers.base import Reducer, matched_reducer
from subtoken_train.types import Fill
from tests.support.places import RECIPES

TINY = {
    "tiny-llava": KVShape(tiny_llava.TEXT_LAYERS, tiny_llava.HEADS, tiny_llava.WIDTH // tiny_llava.HEADS, 4),
    "tiny-llama": KVShape(tiny_llama.LAYERS, tiny_llama.KV_HEADS, tiny_llama.WIDTH // tiny_llama.HEADS, 4),
}


@dataclass(frozen=True)
class Backbone:
    """What a recipe's first word stands for: words, Hub id, ledger geometry, and tokens of the compressed region."""

    words: str
    path: str
    shape: str
    tokens: int
    is_text: bool = False

    @property
    def geometry(self) -> KVShape:
        """What its cache is made of; in fp32 that of the embedded models."""
        return TINY.get(self.shape) or geometry(self.shape)

    @property
    def region(self) -> str:
        """What is compressed."""
        return "context" if self.is_text else "visual"


BACKBONES = {
    "llava7b": Backbone("LLaVA-1.5-7B", "llava-hf/llava-1.5-7b-hf", "llava-1.5-7b", 576),
    "llava13b": Backbone("LLaVA-1.5-13B", "llava-hf/llava-1.5-13b-hf", "llava-1.5-13b", 576),
    "qwenvl3b": Backbone("Qwen2.5-VL-3B", "Qwen/Qwen2.5-VL-3B-Instruct", "qwen2.5-vl-3b", 144),
    "qwenvl7b": Backbone("Qwen2.5-VL-7B", "Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5-vl-7b", 144),
    "llavanext7b": Backbone("LLaVA-NeXT-Vicuna-7B", "llava-hf/llava-v1.6-vicuna-7b-hf", "llama-2-7b", 2928),
    "llavanextmistral7b": Backbone("LLaVA-NeXT-Mistral-7B", "llava-hf/llava-v1.6-mistral-7b-hf", "mistral-7b", 2928),
    # its language model is Qwen2.5-7B; 1,280 tokens are an image of 896 x 896 pixels
    "internvl8b": Backbone("InternVL3-8B", "OpenGVLab/InternVL3-8B-hf", "qwen2.5-7b", 1280),
    "llavaov7b": Backbone("LLaVA-OneVision-7B", "llava-hf/llava-onevision-qwen2-7b-ov-hf", "llava-onevision-7b", 3699),
    "qwen2vl7b": Backbone("Qwen2-VL-7B", "Qwen/Qwen2-VL-7B-Instruct", "qwen2-vl-7b", 144),
    "qwen3vl4b": Backbone("Qwen3-VL-4B", "Qwen/Qwen3-VL-4B-Instruct", "qwen3-vl-4b", 100),
    "qwen3vl8b": Backbone("Qwen3-VL-8B", "Qwen/Qwen3-VL-8B-Instruct", "qwen3-vl-8b", 100),
    "mistralsmall24b": Backbone(
        "Mistral-Small-3.1-24B", "mistralai/Mistral-Small-3.1-24B-Instruct-2503", "mistral-small-24b", 768
    ),
    "glm41v9b": Backbone("GLM-4.1V-9B", "zai-org/GLM-4.1V-9B-Thinking", "glm-4.1v-9b", 144),
    # a photograph of 4 : 3 in twelve tiles and its whole
    "smolvlm500m": Backbone("SmolVLM2-500M", "HuggingFaceTB/SmolVLM2-500M-Video-Instruct", "smolvlm2-500m", 832),
    "llama7b": Backbone("LLaMA-2-7B", "meta-llama/Llama-2-7b-hf", "llama-2-7b", 1024, is_text=True),
    "qwen7b": Backbone("Qwen2.5-7B", "Qwen/Qwen2.5-7B", "qwen2.5-7b", 1024, is_text=True),
    "llama31": Backbone("Llama-3.1-8B", "meta-llama/Llama-3.1-8B", "llama-3.1-8b", 1024, is_text=True),
    "qwen38b": Backbone("Qwen3-8B", "Qwen/Qwen3-8B", "qwen3-8b", 1024, is_text=True),
    "qwen314b": Backbone("Qwen3-14B", "Qwen/Qwen3-14B", "qwen3-14b", 1024, is_text=True),
    "tinylm": Backbone("tiny-llama", "checkpoints/tiny-llama", "tiny-llama", 512, is_text=True),
    "tiny": Backbone("tiny-llava", "checkpoints/tiny-llava", "tiny-llava", tiny_llava.VISUAL_TOKENS),
}
FURTHER = {
    "quest": ("llama31", "qwen38b", "qwen314b"),
    "fastv": (
        "llavanext7b",
        "llavanextmistral7b",
        "internvl8b",
        "llavaov7b",
        "qwen2vl7b",
        "qwen3vl4b",
        "qwen3vl8b",
        "smolvlm500m",
        "mistralsmall24b",
        "glm41v9b",
    ),
}
"""Backbones beyond the paper's tables, by the reducer of their recipes."""
FURTHER_GROUPS = {"quest": ((16, 4), (16, 12)), "fastv": ((16, 4),)}
REDUCERS = {"FastV": "fastv", "VisionZip": "visionzip", "Quest": "quest"}
OTHER_REDUCERS = {
    "FasterVLM": "fastervlm",
    "PruMerge": "prumerge",
    "SparseVLM": "sparsevlm",
    "PyramidDrop": "pyramiddrop",
    "FitPrune": "fitprune",
}
"""Token reducers beyond the paper's tables; their recipes are LLaVA-1.5-7B's."""
SCORERS = {"Compactor": "compactor", "ExpectedAttention": "expected_attention"}
"""Token reducers of a language model's context that the paper does not train; their recipes are the embedded one's."""
REACHED = {"pyramiddrop": ("46.875", "35"), "fitprune": ("50", "25")}
"""Averages over layers of those that do not reach 12.5 % in 32 layers; PyramidDrop's own first."""


@dataclass(frozen=True)
class Arm:
    """One recipe; ``keep`` in percent as written (25, 12.5), an anchor's keep and groups are its routed arm's."""

    model: str
    reducer: str = "none"
    keep: str = "100"
    num_groups: int = 0
    kept_groups: int = 0
    variant: str = ""
    anchor: bool = False

    @property
    def name(self) -> str:
        """Return a file's name, ``<model>_<reducer><keep>_s<S>k<K>`` and what its router and its training are."""
        if self.reducer == "none" and not self.num_groups:
            return f"{self.model}_lora_only"
        groups = f"_s{self.num_groups}k{self.kept_groups}" if self.num_groups else ""
        anchor = "_anchor" if self.anchor else ""
        return f"{self.model}_{self.reducer}{self.keep.replace('.', 'p')}{groups}{self.variant}{anchor}"

    @property
    def backbone(self) -> Backbone:
        """The model."""
        return BACKBONES[self.model]

    @property
    def budget(self) -> KVBudget:
        """The budget that the name describes."""
        return KVBudget(float(self.keep) / 100, self.num_groups or 1, self.kept_groups or 1, fill=self.fill)

    @property
    def keep_ratio(self) -> float:
        """What the recipe's reducer keeps: r, or the anchor's share with the same bytes."""
        if not self.anchor:
            return float(self.keep) / 100
        return self.made().keep_ratio

    @property
    def fill(self) -> Fill:
        """What a dropped group reads as."""
        return "mean" if "_mean" in self.variant else "zero"

    @property
    def routed(self) -> bool:
        """Whether it routes value groups."""
        return self.num_groups > 0 and not self.anchor

    @property
    def staged(self) -> bool:
        """Whether its reducer cuts at several layers; the keep ratio is then an average over layers."""
        return REGISTERED.find(self.reducer).staged

    def made(self) -> Reducer:
        """Its reducer; an anchor's is solved from its routed arm's."""
        if not self.anchor:
            return build_reducer(self.reducer, self.keep_ratio)
        routed, groups = replace(self, anchor=False).made(), replace(self.budget, keep_ratio=1.0)
        depth = self.backbone.geometry.num_layers if self.staged else 1
        return matched_reducer(routed, groups, depth, self.backbone.tokens)

    def kept_tokens(self) -> int:
        """Tokens of the compressed region that stay."""
        tokens = self.backbone.tokens
        return tokens if self.reducer == "none" else self.made().kept_tokens(tokens)


def arms() -> Iterator[Arm]:
    """Every distinct recipe of the paper's rows, and the stage-1 adapters, in the order of the tables."""
    names = {backbone.words: name for name, backbone in BACKBONES.items()}
    groups_at = {Fraction(3, 4): (8, 6), Fraction(7, 8): (8, 7), Fraction(1, 4): (16, 4)}
    seen = set()
    for row in csv.DictReader((RECIPES / "paper_rows.csv").open(encoding="utf-8")):
        model = names[row["model"]]
        if row["variant"] in ("lora_only", "full"):
            arm = Arm(model)
        elif row["variant"] == "token_only":
            arm = _anchor_of(model, REDUCERS[row["reducer"]], float(row["total_kv"]), groups_at)
        else:
            variant = row["variant"].removeprefix("subtoken").lower() + ("_stage2" if row["table"] == "4" else "")
            groups = (int(row["num_groups"]), int(row["kept_groups"]))
            arm = Arm(model, REDUCERS[row["reducer"]], row["token_keep"], *groups, variant)
            if row["table"] == "4":
                first = Arm(model, REDUCERS[row["reducer"]], row["token_keep"])
                yield from () if first in seen else (first,)
                seen.add(first)
        yield from () if arm in seen else (arm,)
        seen.add(arm)


def embedded_arms() -> Iterator[Arm]:
    """Yield LLaMA-2-7B's rows on the embedded model, value norm at S = 16, Figure 1, and other scorers' arms."""
    for arm in arms():
        if arm.model == "llama7b":
            yield replace(arm, model="tinylm")
            if arm.routed and arm.num_groups == 16:
                yield replace(arm, model="tinylm", variant="_valuenorm")
    yield Arm("tinylm", "none", "100", 4, 1)
    yield from (Arm("tinylm", "quest", "25"), Arm("tinylm", "quest", "25", 16, 12, variant="_bilinear"))
    yield Arm("tinylm", "kvzip", "25", 16, 12)
    for reducer in SCORERS.values():
        routed = Arm("tinylm", reducer, "25", 16, 12)
        yield from (Arm("tinylm", reducer, "25"), replace(routed, anchor=True))
        yield from (routed, replace(routed, variant="_valuenorm"))


def further_arms() -> Iterator[Arm]:
    """Of each further backbone: LoRA alone, and each routed arm with its anchor."""
    for reducer, models in FURTHER.items():
        for model in models:
            yield Arm(model)
            for keep in ("25", "12.5"):
                for groups in FURTHER_GROUPS[reducer]:
                    routed = Arm(model, reducer, keep, *groups)
                    yield from (routed, replace(routed, anchor=True))


def reducer_arms() -> Iterator[Arm]:
    """Of each other token reducer: the routed arms, each with its anchor."""
    for reducer in OTHER_REDUCERS.values():
        for keep in REACHED.get(reducer, ("25", "12.5")):
            routed = Arm("llava7b", reducer, keep, 16, 4)
            yield from (routed, replace(routed, anchor=True))


def best_arms() -> Iterator[Arm]:
    """Where ``docs/choosing.md`` advises a router: at the bytes of the paper's S16K4, whose anchors are theirs."""
    for model in ("llava7b", "llava13b", "qwenvl3b", "qwenvl7b"):
        for keep in ("25", "12.5"):
            yield Arm(model, "fastv", keep, 64, 16, "_best")
    for model in ("llava7b", "llava13b"):
        yield Arm(model, "visionzip", "12.5", 64, 16, "_best")


def reported_arms() -> Iterator[Arm]:
    """Yield the arm of Figure 1, and those of section 3.5's query-conditioned visual router."""
    yield Arm("llama7b", "none", "100", 4, 1)
    for reducer in ("fastv", "visionzip"):
        for keep in ("25", "12.5"):
            yield Arm("llava7b", reducer, keep, 16, 4, "_query")


def _anchor_of(model: str, reducer: str, total: float, groups_at: dict[Fraction, tuple[int, int]]) -> Arm:
    """The anchor with ``total`` percent of the KV (the paper rounds to three decimals), named after a routed arm."""
    for keep in ("25", "12.5"):
        for groups in groups_at.values():
            arm = Arm(model, reducer, keep, *groups, anchor=True)
            if abs(100 * arm.budget.total_kv_fraction - total) < 6e-4 and (reducer == "quest") == (groups[0] == 8):
                return arm
    raise ValueError(f"no routed arm of {model} with {reducer} has {total} % of the KV")


def every_arm() -> Iterator[Arm]:
    """Yield all arms, those of the embedded language model last."""
    yield from (*arms(), *reported_arms(), *best_arms(), *further_arms(), *reducer_arms(), *embedded_arms())
