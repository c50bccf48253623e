"""SparseMM: what the release keeps, with a set for every key-value head, and files that are another method's."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from subtoken_train.evictions import build_eviction
from subtoken_train.evictions.base import keep_best_entries
from subtoken_train.evictions.headkv import HeadScores
from subtoken_train.types import Region
from subtoken_train.view.scores import Candidates
from subtoken_train.view.view import View
from tests.support.golden_cases import record
from tests.support.kvzap_files import written

ORIGINALS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "eviction_originals.safetensors"


def test_sets_are_the_release_s_but_for_how_heads_are_rounded(tmp_path):
    """With its counts the sets are its own; our counts are within one of them."""
    own = {key[9:]: each for key, each in load_file(ORIGINALS).items() if key.startswith("sparsemm.")}
    layers, heads = own["kept"].shape[:2]
    score_Lh = own["score"].view(layers, heads, -1).sum(-1)  # its file has one for each query head
    path = written(tmp_path / "heads.json", "sparsemm", HeadScores(score_Lh.tolist()))
    method = build_eviction("sparsemm", window=6, calibration=path)
    regions = torch.full((1, own["key"].shape[2]), int(Region.VISUAL))
    states = enumerate(zip(own["query"][:, None], own["key"][:, None], strict=True))
    views = [View(i, q, k, k, regions, own["key"].shape[-1] ** -0.5, method.needs) for i, (q, k) in states]
    scores, its = [method.score(view) for view in views], own["kept"].sum(-1)[:, None]
    ours = method.counts(scores, Candidates([regions] * layers, [regions > 0] * layers, torch.full((layers, 1), 16)))
    assert int(ours.sum()) == 16 * layers * heads
    assert int((ours - its).abs().max()) <= 1
    kept = [keep_best_entries(x.scores_BhN, regions > 0, x.protected_BN, n) for x, n in zip(scores, its, strict=True)]
    differing = int((torch.cat(kept) != own["kept"]).sum())
    record("sparsemm", "eviction_originals: places that differ", differing)
    assert differing == 0


def test_the_file_must_be_its_own(tmp_path):
    path = written(tmp_path / "heads.json", "headkv", HeadScores([[1.0]]))
    with pytest.raises(ValueError, match="is a calibration of 'headkv', not of sparsemm"):
        build_eviction("sparsemm", calibration=path)
    with pytest.raises(ValueError, match="'subtoken-train calibrate sparsemm' writes one"):
        build_eviction("sparsemm").check_shape(2, 2, 8)
