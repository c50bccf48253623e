"""What packing reads from a device: the numbers of all layers at once, and nothing else."""

import pytest
import torch

from subtoken_train.cache.pack import Packing, pack_layer, read_counts
from subtoken_train.engine.prompt_pass import layer_plan
from subtoken_train.kernels.storage import RoutedValues
from subtoken_train.types import CutKeys
from tests.support.host_reads import host_reads
from tests.support.packing import FORMAT_OF, SETS, dense
from tests.support.sampling import sampled

LAYOUTS = ("contiguous", "per_head")


def planned(sets, groups, layout, cut, seed=0):
    state = dense(seed, 3, 2, 21, 8, groups, 0.4, sets, layout)
    plan = layer_plan(state.keep, state.groups)
    if cut:
        channels = torch.arange(8).expand(3, 2, 8) % 2 == seed % 2
        plan.cut_keys = CutKeys((plan.entries_BN % 3 == 0) & (plan.entries_BN >= 0), channels)
    return state, plan


def tensors(blocks):
    for block in blocks:
        yield from (block.rows, block.channels)
        for part in block.parts:
            for payload in part.payloads:
                yield from (payload.data, payload.scale)
            if isinstance(part.values, RoutedValues):
                yield from (part.values.index, part.values.offsets, part.values.piece_bit)


@pytest.mark.parametrize("cut", [False, True])
@sampled("layout", LAYOUTS, every=3)
@pytest.mark.parametrize("groups", [None, 4])
@pytest.mark.parametrize("sets", SETS)
def test_counts_of_many_layers_are_read_once(sets, groups, layout, cut):
    layers = [planned(sets, groups, layout, cut, seed) for seed in range(3)]
    with host_reads() as found:
        counts = read_counts([plan for _, plan in layers], 2, 8, layout, FORMAT_OF[8])
    assert len(found) == 1
    for (state, plan), own in zip(layers, counts, strict=True):
        value = state.value * state.channels
        with host_reads() as found:
            blocks = pack_layer(state.key, value, plan, Packing(layout, FORMAT_OF[8]), None, own)
        assert not found
        with host_reads() as found:
            alone = pack_layer(state.key, value, plan, Packing(layout, FORMAT_OF[8]))
        assert len(found) == 1
        for one, other in zip(tensors(blocks), tensors(alone), strict=True):
            assert one is other is None or torch.equal(one, other)
        for block in blocks:
            assert block.numbers == (None if block.rows is None else block.rows.tolist())
            for values in (part.values for part in block.parts):
                if isinstance(values, RoutedValues):
                    assert values.bounds == [*values.offsets.tolist(), len(values.pieces.data)]


@pytest.mark.parametrize("sets", SETS)
def test_counts_are_those_of_a_plain_loop(sets):
    _, plan = planned(sets, 4, "contiguous", True)
    (counts,) = read_counts([plan], 2, 8, "contiguous")
    heads = [(sample, head) for sample in range(3) for head in range(2 if sets == "own" else 1)]
    assert counts.channels == 4
    for row, (sample, head) in enumerate(heads):
        expected, bits = [0] * 4, [[0] * (2 if sets == "own" else 4) for _ in range(2)]
        for place, entry in enumerate(plan.entries_BN[sample].tolist()):
            if entry < 0 or (sets == "own" and not plan.heads_BNh[sample, place, head]):
                continue
            groups = plan.group_mask_BNS[sample, place].tolist()
            cut = int(plan.cut_keys.entries_BN[sample, place])
            expected[2 * all(groups) + (1 - cut)] += 1
            if not all(groups):  # groups are half heads: of two heads the first has groups 0 and 1
                own = groups if sets != "own" else groups[2 * head : 2 * head + 2]
                bits[1 - cut] = [have + is_set for have, is_set in zip(bits[1 - cut], own, strict=True)]
        assert counts.kinds[row] == tuple(expected)
        assert [kind[row] for kind in counts.bits] == bits
