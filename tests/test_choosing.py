"""A setting is recommended only where it beats every fair twin; else the words say token-only."""

import numpy as np
import pytest

from benchmarks.choosing import Regime, choice_words, choose, paired_gain
from benchmarks.choosing_page import PAGE, table
from benchmarks.comparison_tables import Arm, read_records
from tests.support.places import ROOT, shown

WORDS = {"router": "the router", "gated": "the gated router", "value": "value norm"}
REGIME = Regime("any", ("router", "gated"), {"router": "anchor", "gated": "anchor"}, {"router": "value"}, "whole")


def arm(name, share, seeds=(0, 1, 2), questions=2000):
    """Right on the first ``share`` of the questions in every seed, so that pairs differ by no chance."""
    right = np.tile((np.arange(questions) < share * questions).astype(float), (len(seeds), 1))
    return Arm(name, tuple(seeds), right, np.array(["color"] * questions), "16/64", 0.15625, 0.15625)


def made(**shares):
    return {name: arm(name, share) for name, share in shares.items()}


def test_a_winner_beats_its_anchor_and_its_router_free_twin():
    choice = choose(made(router=0.7, anchor=0.5, value=0.6, whole=0.75), REGIME, "questions")
    assert (choice.arm, choice.nearest) == ("router", "router")
    assert choice.to_anchor.points == pytest.approx(20)
    assert choice.to_anchor.low > 0
    assert choice.to_unrouted.points == pytest.approx(-5)  # shown, and no hurdle
    cells = choice_words(choice, WORDS).split(" | ")
    assert cells[0] == "the router"
    assert cells[1].startswith("+20.0 [+")
    assert len(cells) == 4


@pytest.mark.parametrize(
    ("shares", "taken"),
    [
        ({"anchor": 0.7, "value": 0.5}, "token-only (nearest: the router) | "),
        (
            {"anchor": 0.5, "value": 0.7},
            "groups by value norm (nearest: the router, above token-only, not above value norm) | ",
        ),
    ],
)
def test_level_with_one_twin_is_said_in_words(shares, taken):
    choice = choose(made(router=0.7, **shares), REGIME, "questions")
    assert (choice.arm, choice.nearest) == (None, "router")
    words = choice_words(choice, WORDS)
    assert words.startswith(taken)
    assert words.endswith(" | -")


def test_a_weaker_winner_goes_before_a_better_arm_that_does_not_win():
    """The gated one needs no router-free twin here; the router, ahead of it, loses to its own."""
    arms = made(router=0.8, gated=0.7, anchor=0.5, value=0.9)
    assert choose(arms, REGIME, "questions").arm == "gated"


def test_without_records_nothing_is_said():
    assert choice_words(choose(made(router=0.7, anchor=0.5), REGIME, "questions"), WORDS).startswith("no records yet")
    assert choose(made(anchor=0.5, value=0.5), REGIME, "questions").nearest is None
    assert paired_gain(arm("a", 0.5, (0,)), arm("b", 0.5, (1,)), "questions") is None


def test_pairs_are_of_the_seeds_that_both_have():
    first, second = arm("a", 0.5, (0, 1, 2)), arm("b", 0.25, (2, 1))
    gain = paired_gain(first, second, "questions")
    assert gain.seeds == 2
    assert gain.points == pytest.approx(25)


def test_the_embedded_records_as_published():
    """The exploratory verdict: the plain router on questions; on descriptions nothing."""
    arms = read_records(ROOT / "benchmarks" / "results")
    router = "tiny_fastv25_s16k4"
    regime = Regime(
        "imprecise ranking", (router,), {router: f"{router}_anchor"}, {router: f"{router}_valuenorm"}, "tiny_fastv25"
    )
    questions, descriptions = (choose(arms, regime, group) for group in ("questions", "descriptions"))
    assert questions.arm == router
    assert questions.to_anchor.words == "+5.9 [+3.7, +8.3]"
    assert questions.to_router_free.words == "+7.5 [+4.2, +10.9]"
    assert descriptions.arm is None
    assert descriptions.to_anchor.words == "-4.6 [-6.8, -2.5]"


def test_the_page_is_what_the_records_say():
    printed = shown(PAGE, "matched")
    assert {len(line.split(" | ")) for line in printed.splitlines() if line.startswith("| ")} == {7}
    assert printed == table()
