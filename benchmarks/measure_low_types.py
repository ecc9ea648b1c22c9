"""FP8 and INT8 products by PyTorch's own kernels against FP16, at the products of five detectors, on one NVIDIA GPU.

    python benchmarks/measure_low_types.py OUT.json [MODEL ...]     # MODEL: a key of PRODUCTS; default: all

Microseconds of one call as GPU work alone (a CUDA graph of 10 calls over rotating inputs, median of replays). "ready" times the
product of inputs that are already quantised; "whole" adds the step that quantises the activations with a fixed scale
(compiled by PyTorch into one kernel), which is what a model pays where it cannot go into the step before. "best" takes the faster
of FP16 and FP8 for each product, with that step and without it: the least that FP8 by these kernels can reach. Weights are quantised beforehand, a scale for each output channel. Results are compared with FP64 first.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from program import graph_microseconds, make_parser, require_gpu, run

from detrt.errors import one_line

# model -> (rows, in, out, how many of them in one run at batch 1)
PRODUCTS = {
    "detr 800x1066": [(850, 256, 512, 6), (850, 256, 256, 12), (850, 256, 2048, 6), (850, 2048, 256, 6), (100, 256, 256, 30)],
    "detr 800x1066 batch 16": [(13600, 256, 512, 6), (13600, 256, 256, 12), (13600, 256, 2048, 6), (13600, 2048, 256, 6)],
    "rt_detr_v2 640x640": [(400, 256, 1024, 1), (400, 1024, 256, 1), (8400, 256, 256, 8), (304, 256, 1024, 6), (304, 1024, 256, 6)],
    "grounding_dino 800x1200": [
        (60000, 96, 288, 2), (60000, 96, 384, 2), (60000, 384, 96, 2), (15000, 192, 576, 2), (15000, 192, 768, 2),
        (15000, 768, 192, 2), (3750, 384, 1152, 6), (3750, 384, 1536, 6), (3750, 1536, 384, 6), (960, 768, 2304, 2),
        (960, 768, 3072, 2), (960, 3072, 768, 2), (19952, 256, 256, 18), (19952, 256, 1024, 6), (19952, 256, 2048, 6),
        (19952, 2048, 256, 6), (912, 256, 2048, 6), (912, 2048, 256, 6),
    ],
    "co_dino-swin-l 768x1152": [
        (55296, 192, 576, 2), (55296, 192, 768, 2), (55296, 768, 192, 2), (13824, 384, 1152, 2), (13824, 384, 1536, 2),
        (13824, 1536, 384, 2), (3456, 768, 2304, 18), (3456, 768, 3072, 18), (3456, 3072, 768, 18), (864, 1536, 4608, 2),
        (864, 1536, 6144, 2), (864, 6144, 1536, 2), (73656, 256, 256, 18), (73656, 256, 480, 6), (73656, 256, 2048, 6),
        (73656, 2048, 256, 6), (912, 256, 2048, 6), (912, 2048, 256, 6),
    ],
}  # fmt: skip
PRODUCTS["rf_detr 560x560 batch 16"] = [
    (25856, 384, 1152, 12), (25856, 384, 384, 12), (25856, 384, 1536, 12), (25856, 1536, 384, 12), (25600, 1536, 256, 1),
    (25600, 256, 256, 4), (4800, 256, 768, 3), (4800, 256, 256, 6), (4800, 256, 2048, 3), (4800, 2048, 256, 3),
]  # fmt: skip
PRODUCTS["grounding_dino 800x1200 batch 16"] = [
    (16 * rows, width, out, count) for rows, width, out, count in PRODUCTS["grounding_dino 800x1200"]
]
CALLS, REPLAYS = 10, 25
FP8 = torch.float8_e4m3fn


def quantised(dtype) -> Callable:
    largest = 448.0 if dtype == FP8 else 127.0

    def step(x, inverse):
        y = x.float() * inverse
        y = y.clamp(-largest, largest)
        return (y if dtype == FP8 else y.round()).to(dtype)

    return step


def measure(rows: int, width: int, out: int, quantise: dict) -> dict:
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(out, width, generator=generator, device="cuda") / width**0.5
    bias = torch.randn(out, generator=generator, device="cuda").half()
    count = min(CALLS, max(2, -(-120_000_000 // (2 * rows * (width + out)))))
    inputs = [torch.randn(rows, width, generator=generator, device="cuda").half() for _ in range(count)]
    half = weight.half()
    want = inputs[0].double() @ weight.double().t() + bias.double()
    found: dict = {"rows": rows, "in": width, "out": out}

    def compared(key: str, call: Callable, sets: list) -> None:
        try:
            got = call(*sets[0])
            found[key + " error"] = float((got.double() - want).norm() / want.norm())
            found[key] = round(graph_microseconds(call, sets, CALLS, REPLAYS), 2)
        except Exception as error:
            found[key] = one_line(error, 160)

    compared("fp16", lambda x: torch.addmm(bias, x, half.t()), [(x,) for x in inputs])
    peak = 4.5  # of normal numbers: a calibrated scale cuts off next to nothing
    one = torch.ones((), device="cuda")
    # FP8, one scale for the activations, one for the weights
    inverse = torch.full((), 448 / peak, device="cuda")
    scale, weight_scale = torch.full((), peak / 448, device="cuda"), weight.abs().max() / 448
    low = quantise[FP8](weight, 1 / weight_scale).t()
    ready = [(quantise[FP8](x, inverse),) for x in inputs]
    product = lambda x: torch._scaled_mm(x, low, scale, weight_scale, bias=bias, out_dtype=torch.float16, use_fast_accum=True)  # noqa: E731
    compared("fp8 tensor ready", product, ready)
    compared("fp8 tensor whole", lambda x: product(quantise[FP8](x, inverse)), [(x,) for x in inputs])
    # FP8, a scale for each row and each output channel; the scales of the rows are fixed here
    row_scale, channel = torch.full((rows, 1), peak / 448, device="cuda"), weight.abs().amax(1) / 448
    fine = quantise[FP8](weight, 1 / channel[:, None]).t()
    rowwise = lambda x: torch._scaled_mm(x, fine, row_scale, channel[None], bias=bias.bfloat16(), out_dtype=torch.bfloat16)  # noqa: E731
    compared("fp8 row ready", rowwise, ready)
    # INT8, a scale for each output channel
    step, channel8 = peak / 127, weight.abs().amax(1) / 127
    inverse8, rescale = one / step, channel8 * step
    whole = quantise[torch.int8](weight, 1 / channel8[:, None]).t()
    ready8 = [(quantise[torch.int8](x, inverse8),) for x in inputs]
    back = quantise["back"]
    restored = lambda x: back(torch._int_mm(x, whole), rescale, bias)  # noqa: E731
    compared("int8 ready", restored, ready8)
    compared("int8 whole", lambda x: restored(quantise[torch.int8](x, inverse8)), [(x,) for x in inputs])
    return found


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("out", metavar="OUT.json")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: all of {', '.join(PRODUCTS)}")
    given = parser.parse_args()
    if unknown := sorted(set(given.models) - set(PRODUCTS)):
        parser.error(f"argument MODEL: {', '.join(unknown)}; known are {', '.join(PRODUCTS)}")
    require_gpu()
    torch.set_grad_enabled(False)
    quantise: dict = {dtype: torch.compile(quantised(dtype), dynamic=True) for dtype in (FP8, torch.int8)}

    def back(y: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return (y.float() * scale + bias).half()

    quantise["back"] = torch.compile(back, dynamic=True)
    known: dict[tuple, dict] = {}
    report: dict = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "models": {}}
    keys = ("fp16", "fp8 tensor ready", "fp8 tensor whole", "fp8 row ready", "int8 ready", "int8 whole")
    for model in given.models or PRODUCTS:
        products = PRODUCTS[model]
        sums = dict.fromkeys((*keys, "fp8 best ready", "fp8 best whole"), 0.0)
        for rows, width, out, count in products:
            row = known.get((rows, width, out)) or measure(rows, width, out, quantise)
            known[rows, width, out] = row
            for key in keys:
                value = row.get(key)
                # What a kernel refuses stays in FP16.
                sums[key] += count * (value if isinstance(value, float) else row["fp16"])
            for step in ("ready", "whole"):
                value = row.get(f"fp8 tensor {step}")
                sums[f"fp8 best {step}"] += count * min(row["fp16"], value if isinstance(value, float) else row["fp16"])
        report["models"][model] = {key: round(value / 1000, 3) for key, value in sums.items()}
        report["products"] = list(known.values())
        with open(given.out, "w") as file:
            json.dump(report, file, indent=1)
        print(model, "ms:", report["models"][model], flush=True)
    for row in known.values():
        print(row, flush=True)
    return 0


if __name__ == "__main__":
    run(main)
