"""How the Triton kernel is cut into programs: a fixed table, measured once (docs/kernel.md), so that nothing is tuned at
run time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """queries: queries a program computes. points: points of a level side by side; 0 = all points of all levels.
    warps: warps a program has. All counts are powers of two. heads_first: neighbouring programs are heads of the same
    queries, instead of other queries of the same head."""

    queries: int
    points: int
    warps: int
    heads_first: bool = False


FEW_SUMS, SOME_SUMS = 4800, 32768
MOST_AT_ONCE = 32


def choose(sums: int, points: int, head_dim: int, *, fused: bool) -> Tile:
    """The tile for `sums` = batch * queries * heads sums of `points` samples each.

    Few sums: one program each, all its samples at once, so that none waits for another. Many sums: as many samples as
    fill a warp with reads of 16 bytes, two points beside each other, which halves the requests for locations. Half the
    sums in between. The fused kernel wants all points of a query in one place, for the softmax.
    """
    samples = max(256 // power_of_two(head_dim), 1)  # what a warp reads at once, with 8 channels a thread
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


def power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()
