"""Interleaved rounds: order, what the clock sees, ratios of one round's seconds; memory of a side alone."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch

from subtoken_train.benchmarking.rounds import hold, measure, ratios
from subtoken_train.benchmarking.sides import HeldBytes, PackedSide, Side
from subtoken_train.benchmarking.synthetic_prompts import PromptParts, draw_prompts
from subtoken_train.inference.compression import Compression
from subtoken_train.reducers import build_reducer
from tests.support.text_families import text_family


class Pretended(Side):
    """Its prompt takes ``prompt`` seconds and its step ``step``; everything it does is noted."""

    def __init__(self, name, family, prompts, watch, prompt, step):
        super().__init__(name, f"pretended {name}", family, prompts)
        self.watch, self.costs, self.fed = watch, (prompt, step), []

    @contextmanager
    def turn(self):
        self.watch["now"] += 100.0  # outside of what is timed
        self.watch["turns"].append(self.name)
        yield
        self.watch["now"] += 100.0

    def prefill(self):
        self.watch["now"] += self.costs[0]
        return torch.tensor([[0.0, 1.0, 0.0]])

    def step(self, token_ids_B1):
        self.fed.append(int(token_ids_B1))
        self.watch["now"] += self.costs[1]
        return torch.tensor([[0.0, 0.0, 1.0]])

    def held(self):
        return HeldBytes(10, 1, len(self.fed))

    def entries(self):
        return 7


@pytest.fixture
def prompts():
    family = text_family("llama")
    return family, draw_prompts(family, PromptParts(0, 0, 0, 4, 8), 1)


def test_rounds_alternate_and_only_the_side_is_timed(prompts):
    watch = {"now": 0.0, "turns": []}
    sides = [Pretended("a", *prompts, watch, 2.0, 0.25), Pretended("b", *prompts, watch, 1.0, 0.5)]
    figures = measure(sides, new_tokens=4, pairs=2, warmup=1, clock=lambda: watch["now"])
    assert watch["turns"] == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert figures["a"].prefill_seconds == [2.0, 2.0]
    assert figures["b"].step_seconds == [0.5, 0.5]
    assert ratios(figures, "a") == {"prefill": {"b": (2.0, 2.0, 2.0)}, "step": {"b": (0.5, 0.5, 0.5)}}
    assert sides[0].fed[:5] == [1, 2, 2, 2, 1]  # forced: the likeliest token, as many as asked for
    record = figures["b"].record()
    others = {"tail": 0, "slack": 0, "statistics": 0, "kernel": 0}
    assert record["prompt_bytes"] == {"payload": 10, "index": 1, **others, "total": 11}
    assert record["final_bytes"]["tail"] == 4
    assert record["entries"] == 7


@pytest.mark.parametrize(("runs", "finished"), [(9, 2), (8, 2), (7, 1), (5, None)])
def test_ctrl_c_keeps_the_rounds_that_all_sides_finished(prompts, runs, finished):
    """Of two sides: two runs for memory, two of the round that does not count, then two each round."""
    watch, ran = {"now": 0.0, "turns": []}, []

    def run():
        ran.append(None)
        if len(ran) == runs:
            raise KeyboardInterrupt

    sides = [Pretended("a", *prompts, watch, 2.0, 0.25), Pretended("b", *prompts, watch, 1.0, 0.5)]
    with nullcontext() if finished else pytest.raises(KeyboardInterrupt):
        figures = measure(sides, 1, pairs=3, clock=lambda: watch["now"], ran=run)
        assert {len(found.prefill_seconds) for found in figures.values()} == {finished}
        assert {len(found.step_seconds) for found in figures.values()} == {finished}


def test_a_cpus_peak_holds_weights_prompts_and_cache_and_grows_with_the_prompt(prompts):
    family, short = prompts
    weights = sum(tensor.untyped_storage().nbytes() for tensor in family.model.parameters())
    peaks = []
    for batch in (short, draw_prompts(family, PromptParts(0, 0, 0, 4, 80), 1)):
        side = PackedSide("packed", "", family, batch, build_reducer("none"), None, Compression())
        found = hold(side, 2)
        assert found.peak_bytes >= weights + found.final_bytes.total
        assert found.final_bytes.tail == 2 * family.shape.token_bytes
        peaks.append(found.peak_bytes - found.final_bytes.total)
    assert peaks[1] > peaks[0]
