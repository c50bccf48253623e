"""One row of a benchmark: an arm beside its anchor, the same tokens unrouted, and transformers' caches; its table."""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Self

from subtoken_train.benchmarking.rounds import WARMUP, cell, measure, ratios
from subtoken_train.benchmarking.sides import PackedSide, Side, dense_sides
from subtoken_train.benchmarking.synthetic_prompts import PromptParts, draw_prompts
from subtoken_train.engine.compressed_backbone import CompressedBackbone
from subtoken_train.families.family import Family
from subtoken_train.inference.compression import Compression
from subtoken_train.reducers import build_reducer
from subtoken_train.reducers.base import Reducer, matched_reducer
from subtoken_train.routing.bank import RouterBank
from subtoken_train.types import Batch, in_compressed_region

ROUTED, TOKEN_ONLY, ANCHOR, UNROUTED = "routed", "same_tokens", "anchor", "packed"
"""Names of the packed sides; ``packed`` is an arm that routes nothing."""
ROUNDING = 0.03
"""Share by which an anchor's bytes may differ from its arm's without a word: whole tokens, and the index."""


@dataclass(frozen=True)
class Subject:
    """The arm that is measured: a backbone with its LoRA, and what compresses it; no bank: no router acts."""

    family: Family
    reducer: Reducer
    bank: RouterBank | None
    compression: Compression

    @classmethod
    def of(cls, backbone: CompressedBackbone, compression: Compression) -> Self:
        """Describe a loaded arm; routers that keep every group as it is are left out."""
        bank = None if backbone.active_routing is None else backbone.bank
        return cls(backbone.family, backbone.reducer, bank, compression)

    @property
    def name(self) -> str:
        """The name of its side."""
        return UNROUTED if self.bank is None else ROUTED

    @property
    def words(self) -> str:
        """Reducer, groups and compression."""
        groups = "no routing" if self.bank is None else self.bank.config.words
        parts = (_reducer(self.reducer), groups, self.compression.label)
        return ", ".join(part for part in parts if part not in ("", "-"))

    def anchor(self, tokens: int) -> Reducer | None:
        """Return the reducer of the matched token-only anchor; None where the arm is token-only itself.

        An arm without a token reducer has an anchor all the same: tokens drawn at random, or Quest's pages. ``tokens``
        counts the region before the reducer; a ``ValueError`` where no keep ratio has the arm's bytes.
        """
        if self.bank is None:
            return None
        if (reducer := self.reducer).name == "none":
            reducer = build_reducer("quest" if self.family.image_token_id is None else "random")
        routed = replace(self.bank.config.token_budget, key_channels=self.compression.key_channels)
        return matched_reducer(reducer, routed, self.family.shape.num_layers, tokens)


def comparison(subject: Subject, prompts: Batch, new_tokens: int) -> tuple[list[Side], list[str]]:
    """List all sides, the subject's first, and say why others are missing."""
    family, compression, notes = subject.family, subject.compression, list[str]()
    sides = [PackedSide(subject.name, subject.words, family, prompts, subject.reducer, subject.bank, compression)]
    if subject.bank is None:
        notes.append("it drops no value group, so it is its own token-only anchor and its own same-tokens cache")
    else:
        words = f"the same tokens, {_reducer(subject.reducer)}, whole values"
        sides.append(PackedSide(TOKEN_ONLY, words, family, prompts, subject.reducer, None, compression))
        try:
            counts = [count for count in in_compressed_region(prompts.regions_BN).sum(-1).tolist() if count]
            anchor = subject.anchor(min(counts, default=1))  # for the prompt that has the fewest, but some
        except ValueError as error:
            notes.append(f"no matched token-only anchor: {error}")
        else:
            assert anchor is not None
            words = f"token-only anchor of equal bytes, {_reducer(anchor)}, whole values"
            sides.append(PackedSide(ANCHOR, words, family, prompts, anchor, None, replace(compression, round_up=True)))
    for side in sides:
        side.new_tokens = new_tokens
    return [*sides, *dense_sides(family, prompts, new_tokens)], notes


def run_row(
    subject: Subject,
    parts: PromptParts,
    batch_size: int,
    new_tokens: int,
    pairs: int,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> dict[str, Any]:
    """Measure one length and batch size, as a JSON record; ``progress`` gets (done, total) after every run."""
    sides, notes = comparison(subject, draw_prompts(subject.family, parts, batch_size), new_tokens)
    done, total = itertools.count(1), len(sides) * (1 + WARMUP + pairs)
    figures = measure(sides, new_tokens, pairs, ran=lambda: progress(next(done), total))
    if ANCHOR in figures:
        held = [part["payload"] + part["index"] for part in (figures[n].prompt_bytes for n in (ANCHOR, subject.name))]
        if abs(apart := held[0] / held[1] - 1) > ROUNDING:
            notes.append(f"the anchor's prompt takes {held[0]:,} bytes, {apart:+.1%} against the arm's {held[1]:,}")
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores:
        notes.append(f"load average {load:.1f} on {cores} cores: other programs ran, so the times are too long")
    for side in sides:
        side.close()
    return {
        "prompt": {**asdict(parts), "length": parts.length, "words": parts.words},
        "batch_size": batch_size,
        "new_tokens": new_tokens,
        "pairs": pairs,
        "load_average": round(load, 2),
        "subject": subject.name,
        "sides": {name: asdict(found) for name, found in figures.items()},
        "ratios": ratios(figures, subject.name),
        "notes": notes,
    }


def _reducer(reducer: Reducer) -> str:
    return f"{reducer.name} {reducer.keep_ratio:.6g}" if reducer.acts else "every token"


_MIB = 2**20


def row_lines(row: Mapping[str, Any]) -> list[str]:
    """Write the table of one length and batch size."""
    ours = row["subject"]
    title = f"{row['prompt']['words']}, batch {row['batch_size']}, {row['new_tokens']} forced tokens"
    table = [["side", "entries", "cache MiB", "index", "slack", "peak MiB"]]
    table[0] += ["prefill ms", f"{ours}/it", "step ms", f"{ours}/it"]
    for name, side in row["sides"].items():
        held, room = side["prompt_bytes"], side["final_bytes"]["slack"]
        cells = [name, f"{side['entries']:,}", f"{(held['total'] - held['slack']) / _MIB:.3f}"]
        cells += [f"{held['index'] / max(1, held['payload']):.2%}", f"{room / _MIB:.3f}"]
        cells.append(f"{side['peak_bytes'] / _MIB:.1f}")
        for part in ("prefill", "step"):
            found = row["ratios"][part].get(name)
            cells += [
                f"{1000 * median(side[f'{part}_seconds']):.2f}",
                "" if found is None else cell(found) if row["pairs"] > 1 else f"{found[0]:.2f}",
            ]
        table.append(cells)
    rounds = f"{row['pairs']} rounds" if row["pairs"] > 1 else "1 round: no intervals"
    lines = [f"{title}, {rounds}", *aligned_columns(table)]
    lines += [f"{name}: {side['words']}; kernel: {side['kernel']}" for name, side in row["sides"].items()]
    return lines + [f"note: {note}" for note in row["notes"]]


def aligned_columns(table: Sequence[Sequence[str]]) -> list[str]:
    """Write columns of equal width: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table]
