"""The packed cache as transformers uses it: growth, crop, reorder, repeat, select."""

import pytest
import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from subtoken_train.cache.cache import RESERVED, PackedCache
from subtoken_train.cache.packed_layer import SLACK, PackedLayer
from tests.support.packing import SETS, dense, index_form, masked_attention, states  # noqa: F401
from tests.support.sampling import sampled


def filled(sets: str, bits: int = 0, batch: int = 3) -> tuple[PackedCache, list]:
    cache, layers = PackedCache(2), [dense(seed, batch, sets=sets, bits=bits) for seed in (1, 2)]
    cache.layers = [state.layer() for state in layers]
    cache.next_position, cache.origin_B = torch.arange(batch)[:, None] + 20, torch.arange(batch)
    cache.appends = True
    return cache, layers


def grown(cache: PackedCache, seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    batch = len(cache.origin_B)
    key, value = states(seed, batch, 2, count, 8), states(seed + 1, batch, 2, count, 8)
    for i in range(len(cache.layers)):
        cache.update(key, value, i)
    return key, value


def picked(state, samples: torch.Tensor):
    parts = {n: getattr(state, n)[samples] for n in ("key", "value", "keep", "channels")}
    return type(state)(**parts, groups=state.groups[samples], packing=state.packing)


def assert_attends(cache: PackedCache, layers: list, tail: tuple[torch.Tensor, torch.Tensor]) -> None:
    query = states(9, len(tail[0]), 4, 1, 8)
    for layer, state in zip(cache.layers, layers, strict=True):
        expected = masked_attention(state, query, *tail)
        assert (layer.attend(query, 8**-0.5) - expected).abs().max() < 1e-5


ORDERS = [[0, 1, 2], [2, 0, 1], [1, 1, 0], [2], [0, 0, 1, 1, 2, 2], [1, 2, 1, 1, 0]]


@pytest.mark.parametrize("sets", SETS)
@sampled("order", ORDERS, every=3, ids=str)
def test_chosen_samples_attend_as_their_dense_ones(sets, order):
    cache, layers = filled(sets)
    tail, samples = grown(cache, 3, 4), torch.tensor(order)
    cache.batch_select_indices(samples)
    assert cache.next_position[:, 0].tolist() == [20 + i for i in order]
    layers = [picked(state, samples) for state in layers]
    tail = tuple(x[samples] for x in tail)
    assert_attends(cache, layers, tail)
    # and once more, from blocks that were chosen before
    again = torch.arange(len(order)).flip(0)
    cache.reorder_cache(again)
    assert_attends(cache, [picked(state, again) for state in layers], tuple(x[again] for x in tail))


@pytest.mark.parametrize("sets", SETS)
def test_repeated_samples_and_beams_of_one_prompt(sets):
    cache, layers = filled(sets)
    cache.batch_repeat_interleave(2)
    tail, samples = grown(cache, 3, 4), torch.arange(3).repeat_interleave(2)
    layers = [picked(state, samples) for state in layers]
    assert_attends(cache, layers, tail)
    pointers = [part.data.data_ptr() for layer in cache.layers for block in layer.blocks for part in block.payloads]
    order = torch.tensor([1, 1, 2, 3, 5, 4])
    cache.reorder_cache(order)
    assert_attends(cache, layers, tuple(x[order] for x in tail))
    after = [part.data.data_ptr() for layer in cache.layers for block in layer.blocks for part in block.payloads]
    assert after == pointers


def test_crop_forgets_the_tail_only():
    cache, layers = filled("own")
    key, value = grown(cache, 3, 6)
    length, position = cache.get_seq_length(), cache.next_position.clone()
    cache.crop(-2)
    assert cache.get_seq_length() == length - 2
    assert torch.equal(cache.next_position, position - 2)
    assert_attends(cache, layers, (key[:, :, :4], value[:, :, :4]))
    more = grown(cache, 7, 3)
    tail = tuple(torch.cat([old[:, :, :4], new], 2) for old, new in zip((key, value), more, strict=True))
    assert_attends(cache, layers, tail)
    cache.crop(-7)
    with pytest.raises(ValueError, match="1 tokens cannot be removed: 0 came after the prompt"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(3)


def test_the_tail_grows_in_place_with_little_slack():
    cache, _ = filled("shared")
    prompt = [part.data.data_ptr() for part in cache.layers[0].blocks[0].payloads]
    per_token, moved, before = 3 * 2 * 8 * 4 * 2, 0, None
    for step in range(1, 2 * SLACK + 3):
        grown(cache, step, 1)
        layer = cache.layers[0]
        used, slack = layer.tail_bytes
        assert used == step * per_token
        assert 0 <= slack < SLACK * per_token
        moved += before is not None and layer.keys.data_ptr() != before
        before = layer.keys.data_ptr()
    assert moved == 2
    assert prompt == [part.data.data_ptr() for part in cache.layers[0].blocks[0].payloads]


def test_lengths_are_those_of_the_unreduced_prompt():
    cache, _ = filled("shared")
    assert cache.get_seq_length() == 21
    grown(cache, 3, 2)
    assert cache.get_seq_length() == 23
    assert cache.layers[0].get_mask_sizes(1) == (24, 0)


def test_an_empty_layer_refuses_to_grow_and_reset_empties():
    layer = PackedLayer()
    assert layer.tail_bytes == (0, 0)
    with pytest.raises(ValueError, match="needs a prompt before it grows"):
        layer.update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8))
    cache, _ = filled("shared")
    cache.reset()
    assert not cache.holds_prompt
    assert cache.get_seq_length() == 0


def test_cropping_leaves_little_slack():
    cache, layers = filled("own")
    key, value = grown(cache, 3, 311)
    per_token = 3 * 2 * 8 * 4 * 2
    for removed, left in ((247, 64), (10, 54), (54, 0)):
        cache.crop(-removed)
        used, slack = cache.layers[0].tail_bytes
        assert used == left * per_token
        assert 0 <= slack < SLACK * per_token
        storage = cache.layers[0].keys.untyped_storage().nbytes() + cache.layers[0].values.untyped_storage().nbytes()
        assert storage == used + slack
        assert_attends(cache, layers, (key[:, :, :left], value[:, :, :left]))


@pytest.mark.parametrize("sets", SETS)
def test_layers_choose_samples_as_their_cache_does(sets):
    for call, index in (
        ("batch_select_indices", torch.tensor([2, 0])),
        ("reorder_cache", torch.tensor([1, 1, 0])),
        ("batch_repeat_interleave", 2),
    ):
        cache, layers = filled(sets)
        tail = grown(cache, 3, 4)
        for layer in cache.layers:
            getattr(layer, call)(index)
        samples = torch.arange(3).repeat_interleave(2) if isinstance(index, int) else index
        assert_attends(cache, [picked(state, samples) for state in layers], tuple(x[samples] for x in tail))


def test_samples_are_named_as_tensors_are_indexed():
    for index, names in (([-1, 0], [2, 0]), (torch.tensor([True, False, True]), [0, 2]), (torch.tensor([1]), [1])):
        cache, layers = filled("own")
        tail = grown(cache, 3, 4)
        cache.batch_select_indices(index)
        assert cache.next_position[:, 0].tolist() == [20 + name for name in names]
        assert_attends(cache, [picked(state, torch.tensor(names)) for state in layers], tuple(x[names] for x in tail))


def test_samples_that_are_not_there_are_worded():
    cache, _ = filled("own")
    for target in (cache, cache.layers[0]):
        for index, words in (([3], "the cache holds 3 samples"), ([], "one or more numbers"), ([[0]], "one or more")):
            with pytest.raises(ValueError, match=words):
                target.batch_select_indices(torch.tensor(index, dtype=torch.long))
        with pytest.raises(ValueError, match="not 0 times"):
            target.batch_repeat_interleave(0)
    empty = PackedCache(2)
    for target in (empty, empty.layers[0]):  # as transformers' own layers do before they hold anything
        target.batch_select_indices(torch.tensor([0]))
        target.batch_repeat_interleave(2)
        target.reorder_cache(torch.tensor([0]))


def test_every_public_method_of_transformers_layers_is_ours_or_harmless():
    inherited = {"supports_early_init", "is_compileable"}
    for name in {*vars(CacheLayerMixin), *vars(DynamicLayer)}:
        if name[0] != "_" and name not in inherited:
            assert name in vars(PackedLayer), name
    cache, _ = filled("own")
    assert not cache.is_compileable
    assert cache.is_croppable
    assert cache.get_max_length() == -1
    for call in (cache.layers[0].offload, cache.layers[0].prefetch, lambda: cache.offload(0)):
        with pytest.raises(ValueError, match="stays on its device"):
            call()


def test_reserved_room_is_made_once_and_stays():
    """What a step appends goes where the room is; more is added for a further answer, and counts as slack."""
    cache, _ = filled("shared")
    grown(cache, 3, 5)
    cache.reserve(SLACK + 30)
    layer, per_token = cache.layers[0], 3 * 2 * 8 * 4 * 2
    room = layer.keys
    assert layer.tail_bytes == (5 * per_token, (SLACK + 30) * per_token)
    for step in range(SLACK + 30):
        grown(cache, step, 1)
        assert layer.keys is room
    assert layer.tail_bytes[1] == 0
    cache.crop(-SLACK)
    assert layer.keys is room
    cache.reserve(10)
    assert layer.keys is room
    cache.reserve(SLACK + 7)
    assert layer.keys.shape[2] == room.shape[2] + 7
    cache.reserve(10**6)
    assert layer.keys.shape[2] == layer.tail_length + RESERVED
