"""The prompt that a recipe is judged by before anything is loaded, its ledger, and the anchors of equal bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from subtoken_train.datasets.corpus_datamodule import CorpusDataModule
from subtoken_train.datasets.ordered import OrderedDataModule
from subtoken_train.datasets.recall_datamodule import RecallDataModule
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.family import Family
from subtoken_train.ledger.kv_budget import KVBudget
from subtoken_train.ledger.ledger import Anchor, Entry, Ledger, nominal_ledger, solve_anchor, staged_anchor
from subtoken_train.reducers.matched import matched_reducer


@dataclass(frozen=True)
class NominalPrompt:
    """What a pre-flight takes for a prompt.

    Attributes:
        title: the prompt in words.
        note: how its text is made up.
        region: the region that reducer and routers compress, ``visual`` or ``context``.
        regions: tokens of each region before reduction.
    """

    title: str
    note: str
    region: str
    regions: dict[str, int]

    @property
    def tokens(self) -> int:
        """Tokens of the compressed region."""
        return self.regions[self.region]


def nominal_prompt(family: Family, data: OrderedDataModule[Any]) -> NominalPrompt:
    """One image and as many text tokens as the paper's; for a language model a block of the recipe's corpus."""
    if family.image_token_id is not None and isinstance(data, CorpusDataModule | RecallDataModule):
        raise ValueError(
            f"{family.name} reads images, but data names text without any; name instruction records in data.train_file"
        )
    if isinstance(data, RecallDataModule):
        regions = {"context": data.context_length}
        return NominalPrompt("KV budget of a context", f"{data.context_length:,} context tokens", "context", regions)
    if isinstance(data, CorpusDataModule):
        regions = {"context": data.context_length, "query": data.block_length - data.context_length}
        note = f"{regions['context']:,} context + {regions['query']:,} query tokens"
        return NominalPrompt("KV budget of a block of text", note, "context", regions)
    if family.image_token_id is None:
        raise ValueError(
            f"{family.model.config.model_type} is a language model, but data names instruction records; name a corpus "
            "in data.train (recipes/llama7b_quest25_s8k7.yaml shows one)"
        )
    words = family.nominal_text
    text = " + ".join(f"{count} {region}" for region, count in words.items())
    as_in = "as in the paper" if words == family.paper_text else "as in the paper, but for the chat format"
    note = f"{sum(words.values())} text tokens {as_in} ({text}), no answer"
    regions = {"system": words["system"], "visual": family.visual_tokens(), "query": words["query"]}
    return NominalPrompt("KV budget of a prompt with one image", note, "visual", regions)


@dataclass(frozen=True)
class LayerBand:
    """Neighbouring layers whose ledger rows are equal: first and last layer, and the rows of one of them."""

    first: int
    last: int
    rows: tuple[Entry, ...]


def prompt_ledger(parts: CompressedBackbone, prompt: NominalPrompt) -> Ledger:
    """Nominal cache of a prompt."""
    shape = parts.family.shape
    kept = parts.reducer.layer_tokens(prompt.tokens, shape.num_layers)
    return nominal_ledger(shape, prompt.regions, budget_of(parts), parts.cut_layer, kept)


def budget_of(parts: CompressedBackbone) -> KVBudget:
    """Keep ratio and groups; without routing, every group."""
    return replace(parts.group_budget, keep_ratio=parts.reducer.keep_ratio)


def layer_bands(ledger: Ledger) -> list[LayerBand]:
    """The ledger's rows, equal neighbouring layers taken together."""
    layers = [tuple(rows) for _, rows in groupby(ledger.entries, key=lambda entry: entry.layer)]
    bands = groupby(layers, key=lambda rows: [replace(row, layer=0) for row in rows])
    alike = [list(members) for _, members in bands]
    return [LayerBand(members[0][0].layer, members[-1][0].layer, members[0]) for members in alike]


def equal_bytes_anchor(parts: CompressedBackbone, prompt: NominalPrompt) -> Anchor:
    """Return the token-only arm, cut at the same layers, with the bytes that the recipe really keeps of the region.

    Raises:
        ValueError: no keep ratio has them, or one out of the reducer's reach.
    """
    shape = parts.family.shape
    config = matched_reducer(parts.reducer, parts.group_budget, shape.num_layers, prompt.tokens)
    counts = config.layer_tokens(prompt.tokens, shape.num_layers)
    return staged_anchor(shape, prompt.tokens, counts, config.keep_ratio, prompt.region)


def nominal_anchor(parts: CompressedBackbone, prompt: NominalPrompt) -> Anchor:
    """The same for the paper's fraction r (1 + K/S) / 2 of *all* layers.

    Raises:
        ValueError: infeasible; the layers below the cut cost more alone.
    """
    shape, reducer, share = parts.family.shape, parts.reducer, budget_of(parts).total_of(prompt.tokens)
    if reducer.staged:
        config = reducer.at_share(share, shape.num_layers)
        counts = config.layer_tokens(prompt.tokens, shape.num_layers)
        return staged_anchor(shape, prompt.tokens, counts, config.keep_ratio, prompt.region)
    return solve_anchor(shape, prompt.tokens, share, parts.cut_layer, prompt.region)
