"""GLM-4.1V and GLM-4.5V: times of videos, sizes of pictures, experts between packed layers."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.sampling import sampled
from tests.support.tiny.glm4v import glm_family
from tests.support.tiny.qwen import made_as_counted, qwen_video
from tests.support.truth_cells import CELL, difference

FAMILY = glm_family()


def test_times_are_whole_seconds_behind_their_layers():
    text = FAMILY.picture_text(qwen_video(5, fps=1.25), "<|image|>").replace("<|image|>", "")
    run = "<|begin_of_image|><|end_of_image|>"
    assert text == f"<|begin_of_video|>{run}0{run}1{run}3<|end_of_video|>"


@given(height=st.integers(1, 400), width=st.integers(1, 400), cap=st.sampled_from([3136, 20_000, 112_896, 1_003_520]))
@example(height=1, width=2, cap=3136)
def test_counted_tokens_are_what_the_processor_makes(height, width, cap):
    _, grid = made_as_counted(FAMILY, height, width, cap)
    most = max(cap, 28 * max(height, width) * 28 / min(height, width))
    if round(height / 28) * round(width / 28) * 28**2 < FAMILY.min_pixels:  # scaled up, perhaps past the cap
        most = max(most, 4 * FAMILY.min_pixels)
    assert grid.prod() * 14**2 <= most


ROUTED = {**CELL, "scope": "context", "batch": "three_left", "protocol": "query_aware"}
CELLS = {
    "cut": {"reducer": "fastv_decoder", "eviction": "snapkv"},
    "shortened": {"reducer": "fastv_embeds", "eviction": "none", "batch": "last_right"},
    "merged": {"reducer": "visionzip", "eviction": "own_sets", "batch": "text_right"},
    "dropped": {"reducer": "sparsevlm", "selector": "none", "eviction": "kvzip"},
}


@sampled("cell", CELLS, every=3)
@pytest.mark.parametrize("family", ["qwen3_vl_moe", "glm4v_moe"])
def test_experts_between_packed_layers_are_those_of_a_full_recompute(family, cell):
    """In fp32: rounded states can choose other experts."""
    found = difference(ROUTED | CELLS[cell] | {"family": family}, 8)
    assert found.fits("fp32"), found
