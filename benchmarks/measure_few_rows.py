"""Layers over few rows by detrt's kernels, by one kernel for a whole sequence, and by cuBLAS, on an NVIDIA GPU (Hopper or newer).

    python benchmarks/measure_few_rows.py OUT.jsonl [--rows 100 300 900]

Microseconds in FP16: a CUDA graph of 50 repeats, each with its own weights and behind an elementwise kernel that starts early, as in a
package; that kernel alone is subtracted. The caches are flushed before each of 10 replays, the median of them counts. Kernels but
cuBLAS's start early. Results are compared with FP64 first: "error" is the largest relative difference of a row. Tests run the same comparison with Triton's interpreter.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from program import at_least, graph_microseconds, make_parser, require_gpu, run, stop

REPEATS, REPLAYS, EPS = 50, 10, 1e-5
ADDED = 512  # outputs of query and key, which read data + other; the value reads the data alone

Weights = dict[str, torch.Tensor]


class Inputs(NamedTuple):
    """(rows, width) each. other: a residual or a summand; summed: data + other."""

    data: torch.Tensor
    other: torch.Tensor
    summed: torch.Tensor


class Early:
    """A kernel that starts while the one before it ends, as packages launch it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *given, **meta: self.kernel[grid](*given, **meta | {"EARLY": True, "launch_pdl": True})


class Ways:
    """The sequences by kernels. launch: `Early`, or None for kernels that do not start early."""

    def __init__(self, launch: type[Early] | None) -> None:
        import few_rows_kernels

        import detrt.backends.inductor.rows_triton as rows_triton

        self.launch, self.ours, self.whole = launch, rows_triton, few_rows_kernels

    def _run(self, kernel: Any, grid: tuple[int, ...], *given: Any, warps: int = 4, stages: int = 1, **meta: Any) -> None:
        started = kernel if self.launch is None else self.launch(kernel)
        started[grid](*given, **{"EARLY": False, **meta}, num_warps=warps, num_stages=stages)

    def copy(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        self._run(self.whole.copy_kernel, (-(-x.numel() // 1024),), x, out, x.numel(), BLOCK=1024)
        return out

    def linear(self, x: torch.Tensor, p: Weights, i: int, relu: bool = False, more: torch.Tensor | None = None) -> torch.Tensor:
        w, tile = p[f"w{i}"], self.ours.linear_rows_tile(x.shape[0], x.shape[1])
        added = 0 if more is None else ADDED
        return self.ours.launch_linear_rows(x, 0, w, p[f"b{i}"], False, relu, tile, self.launch, more, added)

    def norm(self, y: torch.Tensor, residual: torch.Tensor, p: Weights) -> torch.Tensor:
        # One part, which need not be FP32: layer_norm(y + residual) in one kernel, as PyTorch's compiler writes it.
        return self.ours.launch_sum_norm(y[None], p["zero"], residual, p["scale"], p["shift"], EPS, self.launch)

    def head(self, x: Inputs, p: Weights) -> torch.Tensor:
        return self.linear(self.linear(self.linear(x.data, p, 1, True), p, 2, True), p, 3)

    def ffn(self, x: Inputs, p: Weights) -> torch.Tensor:
        tile = self.ours.ffn_tile(x.data.shape[0])
        parts = self.ours.launch_ffn_rows(x.data, p["w1"], p["b1"], p["w2"], tile, launch=self.launch)
        return self.ours.launch_sum_norm(parts, p["b2"], x.data, p["scale"], p["shift"], EPS, self.launch)

    def layer_norm(self, x: Inputs, p: Weights) -> torch.Tensor:
        return self.norm(self.linear(x.data, p, 1), x.other, p)

    def chain(self, x: Inputs, p: Weights) -> torch.Tensor:
        """One kernel of a head (where there is a third layer) or of a feed-forward network, in the fastest of 7 tiles on an H200."""
        (rows, width), outputs = x.data.shape, len(p["w3"]) if "w3" in p else 0
        out = x.data.new_empty(rows, outputs or width)
        third = [p[name] if outputs else p["b2"] for name in ("w3", "b3")]
        given = (x.data, p["w1"], p["b1"], p["w2"], p["b2"], *third, p["scale"], p["shift"], out, rows)
        sizes: dict[str, Any] = {
            "WIDTH": width,
            "HIDDEN": len(p["w1"]),
            "OUTPUTS": outputs,
            "EPS": EPS,
            "BLOCK_M": 16,
            "BLOCK_H": 64,
        }
        self._run(self.whole.chain_kernel, (-(-rows // 16),), *given, **sizes, stages=3)
        return out

    def layer_norm_whole(self, x: Inputs, p: Weights) -> torch.Tensor:
        """One kernel of a layer with sum and norm, and of the next layer if there is one, in the fastest of 6 and 4 tiles on an H200."""
        (rows, width), outputs = x.data.shape, len(p["w2"]) if "w2" in p else 0
        normed, out = torch.empty_like(x.data), x.data.new_empty(rows, outputs or 1)
        second = [p[name] if outputs else p["b1"] for name in ("w2", "b2")]
        given = (x.data, p["w1"], p["b1"], x.other, p["scale"], p["shift"], *second, normed, out, rows)
        sizes: dict[str, Any] = {"WIDTH": width, "OUTPUTS": outputs, "EPS": EPS, "BLOCK_M": 16, "BLOCK_K": 64, "BLOCK_N": 64}
        self._run(self.whole.layer_norm_kernel, (-(-rows // 16),), *given, **sizes, warps=8 if outputs else 4, stages=3)
        return out if outputs else normed

    def norm_in_next(self, x: Inputs, p: Weights) -> torch.Tensor:
        """A kernel of the layer, and one of sum, norm and next layer, in the fastest of 4 tiles on an H200."""
        y, outputs, block = self.linear(x.data, p, 1), len(p["w2"]), 32 if x.data.shape[0] <= 512 else 64
        (rows, width), normed, out = y.shape, torch.empty_like(y), y.new_empty(y.shape[0], outputs)
        given = (y, x.other, p["scale"], p["shift"], p["w2"], p["b2"], normed, out, rows)
        sizes: dict[str, Any] = {"WIDTH": width, "OUTPUTS": outputs, "EPS": EPS, "BLOCK_M": 16, "BLOCK_N": block}
        self._run(self.whole.norm_layer_kernel, (-(-rows // 16), -(-outputs // block)), *given, **sizes)
        return out


def addmm(x: torch.Tensor, p: Weights, i: int | str, relu: bool = False) -> torch.Tensor:
    w, b = p[f"w{i}"].t(), p[f"b{i}"]
    return torch.ops.aten._addmm_activation.default(b, x, w) if relu else torch.addmm(b, x, w)


def exact(x: torch.Tensor, p: Weights, i: int) -> torch.Tensor:
    return F.linear(x, p[f"w{i}"], p[f"b{i}"])


def exact_norm(x: torch.Tensor, p: Weights) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], p["scale"], p["shift"], EPS)


class Case(NamedTuple):
    """layers: (outputs, inputs) of each. exact: of FP64. cublas, kernels: functions of `Ways`, inputs and weights; kernels: by their published names."""

    layers: list[tuple[int, int]]
    exact: Callable[[Inputs, Weights], torch.Tensor]
    cublas: Callable[[Ways, Inputs, Weights], Any]
    kernels: dict[str, Callable[[Ways, Inputs, Weights], torch.Tensor]]


def layer(name: str, inputs: int, outputs: int) -> Case:
    kernels = {name: lambda ways, x, p: ways.linear(x.data, p, 1)}
    return Case([(outputs, inputs)], lambda x, p: exact(x.data, p, 1), lambda ways, x, p: addmm(x.data, p, 1), kernels)


def feed_forward(hidden: int, **kernels: Callable) -> Case:
    return Case(
        [(hidden, 256), (256, hidden)],
        lambda x, p: exact_norm(x.data + exact(exact(x.data, p, 1).relu(), p, 2), p),
        lambda ways, x, p: ways.norm(addmm(addmm(x.data, p, 1, True), p, 2), x.data, p),
        {f"feed-forward network of {hidden}{name}": kernel for name, kernel in kernels.items()},
    )


WHOLE = "one kernel for 16 rows each"
NEXT = "layer with sum and norm, next layer"
CASES = [
    layer("a layer of 256 inputs and 256 outputs", 256, 256),
    layer("256 inputs, 1024 outputs", 256, 1024),
    layer("1024 inputs, 256 outputs", 1024, 256),
    Case(
        [(256, 256), (256, 256), (4, 256)],
        lambda x, p: exact(exact(exact(x.data, p, 1).relu(), p, 2).relu(), p, 3),
        lambda ways, x, p: addmm(addmm(addmm(x.data, p, 1, True), p, 2, True), p, "3 padded")[:, :4],
        {"head of three layers": Ways.head, f"head of three layers, {WHOLE}": Ways.chain},
    ),
    feed_forward(1024, **{" with sum and norm, hidden units in 16 parts": Ways.ffn, f", {WHOLE}": Ways.chain}),
    feed_forward(2048, **{", hidden units in 16 parts": Ways.ffn}),
    Case(
        [(256, 256)],
        lambda x, p: exact_norm(exact(x.data, p, 1) + x.other, p),
        lambda ways, x, p: ways.norm(addmm(x.data, p, 1), x.other, p),
        {"layer with sum and norm": Ways.layer_norm, f"layer with sum and norm, {WHOLE}": Ways.layer_norm_whole},
    ),
    Case(
        [(256, 256), (288, 256)],
        lambda x, p: exact(exact_norm(exact(x.data, p, 1) + x.other, p), p, 2),
        lambda ways, x, p: addmm(ways.norm(addmm(x.data, p, 1), x.other, p), p, 2),
        {
            NEXT: lambda ways, x, p: ways.linear(ways.layer_norm(x, p), p, 2),
            f"{NEXT}: {WHOLE}": Ways.layer_norm_whole,
            f"{NEXT}: norm in the kernel of the next layer": Ways.norm_in_next,
        },
    ),
    Case(
        [(ADDED, 256), (256, 256)],
        lambda x, p: torch.cat([exact(x.summed, p, 1), exact(x.data, p, 2)], 1),
        lambda ways, x, p: (addmm(x.summed, p, 1), addmm(x.data, p, 2)),
        {"query, key and value of two inputs in one kernel": lambda ways, x, p: ways.linear(x.data, p, 12, more=x.other)},
    ),
]


def drawn_inputs(case: Case, rows: int, like: torch.Tensor) -> Inputs:
    """like: of the data type and device to draw."""
    torch.manual_seed(0)
    data, other = (torch.randn(rows, case.layers[0][1]).to(like) for _ in range(2))
    return Inputs(data, other, data + other)


def drawn_weights(case: Case, like: torch.Tensor) -> Weights:
    p: Weights = {"zero": torch.zeros(256), "scale": 1 + 0.1 * torch.randn(256), "shift": torch.randn(256)}
    for i, (outputs, inputs) in enumerate(case.layers, 1):
        p[f"w{i}"], p[f"b{i}"] = torch.randn(outputs, inputs) / inputs**0.5, torch.randn(outputs)
    if "w2" in p and p["w1"].shape[1] == p["w2"].shape[1]:
        p["w12"], p["b12"] = torch.cat([p["w1"], p["w2"]]), torch.cat([p["b1"], p["b2"]])
    if "w3" in p:  # a package pads four outputs to eight for cuBLAS
        p["w3 padded"], p["b3 padded"] = F.pad(p["w3"], (0, 0, 0, 4)), F.pad(p["b3"], (0, 4))
    return {name: t.to(like) for name, t in p.items()}


def difference(call: Callable, case: Case, ways: Ways, x: Inputs, p: Weights) -> float:
    """Of a result from FP64's, relative."""
    got = call(ways, x, p)
    got = torch.cat(got, 1) if isinstance(got, tuple) else got
    want = case.exact(Inputs(*(t.double() for t in x)), {name: t.double() for name, t in p.items()})
    return float((got.double() - want).norm() / want.norm())


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("out", metavar="OUT.jsonl")
    parser.add_argument("--rows", type=at_least(1), nargs="+", default=[100, 300, 900], metavar="N")
    given = parser.parse_args()
    require_gpu()
    from detrt.backends.inductor.early import starts_early

    if not starts_early(torch.device("cuda")):
        stop("needs a GPU on which kernels start early (Hopper or newer) and PyTorch 2.10 or newer")
    torch.set_grad_enabled(False)
    ways, like = Ways(Early), torch.empty(0, dtype=torch.float16, device="cuda")
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def microseconds(call: Callable, x: Inputs, sets: list[Weights]) -> float:
        behind = lambda p: call(ways, x._replace(data=ways.copy(x.data)), p)  # noqa: E731
        return graph_microseconds(behind, [(p,) for p in sets], REPEATS, REPLAYS, flush.zero_)

    first: list[Weights] = [{}] * REPEATS
    before = {n: microseconds(lambda ways, x, p: x.data, drawn_inputs(CASES[0], n, like), first) for n in given.rows}
    with open(given.out, "w", encoding="utf-8") as out:
        out.write(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "before, us": before}) + "\n")
        for case in CASES:
            sets = [drawn_weights(case, like) for _ in range(REPEATS)]
            rows: dict[str, dict] = {name: {"table": "few rows", "layers": name, "error": 0.0} for name in case.kernels}
            for n in given.rows:
                x, found = drawn_inputs(case, n, like), {}
                for name, call in {"cublas": case.cublas, **case.kernels}.items():
                    error = difference(call, case, ways, x, sets[0])
                    found[name] = error, round(microseconds(call, x, sets) - before[n], 1)
                for name, row in rows.items():
                    row["error"] = max(row["error"], found[name][0])
                    row |= {f"{n} rows, us": found[name][1], f"{n} rows with cuBLAS, us": found["cublas"][1]}
            for row in rows.values():
                print(line := json.dumps(row))
                out.write(line + "\n")
                out.flush()
    return 0


if __name__ == "__main__":
    run(main)
