"""700 tokens of real text on SmolLM2: what follows is read from the packed cache as in a recompute, for every eviction.

The recompute is transformers' eager attention under the same masks, without a cache. Methods that need an image are
left out; those that can be calibrated run with a calibration and without, KVzap with one alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from subtoken_train.artifact.folder import identify
from subtoken_train.engine.attention import reading_packed
from subtoken_train.evictions import EVICTIONS, WRAPPERS, build_eviction, notation_names
from subtoken_train.evictions.duo_attention import HeadAlphas
from subtoken_train.evictions.h2o import LayerShares
from subtoken_train.evictions.queries import HeadDirections
from subtoken_train.families.backbone_config import BackboneConfig
from subtoken_train.inference.compression import Compression
from subtoken_train.inference.text_prompts import EncodedText, text_batch
from tests.support.kvzap_files import NEEDED, drawn_heads, drawn_nets, written
from tests.support.places import ROOT
from tests.support.sampling import quick
from tests.support.truth_cells import from_truth

TOKENS, CONTEXT, STEPS, KEEP = 700, 650, 5, 0.25
LAYERS, HEADS, WIDTH, MODEL = 30, 3, 64, 576
METHODS = [name for name in EVICTIONS if not EVICTIONS.find(name).needs_image]
SETTINGS: dict[str, dict[str, Any]] = {
    "duo_attention": {"sinks": 16, "recent": 32},
    "simlayerkv": {"recent": 64},
    "per_layer(pyramidkv)": {"shares": tuple(range(LAYERS, 0, -1))},
    "chunk(snapkv)": {},
    "critical(expected_attention)": {},
    "pooled(keydiff)": {},
    "ada(compactor)": {},
}
"""Settings that differ from a method's own, so that it has a choice in 650 entries; and the wrappers."""
QUICK = ("kvzip", "snapkv", "ada(compactor)")


@dataclass(frozen=True)
class Case:
    """An eviction, and whether it reads a calibration."""

    notation: str
    calibrated: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.notation + " calibrated" * self.calibrated


def numbers_of(method: str):
    draw = torch.rand(LAYERS, HEADS, WIDTH, generator=torch.Generator().manual_seed(0)) * 2 - 1
    if method == "duo_attention":
        return HeadAlphas(draw[..., 0].abs().tolist(), sinks=16, recent=32)
    if method == "prefixkv":
        return LayerShares([KEEP], [draw[:, 0, 0].abs().tolist()])
    if method == "kvzap":
        return drawn_nets(LAYERS, HEADS, MODEL)
    return drawn_heads(LAYERS, HEADS) if method in ("headkv", "sparsemm") else HeadDirections(draw.tolist())


PLAIN = [name for name in dict.fromkeys([*METHODS, *SETTINGS]) if name not in NEEDED]
EVERY = [Case(name, settings=SETTINGS.get(name, {})) for name in PLAIN]
EVERY += [Case(name, calibrated=True) for name in METHODS if hasattr(build_eviction(name), "calibration")]
CASES = {str(case): case for case in EVERY}


def test_every_text_eviction_and_every_wrapper_has_a_case():
    names = {name for case in CASES.values() for name in notation_names(case.notation)}
    assert names == {*METHODS, *WRAPPERS}
    assert sum(case.calibrated for case in CASES.values()) == 6


@pytest.fixture(scope="module")
def prompt(smollm2):
    ids = smollm2.tokenizer((ROOT / "data/samples/reference.txt").read_text(encoding="utf-8"))["input_ids"]
    return text_batch(smollm2.backbone.family, [EncodedText(tuple(ids[:TOKENS]), CONTEXT)])


@pytest.mark.parametrize("name", quick(CASES, QUICK))
def test_what_follows_real_text_is_the_truth(smollm2, prompt, name, tmp_path):
    case, family = CASES[name], smollm2.backbone.family
    settings = dict(case.settings)
    if case.calibrated:
        file, identity = tmp_path / "numbers.json", identify(family, BackboneConfig(path="its own"))
        settings["calibration"] = written(file, case.notation, numbers_of(case.notation), identity)
    assert prompt.input_ids_BN.shape == (1, TOKENS)
    with reading_packed(family.decoder.config):
        compression = Compression(build_eviction(case.notation, **settings), KEEP)
        compression.check(family)
        found = from_truth(smollm2.backbone, prompt, STEPS, compression)
    print(f"{name}: {found.largest:.1e}")  # shown by pytest -rP
    assert found.fits("fp32"), found
