"""How the kernels of deformable attention cut their work into tiles: a table by size, type and architecture."""

from __future__ import annotations

from dataclasses import dataclass


# How the Triton kernel is cut into programs: a fixed table, measured once (docs/results/kernel.md), so that nothing is tuned at
# run time.
@dataclass(frozen=True, slots=True)
class Tile:
    """queries: queries a program computes. points: points of a level side by side; 0 = all points of all levels.
    warps: warps a program has. All counts are powers of two. heads_first: neighbouring programs are heads of the same
    queries, instead of other queries of the same head. beside: heads of one program of the kernel for many queries;
    0 = the other kernel."""

    queries: int
    points: int
    warps: int
    heads_first: bool = False
    beside: int = 0


MOST_AT_ONCE = 32
BANKS = 128  # bytes that the first-level cache reads at once, if they lie in different banks


def choose(sums: int, points: int, head_dim: int, *, fused: bool, heads: int = 0) -> Tile:
    """The tile for `sums` = batch * queries * heads sums of `points` samples each. heads: the heads of a query, where the
    kernel for many queries takes this call (values of 16 bits, no discrete sampling); 0 = it does not.

    Few sums: one program each, all its samples at once, so that none waits for another. Many sums: as many samples as
    fill a warp with reads of 16 bytes, two points beside each other, which halves the requests for locations. Half the
    sums in between. The fused kernel wants all points of a query in one place, for the softmax.
    """
    samples = max(256 // power_of_two(head_dim), 1)  # what a warp reads at once, with 8 channels a thread
    if heads and sums > SOME_SUMS and head_dim in (16, 32, 64):
        return _many(head_dim, heads)
    beside = power_of_two(points)
    if beside <= MOST_AT_ONCE and sums <= FEW_SUMS:
        return Tile(1, 0, 1)
    if fused and 4 * points < 3 * beside:  # side by side, more than a quarter of them would be empty places
        return Tile(samples, 2, 1) if sums > SOME_SUMS else Tile(max(samples // 4, 1), 4, 1)
    if beside <= MOST_AT_ONCE and fused:
        return Tile(max(4 * samples // beside, 1), 0, 1, heads_first=sums > SOME_SUMS)
    if sums <= SOME_SUMS:
        return Tile(max(samples // 2, 1), 4, 1)
    return Tile(max(samples // 2, 1), 2, 1)


def _many(head_dim: int, heads: int) -> Tile:
    """Four warps, each with as many rows (a head of a query) as it reads at once, and as many heads side by side as it takes
    for their cells to lie in all banks."""
    beside = 1
    while heads % (2 * beside) == 0 and 2 * head_dim * beside < BANKS:
        beside *= 2
    return Tile(4 * 256 // head_dim // beside, 4, 4, beside=beside)


def power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


FEW_SUMS, SOME_SUMS = 4800, 32768
