"""The packed cache as transformers uses it: growth, crop, reorder, repeat, select."""

from itertools import pairwise

import pytest
import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from subtoken_train.cache.cache import RESERVED, PackedCache
from subtoken_train.cache.packed_layer import SLACK, PackedLayer
from tests.support.packing import SETS, dense, masked_attention, states
from tests.support.refusals import refuses
from tests.support.sampling import sampled

PER_TOKEN = 3 * 2 * 8 * 4 * 2


def filled(sets: str, batch: int = 3) -> tuple[PackedCache, list]:
    cache, layers = PackedCache(2), [dense(seed, batch, sets=sets) for seed in (1, 2)]
    cache.layers = [state.layer() for state in layers]
    cache.next_position, cache.origin_B = torch.arange(batch)[:, None] + 20, torch.arange(batch)
    cache.appends = True
    return cache, layers


def grown(cache: PackedCache, seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = (states(seed + i, len(cache.origin_B), 2, count, 8) for i in range(2))
    for i in range(len(cache.layers)):
        cache.update(key, value, i)
    return key, value


def picked(state, samples: torch.Tensor):
    parts = {n: getattr(state, n)[samples] for n in ("key", "value", "keep", "channels", "groups")}
    return type(state)(**parts, packing=state.packing)


def assert_attends(cache: PackedCache, layers: list, tail: tuple[torch.Tensor, ...], samples=None) -> None:
    """Every layer attends as its dense one does, of these samples."""
    if samples is not None:
        layers, tail = [picked(state, samples) for state in layers], tuple(x[samples] for x in tail)
    query = states(9, len(tail[0]), 4, 1, 8)
    for layer, state in zip(cache.layers, layers, strict=True):
        assert (layer.attend(query, 8**-0.5) - masked_attention(state, query, *tail)).abs().max() < 1e-5


def pointers(cache: PackedCache) -> list[int]:
    return [part.data.data_ptr() for layer in cache.layers for block in layer.blocks for part in block.payloads]


@pytest.mark.parametrize("sets", SETS)
@sampled("order", [[0, 1, 2], [2, 0, 1], [1, 1, 0], [2], [0, 0, 1, 1, 2, 2], [1, 2, 1, 1, 0]], every=3, ids=str)
def test_chosen_samples_attend_as_their_dense_ones(sets, order):
    cache, layers = filled(sets)
    tail, samples = grown(cache, 3, 4), torch.tensor(order)
    cache.batch_select_indices(samples)
    assert cache.next_position[:, 0].tolist() == [20 + i for i in order]
    assert_attends(cache, layers, tail, samples)
    again = torch.arange(len(order)).flip(0)  # from blocks that were chosen before
    cache.reorder_cache(again)
    assert_attends(cache, layers, tail, samples[again])


@pytest.mark.parametrize("sets", SETS)
def test_repeated_samples_and_beams_of_one_prompt(sets):
    cache, layers = filled(sets)
    cache.batch_repeat_interleave(2)
    tail = grown(cache, 3, 4)
    layers = [picked(state, torch.arange(3).repeat_interleave(2)) for state in layers]
    assert_attends(cache, layers, tail)
    before, order = pointers(cache), torch.tensor([1, 1, 2, 3, 5, 4])
    cache.reorder_cache(order)
    assert_attends(cache, layers, tuple(x[order] for x in tail))
    assert pointers(cache) == before


def test_crop_forgets_the_tail_only():
    cache, layers = filled("own")
    assert cache.get_seq_length() == 21  # of the unreduced prompt
    key, value = grown(cache, 3, 6)
    position = cache.next_position.clone()
    cache.crop(-2)
    assert cache.get_seq_length() == 25
    assert cache.layers[0].get_mask_sizes(1) == (26, 0)
    assert torch.equal(cache.next_position, position - 2)
    more = grown(cache, 7, 3)
    assert_attends(cache, layers, [torch.cat([x[:, :, :4], y], 2) for x, y in zip((key, value), more, strict=True)])
    cache.crop(-7)
    for removed, words in ((-1, "1 tokens cannot be removed: 0 came after the prompt"), (3, "negative")):
        refuses(words, cache.crop, removed)


def test_the_tail_grows_in_place_with_little_slack():
    cache, _ = filled("shared")
    prompt, rooms = pointers(cache), []
    for step in range(1, 2 * SLACK + 3):
        grown(cache, step, 1)
        used, slack = cache.layers[0].tail_bytes
        assert used == step * PER_TOKEN
        assert 0 <= slack < SLACK * PER_TOKEN
        rooms.append(cache.layers[0].keys.data_ptr())
    assert sum(one != other for one, other in pairwise(rooms)) == 2
    assert prompt == pointers(cache)


def test_an_empty_layer_refuses_to_grow_and_reset_empties():
    layer = PackedLayer()
    assert layer.tail_bytes == (0, 0)
    refuses("needs a prompt before it grows", lambda: layer.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8)))
    cache, _ = filled("shared")
    cache.reset()
    assert not cache.holds_prompt
    assert cache.get_seq_length() == 0


CHOICES = {
    "from the end": ("batch_select_indices", [-1, 0], [2, 0]),
    "marks": ("batch_select_indices", torch.tensor([True, False, True]), [0, 2]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_forms_of_a_choice(name):
    (call, index, samples), (cache, layers) = CHOICES[name], filled("own")
    tail = grown(cache, 3, 4)
    getattr(cache, call)(index)
    assert cache.next_position[:, 0].tolist() == [20 + sample for sample in samples]
    assert_attends(cache, layers, tail, torch.tensor(samples))


def test_samples_that_are_not_there_are_worded():
    cache, _ = filled("own")
    for index, words in (([3], "the cache holds 3 samples"), ([], "one or more numbers"), ([[0]], "one or more")):
        refuses(words, cache.batch_select_indices, torch.tensor(index, dtype=torch.long))
    refuses("not 0 times", cache.batch_repeat_interleave, 0)
    empty = PackedCache(2)  # as transformers' own caches do before they hold anything
    empty.batch_select_indices(torch.tensor([0]))
    empty.batch_repeat_interleave(2)
    empty.reorder_cache(torch.tensor([0]))


def test_every_public_method_of_transformers_layers_is_ours_or_harmless():
    inherited = {"supports_early_init", "is_compileable"}
    for name in {*vars(CacheLayerMixin), *vars(DynamicLayer)}:
        if name[0] != "_" and name not in inherited:
            assert name in vars(PackedLayer), name
    cache, _ = filled("own")
    assert (cache.is_compileable, cache.is_croppable, cache.get_max_length()) == (False, True, -1)
    for call in (
        cache.layers[0].prefetch,
        lambda: cache.layers[0].reorder_cache(torch.tensor([0])),
        lambda: cache.offload(0),
    ):
        refuses("cannot be moved alone", call)


def test_reserved_room_is_made_once_and_stays():
    """What a step appends goes where the room is; more is added for a further answer, and counts as slack."""
    cache, _ = filled("shared")
    grown(cache, 3, 5)
    cache.reserve(SLACK + 30)
    layer = cache.layers[0]
    room = layer.keys
    assert layer.tail_bytes == (5 * PER_TOKEN, (SLACK + 30) * PER_TOKEN)
    for step in range(SLACK + 30):
        grown(cache, step, 1)
        assert layer.keys is room
    assert layer.tail_bytes[1] == 0
    cache.crop(-SLACK)
    cache.reserve(10)
    assert layer.keys is room
    cache.reserve(SLACK + 7)
    assert layer.keys.shape[2] == room.shape[2] + 7
    cache.reserve(10**6)
    assert layer.keys.shape[2] == layer.tail_length + RESERVED
