"""Order of samples: it depends on (seed, epoch), is split exactly over ranks, and can be resumed at any position."""

import tracemalloc

import numpy as np
import pytest

from dctrain.data.sampler import EpochOrder, EvalBatches, Permutation, Position, Progress, TrainBatches

SHARDS = [7, 9, 8, 10, 6]
N = sum(SHARDS)


def test_order_is_permutation_determined_by_seed_and_epoch():
    orders = {(s, e): tuple(EpochOrder(SHARDS, s, e)[:]) for s in (0, 1) for e in (0, 1)}
    assert all(sorted(order) == list(range(N)) for order in orders.values())
    assert len(set(orders.values())) == 4
    assert tuple(EpochOrder(SHARDS, 0, 0)[:]) == orders[0, 0]


def test_samples_are_shuffled_within_windows_of_shards():
    sizes = [10] * 6
    order = EpochOrder(sizes, 3, 0, window=2)[:]
    for i in range(0, 60, 20):
        assert len(set(order[i : i + 20] // 10)) == 2  # two complete shards
        assert len(set(order[i : i + 5] // 10)) == 2  # mixed, not consecutive


@pytest.mark.parametrize("sizes", [SHARDS, [N], [0, 3, 0, 30, 7], [1] * 150])
def test_slice_of_order_equals_slice_of_full_order(sizes):
    order = EpochOrder(sizes, 1, 2)
    whole = order[:]
    assert sorted(whole) == list(range(len(order)))
    for start in range(len(order)):
        assert np.array_equal(order[start : start + 5], whole[start : start + 5])
    assert len(order[5:5]) == 0


@pytest.mark.parametrize("n", [*range(1, 40), 255, 256, 257, 5000])
def test_permutation_is_bijective_for_every_size(n):
    assert sorted(Permutation(n, [3, 4])(np.arange(n))) == list(range(n))


def test_permutations_pass_randomness_checks():
    """All first pairs are equally frequent (chi-squared test, five standard deviations). Neighbors are uncorrelated,
    and so are numbers and positions.
    """
    counts = np.zeros((10, 10))
    for key in range(9000):
        first, second = Permutation(10, [0, key])(np.arange(2))
        counts[first, second] += 1
    pairs = counts[~np.eye(10, dtype=bool)]
    assert counts.trace() == 0 and ((pairs - 100) ** 2 / 100).sum() < 89 + 5 * (2 * 89) ** 0.5
    order = Permutation(100_000, [5])(np.arange(100_000))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / 100_000**0.5
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 5 / 100_000**0.5


def test_large_corpus_needs_little_memory():
    """Sampling from a billion sequences needs less than 1 MiB, at the start and within an epoch."""
    n = 10**9
    tracemalloc.start()
    for trained in (0, n // 8 + 7):
        sampler = TrainBatches([n], 4, 1, 2, 0, Progress(n, 8), lambda trained=trained: trained)
        refs = next(iter(sampler))
        assert len({ref.index for ref in refs}) == 4 and {ref.epoch for ref in refs} == {trained // (n // 8)}
    next(iter(EvalBatches(n, 4, 1, 2)))
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def batches(rank=0, world=1, size=4, seed=0, progress=None, trained=0):
    progress = progress or Progress(N, size * world)
    return list(TrainBatches(SHARDS, size, rank, world, seed, progress, lambda: trained))


@pytest.mark.parametrize(("world", "size"), [(1, 4), (2, 4), (3, 5)])
def test_ranks_split_order_into_equal_numbers_of_batches(world, size):
    per_rank = [batches(rank, world, size) for rank in range(world)]
    assert {len(b) for b in per_rank} == {N // (world * size)}
    seen = [ref.index for rank in per_rank for batch in rank for ref in batch]
    assert len(seen) == len(set(seen)) == N // (world * size) * world * size
    order = list(EpochOrder(SHARDS, 0, 0)[:])
    first = [ref.index for rank in per_rank for ref in rank[0]]
    assert first == order[: world * size]


@pytest.mark.parametrize("trained", [0, 1, 9, 10, 13])
def test_iteration_resumes_at_first_untrained_batch(trained):
    whole = batches() + batches(trained=10)  # two epochs of ten batches
    got = batches(trained=trained)
    assert got == whole[trained : trained // 10 * 10 + 10]
    assert got == batches(trained=trained)
    assert whole[0][0].epoch == 0 and whole[10][0].epoch == 1


@pytest.mark.parametrize(("before", "after"), [((1, 4), (2, 4)), ((2, 4), (1, 4)), ((2, 4), (3, 2)), ((1, 4), (1, 5))])
def test_resume_with_different_world_size_uses_each_remaining_sample_once(before, after):
    world, size = before
    progress = Progress(N, world * size)
    trained = 3
    seen = {ref.index for rank in range(world) for batch in batches(rank, world, size)[:trained] for ref in batch}
    position = progress.position(trained)
    assert position == Position(0, len(seen))
    world, size = after
    resumed = Progress(N, world * size, position, first_batch=trained)
    rest = [
        ref.index
        for rank in range(world)
        for batch in batches(rank, world, size, progress=resumed, trained=trained)
        for ref in batch
    ]
    assert len(rest) == len(set(rest)) == (N - len(seen)) // (world * size) * world * size
    assert not seen & set(rest)
    following = resumed.position(trained + resumed.remaining)
    assert following == Position(1, 0)
    assert resumed.position(trained + resumed.remaining + N // (world * size) + 1) == Position(2, world * size)


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_evaluation_uses_every_sample_once_in_equal_numbers_of_batches(world):
    ranks = [EvalBatches(N, 4, rank, world) for rank in range(world)]
    lengths = {len(list(r)) for r in ranks}
    assert len(lengths) == 1 and lengths == {len(ranks[0])}
    refs = [ref for rank in ranks for batch in rank for ref in batch]
    assert sorted(ref.index for ref in refs if not ref.is_padding) == list(range(N))
    assert sum(ref.is_padding for ref in refs) == -N % world


def test_first_batches_are_spread_over_shards():
    order = EpochOrder([100] * 10, 0, 0)[:]
    assert len(np.unique(order[:50] // 100)) > 5
