"""LOOK-M: text first whatever the scores, the release's sets and merged entries, prompts without an image."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from subtoken_train.evictions import build_eviction
from subtoken_train.functional.merging import merged
from subtoken_train.types import Region
from tests.support.golden_cases import close, keep_of, same_places
from tests.support.prompt_views import PROMPTS, DenseView, dense_attention, layer_views, plan

ORIGINALS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "eviction_originals.safetensors"
S, V, Q = int(Region.SYSTEM), int(Region.VISUAL), int(Region.QUERY)


@pytest.fixture(scope="module")
def original():
    return {key.removeprefix("lookm."): value for key, value in load_file(ORIGINALS).items() if "lookm." in key}


def test_sets_and_merged_entries_are_the_release_s(original):
    """One row pays all the attention, so that column sums go as the record's; its last 12 entries are recent."""
    sums = original["sums"]
    rows = sums.shape[1]
    regions = torch.full((1, rows), Q)
    start = int(original["image_start"])
    regions[:, start : start + 576] = V
    method = build_eviction("look_m", window=12)
    attention = torch.zeros(1, len(sums), rows, rows)
    attention[0, :, -1] = sums / sums.sum(-1, keepdim=True)
    view = DenseView(attention, regions, method.needs)
    view.key_BhNd = view.value_BhNd = original["key"].float()[None]
    golden = original["kept"][None]
    kept = keep_of(method, [view], int(golden[0, 0].sum()))[0]
    same_places(method, "eviction_originals", kept, golden.nonzero()[:, 2].view(1, len(sums), -1))
    key = original["key"].float()[None]
    for word, ours in zip(("key", "value"), merged("pivot", key, key.flip(-1), kept, view.entries_BN), strict=True):
        close(method, f"eviction_originals: {word}s joined", ours[kept], original[f"{word}_out"].flatten(0, 1))
    in_half = torch.tensor(-65516.0).half() + sums.half()
    assert in_half.unique().diff().tolist() == [32, 32], "the release tells visual entries apart in half precision"


@pytest.mark.parametrize("pad", ["left", "right"])
def test_equal_to_the_plain_reference(pad):
    """Column sums, mean over a group's query heads; text's plus twice the largest visual one; bf16 is read as it is."""
    method = build_eviction("look_m")
    for dtype in (torch.float32, torch.bfloat16):
        view = layer_views(list(PROMPTS.values()), method.needs, pad, layers=1, dtype=dtype, dropped=[(0, 0.2)])[0]
        found = method.score(view)
        for sample in range(len(PROMPTS)):
            entries, codes = view.entries_BN[sample], view.regions_BN[sample]
            matrix = dense_attention(view.query_BHNd[sample], view.key_BhNd[sample], entries, view.scale)
            sums = matrix[:, entries].sum(1).view(2, 2, -1).mean(1)
            for head in range(2):
                most = max((float(sums[head, i]) for i in range(len(codes)) if codes[i] == V), default=0.0)
                expected = [float(sums[head, i]) + (2 * most if codes[i] != V else 0) for i in range(len(codes))]
                torch.testing.assert_close(found.scores_BhN[sample, head][entries], torch.tensor(expected)[entries])


@pytest.mark.parametrize("keep", [0.2, 0.4, 0.7])
def test_no_visual_entry_stays_before_all_text_does(keep):
    """Of what is not recent; where text alone is more than the budget no visual entry stays."""
    method = build_eviction("look_m", recent_share=0.1)
    codes = [S] * 6 + [V] * 20 + [Q] * 9
    views = layer_views([codes], method.needs)
    for kept in plan(method, views, keep)[2]:
        for head in kept[0]:
            visual = head[torch.tensor(codes) == V].sum()
            assert head.sum() == int(35 * keep)
            assert visual == max(0, int(35 * keep) - 15)


def test_prompts_without_an_image_are_h2o_s():
    views = layer_views([PROMPTS["context"], PROMPTS["no image"]], frozenset({"blocks"}), "left")
    for view in views:
        ours, plain = (build_eviction(name).score(view) for name in ("look_m", "h2o"))
        assert torch.equal(ours.scores_BhN, plain.scores_BhN)
    assert build_eviction("look_m").merges == "pivot"
