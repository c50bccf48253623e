"""One row of a benchmark: an arm beside its anchor, the same tokens unrouted, and transformers' caches."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from subtoken_train.benchmarking.copy_share import copy_shares
from subtoken_train.benchmarking.dense_sides import dense_sides
from subtoken_train.benchmarking.rounds import SideFigures, measure, ratios
from subtoken_train.benchmarking.sides import PackedSide, Side
from subtoken_train.benchmarking.synthetic_prompts import PromptParts, draw_prompts
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.family import Family
from subtoken_train.inference.compression import Compression
from subtoken_train.reducers import build_reducer
from subtoken_train.reducers.base import Reducer
from subtoken_train.reducers.matched import matched_reducer
from subtoken_train.routing.bank import RouterBank
from subtoken_train.types import Batch, in_compressed_region

ROUTED, TOKEN_ONLY, ANCHOR, UNROUTED = "routed", "same_tokens", "anchor", "packed"
"""Names of the packed sides; ``packed`` is an arm that routes nothing."""
ROUNDING = 0.03
"""Share by which an anchor's bytes may differ from its arm's without a word: whole tokens, and the index."""


@dataclass(frozen=True)
class Subject:
    """The arm that is measured.

    Attributes:
        family: its backbone, with its LoRA.
        reducer: its token reducer.
        bank: its routers; None where none acts.
        compression: eviction and precision of all packed sides.
    """

    family: Family
    reducer: Reducer
    bank: RouterBank | None
    compression: Compression

    @classmethod
    def of(cls, backbone: CompressedBackbone, compression: Compression) -> Subject:
        """A loaded arm, whose routers leave the backbone until their side's turn."""
        backbone.detach()
        bank = None if backbone.active_routing is None else backbone.bank
        return cls(backbone.family, backbone.reducer, bank, compression)

    @property
    def name(self) -> str:
        """Of its side."""
        return UNROUTED if self.bank is None else ROUTED

    @property
    def words(self) -> str:
        """Reducer, groups and compression."""
        groups = "no routing" if self.bank is None else _groups(self.bank)
        return ", ".join(part for part in (_reducer(self.reducer), groups, self._label) if part)

    @property
    def _label(self) -> str:
        return "" if self.compression.label == "-" else self.compression.label

    def anchor(self, tokens: int) -> Reducer | None:
        """The token reducer of the matched token-only anchor; None where the arm is token-only itself.

        Where the arm has no token reducer its anchor has one all the same: tokens drawn at random, or Quest's pages.

        Args:
            tokens: of a prompt's compressed region, before the reducer.

        Raises:
            ValueError: no keep ratio has the arm's bytes.
        """
        if self.bank is None:
            return None
        reducer = self.reducer
        if reducer.name == "none":
            reducer = build_reducer("quest" if self.family.image_token_id is None else "random")
        routed = replace(self.bank.config.token_budget, key_channels=self.compression.key_channels)
        return matched_reducer(reducer, routed, self.family.shape.num_layers, tokens)


def comparison(subject: Subject, prompts: Batch, new_tokens: int) -> tuple[list[Side], list[str]]:
    """All sides, the subject's first, and what is to be said of those that are missing."""
    family, compression, notes = subject.family, subject.compression, list[str]()
    sides: list[Side] = [
        PackedSide(subject.name, subject.words, family, prompts, subject.reducer, subject.bank, compression)
    ]
    if subject.bank is None:
        notes.append("it drops no value group: its token-only anchor and its same-tokens cache are it itself")
    else:
        words = f"the same tokens, {_reducer(subject.reducer)}, whole values"
        sides.append(PackedSide(TOKEN_ONLY, words, family, prompts, subject.reducer, None, compression))
        try:
            anchor = subject.anchor(_region_tokens(prompts))
        except ValueError as error:
            notes.append(f"no matched token-only anchor: {error}")
        else:
            assert anchor is not None
            words = f"token-only anchor of equal bytes, {_reducer(anchor)}, whole values"
            rounded = replace(compression, round_up=True)
            sides.append(PackedSide(ANCHOR, words, family, prompts, anchor, None, rounded))
    return [*sides, *dense_sides(family, prompts, new_tokens)], notes


def _region_tokens(prompts: Batch) -> int:
    """Tokens of the compressed region, of the prompt that has the fewest but some; 1 where none has any."""
    counts = [count for count in in_compressed_region(prompts.regions_BN).sum(-1).tolist() if count]
    return min(counts, default=1)


def run_row(
    subject: Subject, parts: PromptParts, batch_size: int, new_tokens: int, pairs: int, share_of_copy: bool
) -> dict[str, Any]:
    """Measure one length and batch size; a record as JSON."""
    prompts = draw_prompts(subject.family, parts, batch_size)
    sides, notes = comparison(subject, prompts, new_tokens)
    figures = measure(sides, new_tokens, pairs)
    notes += _bytes_apart(figures, subject.name)
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores:
        notes.append(f"load average {load:.1f} on {cores} cores: other work ran beside it, so seconds are too many")
    row = {
        "prompt": {**asdict(parts), "length": parts.length, "words": parts.words},
        "batch_size": batch_size,
        "new_tokens": new_tokens,
        "pairs": pairs,
        "load_average": round(load, 2),
        "subject": subject.name,
        "sides": {name: found.record() for name, found in figures.items()},
        "ratios": ratios(figures, subject.name),
        "notes": notes,
    }
    if share_of_copy:
        row["share_of_copy"] = copy_shares(sides, pairs)
    _close(sides)
    return row


def _bytes_apart(figures: Mapping[str, SideFigures], ours: str) -> list[str]:
    """What is to be said of an anchor whose bytes are not the subject's, as measured.

    The ledger that solves its keep ratio takes every kept token for cut alike: keys in the last window are not.
    """
    if ANCHOR not in figures:
        return []
    held = [found.payload + found.index for found in (figures[name].prompt_bytes for name in (ANCHOR, ours))]
    apart = held[0] / held[1] - 1
    if abs(apart) <= ROUNDING:
        return []
    return [f"the anchor holds {held[0]:,} bytes of the prompt, {apart:+.1%} of the {held[1]:,} it stands for"]


def _close(sides: Sequence[Side]) -> None:
    for side in sides:
        side.close()


def _reducer(reducer: Reducer) -> str:
    return f"{reducer.name} {reducer.keep_ratio:.6g}" if reducer.acts else "every token"


def _groups(bank: RouterBank) -> str:
    return f"S{bank.config.num_groups}K{bank.config.kept_groups} {bank.config.selector}"
