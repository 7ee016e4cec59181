import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from quire.kernels.native import library as native
from quire.kernels.native.shared import SharedGroup, shared_bytes

Result = TypeVar("Result")
Lockstep = Callable[[int, Callable[[SharedGroup, int], Result]], list[Result]]


@pytest.fixture
def lockstep() -> Lockstep[object]:
    """Runs one function on every rank of a group. Threads share memory as rank processes would."""
    library = native.library()
    if library is None:
        pytest.skip("there is no native library on this machine")

    def run(size: int, work: Callable[[SharedGroup, int], object]) -> list[object]:
        fd = os.memfd_create("test")
        os.ftruncate(fd, shared_bytes(size))
        groups = [SharedGroup(library, fd, rank=rank, size=size) for rank in range(size)]
        os.close(fd)
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(work, groups, range(size)))

    return run


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_rank_gets_the_tree_sum_of_all(lockstep: Lockstep[object], size: int) -> None:
    # Empty, less than a vector, a whole number of them, more than two rounds.
    counts = [0, 1, 15, 16, 17, 1000, 2 * (1 << 18) + 5]
    generator = torch.Generator().manual_seed(size)
    inputs = [[torch.randn(n, generator=generator) for n in counts] for _ in range(size)]

    def work(group: SharedGroup, rank: int) -> list[torch.Tensor]:
        return [group.all_reduce(x.clone()) for x in inputs[rank]]

    for outputs in lockstep(size, work):
        assert isinstance(outputs, list)
        for index, output in enumerate(outputs):
            assert torch.equal(output, _tree([row[index] for row in inputs]))


def test_a_bfloat16_sum_is_rounded_once(lockstep: Lockstep[object]) -> None:
    inputs = [torch.randn(3, 40).bfloat16() for _ in range(4)]
    for output in lockstep(4, lambda group, rank: group.all_reduce(inputs[rank].clone())):
        assert isinstance(output, torch.Tensor)
        assert torch.equal(output, _tree([x.float() for x in inputs]).bfloat16())


def test_many_rounds_never_mix(lockstep: Lockstep[object]) -> None:
    def work(group: SharedGroup, rank: int) -> bool:
        return all(
            bool((group.all_reduce(torch.full((40,), float(step + rank))) == 2 * step + 1).all())
            for step in range(2000)
        )

    assert lockstep(2, work) == [True, True]


def test_rank_0_gathers_what_each_rank_has(lockstep: Lockstep[object]) -> None:
    inputs = [torch.randn(7, 60_001) for _ in range(3)]  # Two rounds, the last one partial.
    gathered, *others = lockstep(3, lambda group, rank: group.gather(inputs[rank]))
    assert others == [None, None]
    assert isinstance(gathered, list)
    assert all(torch.equal(part, x) for part, x in zip(gathered, inputs, strict=True))


def test_a_rank_beside_the_group_and_too_small_a_file_are_refused() -> None:
    library = native.library()
    if library is None:
        pytest.skip("there is no native library on this machine")
    fd = os.memfd_create("test")
    os.ftruncate(fd, shared_bytes(2) - 1)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=f"rank={rank}: must be below 2"):
            SharedGroup(library, fd, rank=rank, size=2)
    with pytest.raises(ValueError, match="mmap"):
        SharedGroup(library, fd, rank=0, size=2)
    os.close(fd)


def _tree(parts: list[torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    return _tree(parts[:middle]) + _tree(parts[middle:])
