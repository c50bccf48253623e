"""The resumable order (a function of the seed, the place and the process), its windows, and workers that outlive."""

import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subtoken_train.datasets import ordered
from subtoken_train.datasets.ordered import AccumulationWindows, ResumableSampler, validation_order
from tests.support.refusals import refuses


def test_a_pass_holds_every_record_of_its_full_batches_once():
    order = list(ResumableSampler(23, 5, seed=0))
    assert len(order) == len(set(order)) == len(ResumableSampler(23, 5, seed=0)) == 20


def test_any_start_continues_the_same_stream():
    passes = [list(ResumableSampler(20, 5, seed, consumed=lambda at=at: at)) for seed in (0, 1) for at in (0, 4)]
    assert len(set(map(tuple, passes))) == 4
    of_images = ResumableSampler(20, 5, 0, sizes=np.array([(1, 9)] * 20))
    assert list(of_images) == list(ResumableSampler(20, 5, seed=0)) == passes[0]
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


@pytest.mark.parametrize("start", [0, 3])
def test_processes_share_each_global_batch(start):
    alone = list(ResumableSampler(26, 6, 0, consumed=lambda: start))
    ranks = [list(ResumableSampler(26, 3, 0, rank=rank, world_size=2, consumed=lambda: start)) for rank in (0, 1)]
    assert not set(ranks[0][:6]) & set(ranks[1][:6])
    for batch in range(4 - start):
        assert [i for rank in ranks for i in rank[3 * batch : 3 * batch + 3]] == alone[6 * batch : 6 * batch + 6]


def test_too_few_records_and_bad_seeds_are_refused():
    with pytest.raises(ValueError, match="7 training records do not fill one batch of batch_size 4 on 2 process"):
        ResumableSampler(7, 4, 0, world_size=2)
    refuses("seed is -1; it must be 0 or more", ResumableSampler, 7, 4, -1)


def grouped(sizes, batch_size, **options):
    return ResumableSampler(len(sizes), batch_size, 0, sizes=np.array(sizes), **{"by_length": True, **options})


def test_grouping_reaches_over_fifty_batches_and_drops_the_incomplete_one():
    sizes = [(1, 10 if i % 2 else 500) for i in range(403)]
    order = list(grouped(sizes, 2))
    assert len(order) == len(set(order)) == 402
    mixed = sum(sizes[a] != sizes[b] for a, b in zip(order[::2], order[1::2], strict=True))
    assert mixed <= 5  # at most one seam per 50 batches


KINDS = st.lists(st.sampled_from([(0, 9), (0, 500), (1, 9), (1, 500), (3, 9)]), min_size=12, max_size=120)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(KINDS, st.integers(1, 4), st.sampled_from([1, 2, 3]), st.booleans())
def test_every_process_has_images_or_none_has(sizes, batch_size, world_size, by_length):
    ranks = [
        list(grouped(sizes, batch_size, rank=rank, world_size=world_size, by_length=by_length))
        for rank in range(world_size)
    ]
    together = [index for order in ranks for index in order]
    assert len(together) == len(set(together))
    steps = len(ranks[0]) // batch_size
    assert len(sizes) // (batch_size * world_size) - steps <= (1 if world_size > 1 else 0)
    mixed = 0
    for step in range(steps):
        parts = [[sizes[i][0] > 0 for i in order[step * batch_size :][:batch_size]] for order in ranks]
        assert len({any(part) for part in parts}) == 1
        mixed += len({flag for part in parts for flag in part}) > 1
    assert mixed <= 1


@pytest.mark.parametrize("by_length", [False, True])
def test_a_mixed_pass_is_a_function_of_seed_and_place(by_length):
    sizes = [(int(i % 7 > 0), 10 + i) for i in range(61)]
    alone = list(grouped(sizes, 6, by_length=by_length))
    ranks = [list(grouped(sizes, 2, rank=rank, world_size=3, by_length=by_length)) for rank in range(3)]
    assert [i for b in range(len(alone) // 6) for order in ranks for i in order[2 * b : 2 * b + 2]] == alone
    for start in range(1, 10):
        assert list(grouped(sizes, 6, by_length=by_length, consumed=lambda start=start: start)) == alone[6 * start :]
    other = ResumableSampler(61, 6, 1, sizes=np.array(sizes), by_length=by_length)
    assert list(other) != alone
    assert other.identity["group_by_length"] == by_length


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 4))
def test_validation_is_shared_out_whole_and_by_kind(images, world_size):
    sizes = np.array([(int(flag), 5) for flag in images])
    shares = [validation_order(sizes, len(images), rank, world_size) for rank in range(world_size)]
    assert {index for share in shares for index in share} == set(range(len(images)))
    for step in zip(*shares, strict=True):
        assert len({images[index] for index in step}) == 1
    assert sum(map(len, shares)) - len(images) <= 2 * (world_size - 1)
    assert [validation_order(None, 5, rank, 2) for rank in (0, 1)] == [[0, 2, 4], [1, 3, 0]]


ONE_BY_ONE, IN_TWOS = [(i, i + 1, 1) for i in range(5)], [(0, 3, 2), (1, 3, 2), (2, 7, 2), (3, 7, 2), (4, 5, 1)]


@pytest.mark.parametrize(("size", "expected"), [(1, ONE_BY_ONE), (2, IN_TWOS)])
def test_every_batch_knows_its_windows_tokens_and_size(size, expected):
    batches = []
    for labelled in range(1, 6):
        labels_BN = torch.full((2, 8), -100)
        labels_BN[1, 1 : 1 + labelled] = 9
        labels_BN[0, 0] = 9  # never a target
        batches.append(SimpleNamespace(labels_BN=labels_BN, place=labelled - 1))
    windows = AccumulationWindows(batches, size)
    assert [(batch.place, tokens, length) for batch, tokens, length in windows] == expected
    assert len(windows) == 5


def test_a_start_inside_a_window_is_refused():
    assert list(AccumulationWindows([], 2, lambda: 4)) == []
    with pytest.raises(ValueError, match="micro-batch 5 of the epoch, inside an accumulation window of 2; resume with"):
        list(AccumulationWindows([], 2, lambda: 5))


def test_a_worker_outlives_all_but_the_second_sigterm():
    child = os.fork()
    if child == 0:
        ordered.outlive_stop_signals(0)
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        time.sleep(60)
        os._exit(0)
    time.sleep(0.3)
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
