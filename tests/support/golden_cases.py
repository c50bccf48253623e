"""Load goldens of one layer, compare, note the difference. B batch, h heads with own sets, N entries, K kept ones."""

import csv
import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file

from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates
from subtoken_train.view.view import View


def record(method: str, case: str, difference: float) -> None:
    """Append a row ``method,case,max_difference`` to the file that SUBTOKEN_GOLDEN_TABLE names, if it names one."""
    if table := os.environ.get("SUBTOKEN_GOLDEN_TABLE"):
        with Path(table).open("a", newline="") as file:
            csv.writer(file, lineterminator="\n").writerow([method, case, f"{difference:g}"])


def near(method, case, ours, golden, rtol=1e-4, atol=1e-6):
    """The numbers are the original's within the golden's tolerance; the largest difference is noted."""
    assert ours.shape == golden.shape
    record(method, case, float((ours - golden).abs().max()))
    assert torch.allclose(ours, golden, rtol=rtol, atol=atol)


def alike(method, case, ours, golden):
    """The same marks or places, one by one; how many differ is noted."""
    assert ours.shape == golden.shape
    differing = int((ours != golden).sum())
    record(method, f"{case}: places that differ", differing)
    assert differing == 0


def load(shared, name, part="set_a"):
    """Numbers and tensors of a recording."""
    file = shared / "golden" / name / part
    return json.loads(file.with_suffix(".json").read_text())["params"], load_file(file.with_suffix(".safetensors"))


def golden_view(method, tensors, keys="keys", layer=0, values=None, **surroundings):
    """The recorded layer; methods that read no query or value do without one."""
    key = tensors[keys]
    query = tensors.get("queries", tensors.get("query", key))
    value = key if values is None else tensors[values]
    regions = torch.full(key.shape[::2], int(Region.QUERY))
    return View(layer, query, key, value, regions, key.shape[-1] ** -0.5, method.needs, **surroundings)


ORIGINALS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "eviction_originals.safetensors"


def originals(method):
    """What a method's released code made of random layers, by name."""
    start = f"{method}."
    return {key.removeprefix(start): each for key, each in load_file(ORIGINALS).items() if key.startswith(start)}


def original_views(method, own, region):
    regions = torch.full((1, own["key"].shape[2]), int(region))
    states = enumerate(zip(own["query"][:, None], own["key"][:, None], strict=True))
    return [View(i, q, k, k, regions, k.shape[-1] ** -0.5, method.needs) for i, (q, k) in states]


def keep_of(method, views, count):
    """Kept entries of every layer where all entries compete, bool [B, h, N] each."""
    entries = [view.entries_BN for view in views]
    budget = torch.full((len(views), len(entries[0])), count)
    candidates = Candidates([view.regions_BN for view in views], entries, budget)
    return method.keep([method.score(view) for view in views], candidates)


def same_places(method, case, kept_BhN, places_BhK):
    """The kept sets are the original's (one set for all heads is compared with each of its heads)."""
    assert kept_BhN.dim() == places_BhK.dim() == 3, "every batch element and head: [B, h, N] and [B, h, K]"
    expected = torch.zeros(*places_BhK.shape[:2], kept_BhN.shape[-1], dtype=torch.bool).scatter(2, places_BhK, True)
    assert (expected.sum(-1) == places_BhK.shape[-1]).all()
    assert len(kept_BhN) == len(expected)
    assert kept_BhN.shape[1] in {1, expected.shape[1]}
    differing = int((kept_BhN != expected).sum())
    record(method.name, f"{case}: places that differ", differing)
    assert differing == 0


def same_sets(method, case, view, places_BhK):
    same_places(method, case, keep_of(method, [view], places_BhK.shape[-1])[0], places_BhK)


def close(method, case, ours, golden, rtol=1e-4, atol=1e-6):
    near(method.name, case, ours, golden, rtol, atol)
