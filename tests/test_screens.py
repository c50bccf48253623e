"""The committed screens: records keep their budgets and answer the same questions, and the page shows them."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from benchmarks import bits_pareto
from benchmarks.mini_suite import read_scores
from benchmarks.peer_accuracy import OUT, PAGE, SHARES
from benchmarks.peer_methods import PEERS, peer_settings
from benchmarks.peer_tables import ARM, peer_markdown, read_task
from subtoken_train.evaluation.reporting.exports import frame_csv
from subtoken_train.evaluation.runner.arms import arm_name
from subtoken_train.evaluation.runner.spec import read_grid
from tests.support.places import RECIPES, shown

REFUSED = {"scenes": {"quest_steps"}, "recall": {"quest_steps", "aircache", "tgv_kv"}}
"""Methods that fit a task at no sight."""


ASK = {"snapkv", "ada-snapkv", "kvcompose"}
"""Methods whose choice the question changes, asked with it too, at the larger share."""


@pytest.mark.parametrize("task", SHARES)
def test_peers_kept_their_budget_and_were_asked_the_same(task):
    found = read_task(OUT / task)
    peers = {name: cells for name, cells in found.items() if not name.startswith(ARM)}
    assert set(peers) == set(PEERS)
    for name, cells in peers.items():
        assert all(cell["settings"] == peer_settings(task, name) for cell in cells)
        there = {(cell["share"], cell["awareness"]) for cell in cells}
        assert len(there) == len(cells)
        assert there >= {(share, "blind") for share in SHARES[task]}
        assert all(cell["measured"] <= cell["share"] + 1e-6 for cell in cells if "refused" not in cell)
    first = {
        name for name in peers if any((c["share"], c["awareness"]) == (SHARES[task][0], "reread") for c in peers[name])
    }
    assert first >= ASK
    assert {name for name, cells in peers.items() if all("refused" in cell for cell in cells)} == REFUSED[task]
    scored = [cell for cells in found.values() for cell in cells if "refused" not in cell]
    assert len({tuple((kind, len(cell["scores"][kind])) for kind in sorted(cell["scores"])) for cell in scored}) == 1


def test_the_page_shows_the_peers():
    assert shown(PAGE, "peers") == peer_markdown(OUT)


def test_the_bits_are_those_of_the_grids():
    grids = [read_grid(RECIPES / "eval" / f"{name}.yaml") for name in ("bits_scenes", "bits_recall")]
    names = {arm_name(spec).replace("-seed0", "", 1) for grid in grids for spec in grid.arms}
    frame = read_scores(bits_pareto.CSV_FILE)
    assert set(frame.arm) == names
    assert frame_csv(frame) == bits_pareto.CSV_FILE.read_text(encoding="utf-8")


def test_fewer_bits_take_fewer_bytes_and_a_part_of_a_value_the_scale_of_all():
    choices = bits_pareto.read_choices()
    found = {(one.task, one.adapter, one.keep, one.bits): one.kv for one in choices}
    for (task, adapter, keep, bits), kv in found.items():
        if bits == "16 bits":
            whole = "lora_only" in adapter or adapter.endswith("_anchor")
            rounded = found[task, adapter, keep, "8 bits"] / kv, found[task, adapter, keep, "4 bits"] / kv
            assert rounded == pytest.approx((17 / 32, 9 / 32), abs=5e-3) if whole else rounded > (17 / 32, 9 / 32)


def test_the_front_is_what_nothing_cheaper_beats():
    choices = [one for one in bits_pareto.read_choices() if one.task == "recall"]
    held = bits_pareto.front(choices)
    pairs = [(one.kv, one.value) for one in held]
    assert pairs == sorted(set(pairs))
    assert [value for _, value in pairs] == sorted({value for _, value in pairs})
    assert all(any(kv <= one.kv and value >= one.value for kv, value in pairs) for one in choices)


@pytest.mark.slow
def test_the_page_shows_the_bits_and_the_picture_is_drawn_from_the_csv():
    assert shown(bits_pareto.PAGE, "bits") == bits_pareto.table()
    text = bits_pareto.SVG_FILE.read_text(encoding="utf-8")
    assert text == bits_pareto.drawing()
    words = " ".join(ElementTree.fromstring(text).itertext())
    assert all(one.adapter in words for one in bits_pareto.read_choices())
    assert set(re.findall(r'href="(.)', text)) == {"#"}
