"""Golden cases of methods that look at one layer: load, run, compare sets and scores, and note the difference."""

import json

import torch
from safetensors.torch import load_file

from subtoken_train.evictions.base import Candidates
from subtoken_train.evictions.layer_views import LayerView
from subtoken_train.types import Region
from tests.support.golden_record import record


def load(shared, name):
    """(parameters, tensors) of a golden folder."""
    folder = shared / "golden" / name
    return json.loads((folder / "set_a.json").read_text())["params"], load_file(folder / "set_a.safetensors")


def golden_view(method, tensors, keys="keys", layer=0, values=None, **surroundings):
    """The recorded layer; methods that read no query or value do without one."""
    key = tensors[keys]
    query = tensors.get("queries", tensors.get("query", key))
    value = key if values is None else tensors[values]
    regions = torch.full(key.shape[::2], int(Region.QUERY))
    return LayerView(layer, query, key, value, regions, key.shape[-1] ** -0.5, method.needs, **surroundings)


def keep_of(method, views, count):
    """Kept entries of every layer where all entries compete, bool [h, N] each."""
    entries = [view.entries_BN for view in views]
    budget = torch.full((len(views), 1), count)
    candidates = Candidates([view.regions_BN for view in views], entries, budget)
    return [kept[0] for kept in method.keep([method.score(view) for view in views], candidates)]


def same_places(method, case, kept_hN, places_hK):
    """The kept sets are the original's (one set for all heads is compared with each of its heads)."""
    expected = torch.zeros(len(places_hK), kept_hN.shape[-1], dtype=torch.bool).scatter(1, places_hK, True)
    differing = int((kept_hN != expected).sum())
    record(method.name, f"{case}: places that differ", differing)
    assert differing == 0
    assert expected.sum(-1).tolist() == [places_hK.shape[-1]] * len(places_hK)


def same_sets(method, case, view, places_BhK):
    """``same_places`` in every sample of a recorded batch; as many entries stay as the original kept."""
    everything = Candidates(
        [view.regions_BN], [view.entries_BN], torch.full((1, len(places_BhK)), places_BhK.shape[-1])
    )
    for kept_hN, places_hK in zip(method.keep([method.score(view)], everything)[0], places_BhK, strict=True):
        same_places(method, case, kept_hN, places_hK)


def close(method, case, ours, golden, rtol=1e-4, atol=1e-6):
    """The numbers are the original's within the golden's tolerance."""
    record(method.name, case, float((ours - golden).abs().max()))
    assert torch.allclose(ours, golden, rtol=rtol, atol=atol)
