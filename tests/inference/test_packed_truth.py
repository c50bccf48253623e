"""Decoding from the packed cache is a full recompute in eager attention with the same masks, for every combination."""

import os
from collections import defaultdict
from itertools import product
from pathlib import Path

import pytest
import torch

from subtoken_train.evictions import EVICTIONS
from subtoken_train.inference.prefill import decode
from tests.support import plain_parts
from tests.support import truth_cells as bounds
from tests.support.generation_cells import CELL as TURNED
from tests.support.generation_cells import PLAIN, inputs_of, model_of, settings_of
from tests.support.packing import short_runs  # noqa: F401  (a fixture)
from tests.support.reference import recompute
from tests.support.sampling import Cell, allowed_pairs, pairs_of, pairwise, sampled
from tests.support.truth_cells import CELL, FACTORS, allowed, backbone_of, batch_of, compression_of, decoded, difference
from tests.support.truth_models import TEXT

PAIRWISE = pairwise(FACTORS, allowed)
EXACT = [{**cell, "precision": "fp32"} for cell in PAIRWISE if cell["precision"] != "fp32"]
BASE = {**CELL, "scope": "context", "batch": "three_left", "protocol": "query_aware"}

ENDS = [
    BASE
    | {"family": family, "reducer": reducer, "selector": selector, "eviction": eviction, "scope": scope}
    | {"batch": f"{batch}_{side}", "protocol": "query_aware" if batch == "last" else "context_first"}
    for family, reducer, batch, side in product(
        ("llava", "llava_gqa", "qwen2_5_vl"),
        ("fastv_embeds", "fastv_decoder", "visionzip"),
        ("last", "three", "text"),
        ("left", "right"),
    )
    for selector, eviction, scope in [(("linear", "snapkv", "context"), ("gated", "own_sets", "all"))[side == "left"]]
]
"""Prompts that end with their image, and contexts before their question, under every reducer of visual tokens."""


def name_of(cell: Cell) -> str:
    return "-".join(cell.values()).replace("/", "k")


@pytest.mark.slow
def test_cells_cover_all_allowed_pairs():
    covered = {pair for cell in PAIRWISE for pair in pairs_of(cell)}
    assert covered == allowed_pairs(FACTORS, allowed)
    assert {level for pair in covered for level in pair} == {(n, level) for n in FACTORS for level in FACTORS[n]}


@sampled("cell", PAIRWISE + EXACT, every=16, ids=name_of)
def test_packed_is_truth(cell):
    found = difference(cell, 32)
    assert found.fits(cell["precision"]), found


@sampled("cell", ENDS, every=3, ids=name_of)
def test_what_follows_a_dropped_last_token_stands_where_it_did(cell):
    found = difference(cell, 4)
    assert found.fits("fp32"), found


def corrupted(change, **levels: str) -> float:
    """Largest difference from the truth after ``change`` was done to a good prompt cache."""
    cell = BASE | levels
    backbone = backbone_of(cell)
    got = decoded(backbone, batch_of(cell), 2, compression_of(cell))
    got.cache.crop(-1)
    change(got.cache)
    logits = decode(backbone, got.tokens_BT[:, :1], got.cache)
    expected = [recompute(backbone, t, ids[:1])[-1] for t, ids in zip(got.truths, got.tokens_BT, strict=True)]
    return float((logits - torch.stack(expected)).abs().max())


def swap_pieces(cache):
    pieces = cache.layers[0].blocks[0].parts[0].values.pieces.data
    pieces[:2] = pieces[:2].flip(0)


def swap_heads(cache):
    keys = cache.layers[1].blocks[0].parts[-1].keys.data
    keys[:, :2] = keys[:, :2].flip(1)


@pytest.mark.parametrize("change", [swap_pieces, swap_heads, lambda cache: cache.next_position.add_(1)])
def test_the_comparison_notices_small_faults(change):
    assert corrupted(lambda cache: None) < 1e-4
    assert corrupted(change) > 1e-3


def flip_last_bits(cache):
    keys = cache.layers[1].blocks[0].parts[0].keys
    keys.data.view(torch.uint8)[0, :, 0] ^= 3 if keys.format.name == "int8_channel" else 1  # one is 1e-4 of a logit


@pytest.mark.parametrize("precision", bounds.ROUNDING)
def test_the_comparison_notices_the_last_bits_of_one_key(precision):
    levels = {"family": "mistral", "reducer": "none", "selector": "none", "precision": precision, "batch": "one"}
    assert corrupted(lambda cache: None, **levels) < 1e-4
    assert not corrupted(flip_last_bits, **levels) <= 1e-4  # the largest float of a byte becomes NaN


@sampled("eviction", ["none", "shared_set", "own_sets"], every=3)
@sampled("family", ["llava", "llava_gqa", "qwen2_5_vl", "llama", "llava_window", "qwen2_window"], every=3)
def test_tokens_appended_together_are_causal(family, eviction):
    """Chunks of tokens, as in a further turn, give the logits of one token after another."""
    cell = BASE | {"family": family, "eviction": eviction}
    if family in TEXT:
        cell["reducer"] = "quest"
    backbone = backbone_of(cell)
    got = decoded(backbone, batch_of(cell), 1, compression_of(cell))
    appended = torch.randint(10, 60, (3, 9), generator=torch.Generator().manual_seed(3))
    for stop, start in ((1, 0), (6, 1), (9, 6)):
        logits = decode(backbone, appended[:, start:stop], got.cache)
        for sample, truth in enumerate(got.truths):
            assert (logits[sample] - recompute(backbone, truth, appended[sample, :stop])[-1]).abs().max() < 1e-4


@pytest.mark.slow
def test_full_matrix():
    """All choices of what the model computes; ``PACKED_MATRIX=file`` writes a summary."""
    cells = bounds.full_matrix()
    assert len(cells) >= 3000
    assert len({name_of(cell) for cell in cells}) == len(cells)
    found = [(cell, difference(cell, 4)) for cell in cells]
    if os.environ.get("PACKED_MATRIX"):
        Path(os.environ["PACKED_MATRIX"]).write_text("\n".join([*HEAD, *summary(found)]) + "\n")
    assert [name_of(cell) for cell, x in found if not x.fits(cell["precision"])] == []


HEAD = [
    "# Packed cache against full recompute",
    "",
    "Cells of 4 greedy tokens: logits from the packed cache against transformers' eager attention",
    "without a cache, with the same masks (`tests/inference/test_packed_truth.py`, `PACKED_MATRIX=file`).",
    f"**fp32**: the largest difference of a logit (bound {bounds.EXACT:g}; logits have a standard deviation of about",
    "1.6), and cells whose tokens differ. **bf16**: root mean square of the difference from a truth in fp32, over that",
    f"of eager attention in bf16: the largest (bound {bounds.TIMES:g}). **Formats that round**: the truth rounds",
    f"the prompt's entries too, by arithmetic written out beside it. Cells that are its to {bounds.EXACT:g} with all",
    f"tokens. Where a number lies within {plain_parts.EDGE:g} of the edge of two codes, as a share of its vector's",
    "largest, or a scale so near that of two of fp16, the last bits of fp32 decide: after `+` the cells that are exact",
    f"once the truth is told how such ties fell, at most how many of a sample (bound {bounds.TOLD:g}).",
    "",
]


def summary(found) -> list[str]:
    """Return the largest differences of every factor level as Markdown."""
    lines = [
        f"| factor | level | cells | fp32 | fp32 tokens differ | bf16 | {' | '.join(bounds.ROUNDING)} |",
        "|---|---|---|---|---|---|" + "---|" * len(bounds.ROUNDING),
    ]
    rows = defaultdict(lambda: defaultdict(list))
    for cell, x in found:
        for level in (("all", ""), *cell.items()):
            rows[level][cell["precision"]].append(x)
    for factor, level in [("all", ""), *((name, level) for name in FACTORS for level in FACTORS[name])]:
        of = rows[factor, level]
        cells = [f"{max(x.largest for x in of['fp32']):.1e}" if of["fp32"] else "-"]
        cells.append(str(sum(not x.same_tokens for x in of["fp32"])) if of["fp32"] else "-")
        cells.append(f"{max(x.times for x in of['bf16']):.2f}" if of["bf16"] else "-")
        for some in map(of.get, bounds.ROUNDING):
            told = [x.told for x in some or () if x.told]
            cells.append(f"{len(some) - len(told)}{f' + {len(told)} ({max(told)})' if told else ''}" if some else "-")
        lines.append(f"| {factor} | {level} | {sum(map(len, of.values()))} | " + " | ".join(cells) + " |")
    return lines


CELLS = {
    "equal rows": PLAIN | {"batch": "one"},
    "unequal rows": PLAIN,
    "routed": {"eviction": "none"},
    "routed, unequal heads": {},
    "whole heads": {"selector": "none"},
    "turned keys": {"keys": "turned"},
    "int8": {"precision": "int8"},
    "int8, equal rows": {"eviction": "none", "batch": "one", "precision": "int8"},
}
BOUND = 0.04
"""Of the root mean square of a difference over that of the logits: one side rounds to bfloat16, which was measured."""
BY_KEYS = ("average", "weighted", "pivot")


def assert_truth(cell):
    backbone = backbone_of(cell)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = decoded(backbone, batch_of(cell), 6, compression_of(cell))
    assert got.logits_BTV.dtype == torch.bfloat16  # autocast was there
    truth = torch.stack([recompute(backbone, t, ids[:-1]) for t, ids in zip(got.truths, got.tokens_BT, strict=True)])
    assert float((got.logits_BTV.float() - truth).norm() / truth.norm()) < BOUND


@sampled("name", CELLS, every=3)
@pytest.mark.parametrize("family", ["llava_gqa", "qwen2_5_vl", "llama"])
def test_decoding_under_autocast_is_truth(family, name):
    cell = TURNED | CELLS[name] | {"family": family}
    if family == "llama" and cell["reducer"] != "none":
        cell["reducer"] = "quest"
    assert_truth(cell)


@sampled("eviction", EVICTIONS, every=4)
def test_every_eviction_scores_under_autocast(eviction):
    own = {"selector": "none"} if EVICTIONS[eviction].reads else {}
    if EVICTIONS[eviction].merges in BY_KEYS:  # which key is nearest is found among rounded ones, and anew by the truth
        own["merge"] = "none"
    assert_truth(TURNED | {"eviction": eviction} | own)


@pytest.mark.parametrize("reducer", ["visionzip", "fastv_decoder"])
def test_reducers_run_under_autocast(reducer):
    assert_truth(TURNED | {"reducer": reducer})


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_turns_may_enter_and_leave_autocast(precision, first):
    model = model_of(precision=precision)
    inputs, settings = inputs_of(model), settings_of(model) | {"max_new_tokens": 3}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=first):
        out = model.generate(**inputs, **settings, do_sample=False)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 3), value=1)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not first):
        more = model.generate(out, attention_mask=mask, past_key_values=model.last.cache, **settings)
    assert more.shape[1] == out.shape[1] + 3
