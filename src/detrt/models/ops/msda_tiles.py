"""Tile sizes of the deformable attention kernels: a fixed table, measured once (docs/results/kernel.md), without run-time tuning."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """How a kernel is divided into programs. All counts are powers of two.

    queries: per program. points: of a level that are processed in parallel; 0 = all points of all levels. warps: per program.
    heads_first: neighbouring programs are heads of the same queries, instead of other queries of the same head.
    heads_per_program: of the kernel for many queries; 0 = the other kernel.
    """

    queries: int
    points: int
    warps: int
    heads_first: bool = False
    heads_per_program: int = 0


MAX_POINTS_AT_ONCE = 32
BANKS = 128  # bytes that the L1 cache reads at once from different banks


def choose(outputs: int, points: int, head_dim: int, *, fused: bool, heads: int = 0) -> Tile:
    """The tile for a call.

    Few outputs: one program each, all its samples at once, so that none waits for another. Many outputs: as many samples as fill a
    warp with reads of 16 bytes, two points in parallel, which halves the requests for locations; half of that in between. The
    fused kernel needs all points of a query in one program, for the softmax.

    Args:
        outputs: batch * queries * heads.
        points: samples per output.
        head_dim: channels per head.
        fused: offsets and logits, with softmax.
        heads: number of heads if the kernel for many queries supports the call (16-bit values, no discrete sampling), else 0.
    """
    samples = max(256 // power_of_two(head_dim), 1)  # that a warp reads at once, with 8 channels per thread
    if heads and outputs > SOME_OUTPUTS and head_dim in (16, 32, 64):
        return _many(head_dim, heads)
    heads_per_program = power_of_two(points)
    if heads_per_program <= MAX_POINTS_AT_ONCE and outputs <= FEW_OUTPUTS:
        return Tile(1, 0, 1)
    if fused and 4 * points < 3 * heads_per_program:  # in parallel, more than a quarter of the lanes would be idle
        return Tile(samples, 2, 1) if outputs > SOME_OUTPUTS else Tile(max(samples // 4, 1), 4, 1)
    if heads_per_program <= MAX_POINTS_AT_ONCE and fused:
        return Tile(max(4 * samples // heads_per_program, 1), 0, 1, heads_first=outputs > SOME_OUTPUTS)
    if outputs <= SOME_OUTPUTS:
        return Tile(max(samples // 2, 1), 4, 1)
    return Tile(max(samples // 2, 1), 2, 1)


def _many(head_dim: int, heads: int) -> Tile:
    """Four warps, each with as many rows (a head of a query) as it reads at once, and so many heads per program that their pixels
    cover all banks."""
    heads_per_program = 1
    while heads % (2 * heads_per_program) == 0 and 2 * head_dim * heads_per_program < BANKS:
        heads_per_program *= 2
    return Tile(4 * 256 // head_dim // heads_per_program, 4, 4, heads_per_program=heads_per_program)


def power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


FEW_OUTPUTS, SOME_OUTPUTS = 4800, 32768
