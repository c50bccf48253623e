"""Hostile inputs of every class: no traceback, no hang, nothing run, nothing lost, nothing accepted that is wrong."""

from __future__ import annotations

from tests.hostile.campaign import CLASSES, bad, plan, run_cases
from tests.support.sampling import sampled

SEED, PARTS, EACH = 1, 13, 16


@sampled("part", range(PARTS), every=8)
def test_hostile_inputs_are_answered_in_words(pool, tmp_path, part):
    cases = plan(SEED, PARTS * EACH)[part::PARTS]
    outcomes = list(run_cases(cases, tmp_path, pool))
    assert len(outcomes) == EACH
    assert bad(outcomes) == []


def test_every_class_has_its_turn():
    names = [name for name, _ in plan(SEED, PARTS * EACH)]
    assert set(names) == set(CLASSES)
    assert min(map(names.count, CLASSES)) >= 4
