"""The resumable order: a function of the seed, the place and the process."""

import pytest

from subtoken_train.datasets.sampler import ResumableSampler


def test_a_pass_holds_every_record_of_its_full_batches_once():
    order = list(ResumableSampler(23, 5, seed=0))
    assert len(order) == len(set(order)) == len(ResumableSampler(23, 5, seed=0)) == 20


def test_order_depends_on_seed_and_pass():
    passes = [list(ResumableSampler(20, 5, seed, consumed=lambda start=start: start)) for seed, start in _PLACES]
    assert len({tuple(order) for order in passes}) == len(passes)
    assert list(ResumableSampler(20, 5, seed=0)) == passes[0]


_PLACES = [(0, 0), (1, 0), (0, 4), (1, 4), (0, 8)]


def test_any_start_continues_the_same_stream():
    stream = [i for start in (0, 4, 8) for i in ResumableSampler(20, 5, 0, consumed=lambda start=start: start)]
    for start in range(9):
        rest = stream[5 * start :][: 20 - 5 * (start % 4)]  # to the end of its pass
        assert list(ResumableSampler(20, 5, 0, consumed=lambda start=start: start)) == rest


@pytest.mark.parametrize(("limit", "epoch"), [(3, 3), (9, 4), (0.75, 3), (1.0, 4)])
def test_shortened_epochs_go_on_with_the_pass(limit, epoch):
    stream = [i for start in (0, 4, 8) for i in ResumableSampler(20, 5, 0, consumed=lambda start=start: start)]
    for start in range(0, 8):
        batches = list(ResumableSampler(20, 5, 0, limit=limit, consumed=lambda start=start: start))
        assert batches == stream[5 * start :][: 5 * (epoch - start % epoch)]


def test_every_iteration_asks_where_training_stands():
    consumed = [0]
    sampler = ResumableSampler(20, 5, 0, consumed=lambda: consumed[0])
    first = list(sampler)
    consumed[0] = 2
    assert list(sampler) == first[10:]
    sampler.set_epoch(3)  # Lightning calls it; the place says it all
    assert list(sampler) == first[10:]


@pytest.mark.parametrize("start", [0, 3])
def test_processes_share_each_global_batch(start):
    alone = list(ResumableSampler(26, 6, 0, consumed=lambda: start))
    ranks = [list(ResumableSampler(26, 3, 0, rank=rank, world_size=2, consumed=lambda: start)) for rank in (0, 1)]
    assert not set(ranks[0][:6]) & set(ranks[1][:6])
    for batch in range(4 - start):
        both = [i for rank in ranks for i in rank[3 * batch : 3 * batch + 3]]
        assert both == alone[6 * batch : 6 * batch + 6]


def test_too_few_records_and_bad_seeds_are_refused():
    message = "7 training records do not fill one batch of batch_size 4 on 2 process"
    with pytest.raises(ValueError, match=message):
        ResumableSampler(7, 4, 0, world_size=2)
    with pytest.raises(ValueError, match="seed is -1; it must be 0 or more"):
        ResumableSampler(7, 4, -1)


def grouped(sizes, batch_size, **options):
    return ResumableSampler(len(sizes), batch_size, 0, sizes=sizes, **options)


def test_grouped_batches_hold_records_of_like_size():
    sizes = [(1, 20 + i % 10) for i in range(40)] + [(1, 200)] * 24 + [(0, 20)] * 16
    order = list(grouped(sizes, 8))
    assert sorted(order) == list(range(80))
    batches = [{(sizes[i][0], sizes[i][1] > 100) for i in order[start : start + 8]} for start in range(0, 80, 8)]
    assert all(len(kinds) == 1 for kinds in batches)
    kinds = [kind for batch in batches for kind in batch]
    assert kinds != sorted(kinds)  # the batches are shuffled


def test_grouping_reaches_over_fifty_batches_and_drops_the_incomplete_one():
    sizes = [(1, 10 if i % 2 else 500) for i in range(403)]
    order = list(grouped(sizes, 2))
    assert len(order) == len(set(order)) == 402
    mixed = sum(sizes[a] != sizes[b] for a, b in zip(order[::2], order[1::2], strict=True))
    assert mixed <= 5  # at most one seam per 50 batches


def test_grouped_processes_and_places_agree():
    sizes = [(0, 2**i) for i in range(24)]
    alone = list(grouped(sizes, 6))
    ranks = [list(grouped(sizes, 3, rank=rank, world_size=2)) for rank in (0, 1)]
    assert [i for b in range(4) for rank in ranks for i in rank[3 * b : 3 * b + 3]] == alone
    assert list(grouped(sizes, 6, consumed=lambda: 2)) == alone[12:]
    assert grouped(sizes, 6).identity != ResumableSampler(24, 6, 0).identity
