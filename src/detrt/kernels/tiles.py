"""How the Triton kernel is cut into programs: a fixed table, measured once, so that nothing is tuned at run time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """queries: queries a program computes. points: points of a level side by side; 0 = all points of all levels.
    warps: warps a program has. Both counts are powers of two."""

    queries: int
    points: int
    warps: int


MANY = Tile(queries=8, points=1, warps=1)
FEW = Tile(queries=1, points=0, warps=1)
MOST_AT_ONCE = 64


def choose(work: int, points: int) -> Tile:
    """The tile for `work` = batch * queries * heads sums of `points` samples each."""
    return FEW if work <= 16384 and points <= MOST_AT_ONCE else MANY
