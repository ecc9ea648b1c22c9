"""Time deformable attention on an NVIDIA GPU: our kernel, a plain Triton kernel, GridSample eager and compiled.

    python benchmarks/measure_msda.py --out msda.json [--tune]

Work on the GPU alone: a CUDA graph of 20 calls, replayed; the median over replays, per call. "cold" rotates through
inputs of more than the second-level cache in all, "warm" reads the same inputs again. Outputs are compared with FP64
before anything is timed. `--tune` times every tile for the three shapes.
"""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from program import graph_microseconds, make_parser, require_gpu, run, stop

from detrt.models.ops import ms_deform_attn
from detrt.models.ops import msda as portable
from detrt.models.ops.msda_tiles import Tile, choose

try:
    import triton
    from plain_kernel import plain_msda

    from detrt.models.ops.msda_launch import launch_msda
except ModuleNotFoundError:  # --help says what it is without a GPU
    triton = None

ENCODER = ((100, 167), (50, 84), (25, 42), (13, 21))  # 22 223 tokens: an image of 800 x 1333
CASES = {
    # levels, queries (0 = every token), points per level
    "encoder": (ENCODER, 0, 4),
    "decoder": (ENCODER, 900, 4),
    "rt-detr": (((80, 80), (40, 40), (20, 20)), 300, 4),
}
HEADS, DIM, CALLS = 8, 32, 20
CODINO = ((192, 288), (96, 144), (48, 72), (24, 36), (12, 18))  # 73 656 tokens: an image of 768 x 1152, FP16 and fused only
MANY = [
    Tile(q, p, w, heads_per_program=b)
    for (q, w, b), p in itertools.product([(16, 4, 2), (8, 2, 2), (4, 1, 2), (32, 4, 1)], (1, 2, 4))
]
TILES = [
    Tile(q, p, 1, h)
    for (q, p), h in itertools.product(
        [(8, 1), (16, 1), (4, 2), (8, 2), (2, 4), (4, 4), (1, 0), (2, 0), (4, 0)],
        (False, True),
    )
] + MANY


def grid_sample(value, shapes, locations, weights, points):
    """The library's form, with sizes as numbers."""
    batch, _, heads, dim = value.shape
    queries = locations.shape[1]
    grids = (2 * locations - 1).to(value.dtype).unflatten(3, (len(points), points[0]))
    samples = []
    for level, (part, (h, w)) in enumerate(zip(value.split([h * w for h, w in shapes], 1), shapes, strict=True)):
        image = part.flatten(2).transpose(1, 2).reshape(batch * heads, dim, h, w)
        grid = grids[:, :, :, level].transpose(1, 2).flatten(0, 1)
        samples.append(torch.nn.functional.grid_sample(image, grid, padding_mode="zeros", align_corners=False))
    scale = weights.transpose(1, 2).reshape(batch * heads, 1, queries, -1)
    return (torch.stack(samples, -2).flatten(-2) * scale).sum(-1).view(batch, heads * dim, queries).transpose(1, 2).contiguous()


def inputs(name: str, where: str, dtype, device: str, seed: int = 0):
    """Locations anywhere in the level ("random"), or as models give them: a few cells around the query ("near")."""
    levels, queries, per_level = CASES.get(name, (CODINO, 0, 4))
    generator = torch.Generator(device).manual_seed(seed)
    tokens, points = sum(h * w for h, w in levels), [per_level] * len(levels)
    every = queries or tokens
    normal, uniform = (functools.partial(draw, generator=generator, device=device) for draw in (torch.randn, torch.rand))
    shapes = torch.tensor(levels, device=device)
    value = normal(1, tokens, HEADS, DIM).to(dtype)
    logits = normal(1, every, HEADS, sum(points)).to(dtype)
    offsets = (2 * normal(1, every, HEADS, sum(points), 2)).to(dtype)
    if queries:
        references = uniform(1, every, 1, 2).expand(-1, -1, len(levels), -1)
    else:
        grids = [torch.stack(torch.meshgrid(torch.arange(h) + 0.5, torch.arange(w) + 0.5, indexing="ij"), -1) for h, w in levels]
        centres = torch.cat([g.flip(-1).flatten(0, 1) / torch.tensor([w, h]) for g, (h, w) in zip(grids, levels, strict=True)])
        references = centres.to(device).view(1, every, 1, 2).expand(-1, -1, len(levels), -1)
    if where == "random":
        locations = uniform(1, every, HEADS, sum(points), 2)
    else:
        locations = portable.locations_of(value.float(), shapes, references, offsets, points, 0.5)
    return {
        "plain": (value, shapes, locations.contiguous(), logits.float().softmax(-1).to(dtype), points),
        "fused": (value, shapes, references.contiguous(), offsets, logits, points),
    }


def timed(call, sets, calls: int = CALLS, replays: int = 60) -> float:
    return graph_microseconds(call, sets, calls, replays)


def error(found, given) -> float:
    value, shapes, locations, weights, points = given
    expected = portable.reference(value.double(), shapes, locations.double(), weights.double(), points)
    return float((found.double() - expected).norm() / expected.norm())


def copies(name: str, where: str, cold: bool, kind: str, dtype=torch.float16):
    first = inputs(name, where, dtype, "cuda")[kind]
    size = sum(x.numel() * x.element_size() for x in first if isinstance(x, torch.Tensor))
    count = min(CALLS, max(2, -(-150_000_000 // size))) if cold else 1
    return [first, *(inputs(name, where, dtype, "cuda", seed)[kind] for seed in range(1, count))]


def fused_call(tile):
    return lambda v, s, r, o, g, p: launch_msda(v, s, r, o, g, p, tile=tile)


def plain_call(tile):
    return lambda v, s, x, w, p: launch_msda(v, s, None, x, w, p, tile=tile)


def compile_some(part) -> None:
    """Fill the compiler's cache from one process; timing then starts at once."""
    for name, kind, tile in part:
        try:
            given = inputs(name, "random", torch.float16, "cuda")[kind]
            (fused_call if kind == "fused" else plain_call)(tile)(*given)
            torch.cuda.synchronize()
        except Exception as found:
            print(f"{name} {kind} {tile}: {found}", file=sys.stderr)


def tune(results: dict, save) -> None:
    jobs = [(name, kind, tile) for name in ("encoder", "rt-detr") for kind in ("plain", "fused") for tile in TILES]
    started = time.time()
    workers = min(14, multiprocessing.cpu_count())
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=compile_some, args=(jobs[i::workers],)) for i in range(workers)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    results["tune_compile_s"] = time.time() - started
    for name, where, kind in itertools.product(CASES, ("random", "near"), ("plain", "fused")):
        if kind == "fused" and where == "random":
            continue
        sets = copies(name, where, True, kind)
        rows: dict[str, float | str] = {}
        for tile in TILES:
            try:
                rows[str(tile)] = timed((fused_call if kind == "fused" else plain_call)(tile), sets, replays=15)
            except Exception as found:
                rows[str(tile)] = repr(found)[:200]
        numbers = sorted((t, key) for key, t in rows.items() if isinstance(t, float))
        results["tune"][f"{name} {where} {kind}"] = rows
        print(f"{name} {where} {kind}:", "; ".join(f"{t:.2f} {key[5:-1]}" for t, key in numbers[:6]), flush=True)
        save()


def table(results: dict, save, compiled: bool) -> None:
    for name, where, cold in itertools.product(CASES, ("random", "near"), (True, False)):
        key = f"{name} {where} {'cold' if cold else 'warm'}"
        levels = CASES[name][0]
        sets = copies(name, where, cold, "plain")
        calls: dict[str, Callable[..., torch.Tensor]] = {"ours": ms_deform_attn, "plain triton": plain_msda}
        if where == "random" and not cold:
            eager = lambda v, s, x, w, p, levels=levels: grid_sample(v, levels, x, w, p)  # noqa: E731
            calls["grid sample"] = eager
            if compiled:
                calls["grid sample compiled"] = torch.compile(eager)
        row: dict[str, float | str] = {}
        for label, call in calls.items():
            try:
                row[label + " error"] = error(call(*sets[0]), sets[0])
                row[label] = timed(call, sets, calls=CALLS if "grid" not in label else 4)
            except Exception as failure:
                row[label] = repr(failure)[:300]
        if where == "near":
            row["ours fused"] = timed(fused_call(None), copies(name, where, cold, "fused"))
            row["unfused parts"] = timed(_unfused, copies(name, where, cold, "fused"), calls=4)
        results["table"][key] = row
        print(key, {k: (f"{v:.2f}" if isinstance(v, float) and v > 0.01 else v) for k, v in row.items()}, flush=True)
        save()
    codino = timed(fused_call(None), copies("co-dino", "near", True, "fused"), calls=4)
    results["table"]["co-dino near cold fused torch.float16"] = codino
    print("co-dino", f"{codino:.2f}", flush=True)
    for dtype in (torch.float32, torch.bfloat16):
        for name in CASES:
            sets = copies(name, "near", True, "fused", dtype)
            results["table"][f"{name} near cold fused {dtype}"] = found = timed(fused_call(None), sets)
            print(name, dtype, f"{found:.2f}", flush=True)
    save()


def _unfused(value, shapes, references, offsets, logits, points):
    """The kernel, with softmax and locations as PyTorch's own operators before it."""
    locations = portable.locations_of(value, shapes, references, offsets, points, 0.5)
    return ms_deform_attn(value, shapes, locations, logits.softmax(-1, dtype=torch.float32), points)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, default=Path("msda.json"))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled GridSample out")
    args = parser.parse_args()
    require_gpu()
    if triton is None:
        stop("needs the package triton")
    torch.backends.cuda.matmul.allow_tf32 = False
    results: dict = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "tune": {},
        "table": {},
        "tiles": {
            name: [
                str(choose((q or sum(h * w for h, w in levels)) * HEADS, p * len(levels), DIM, fused=fused, heads=HEADS))
                for fused in (False, True)
            ]
            for name, (levels, q, p) in CASES.items()
        },
    }

    def save() -> None:
        args.out.write_text(json.dumps(results, indent=1))

    for part in ([lambda: tune(results, save)] if args.tune else []) + [lambda: table(results, save, not args.no_compile)]:
        try:
            part()
        except Exception:
            traceback.print_exc()
    save()


if __name__ == "__main__":
    run(main)
