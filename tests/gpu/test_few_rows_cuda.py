"""Linear layers over few rows on an NVIDIA GPU, alone and in compiled code that starts kernels early: `pytest -m gpu tests/gpu/test_few_rows_cuda.py`."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")

import torch.nn.functional as F
from relative_norm import relative

from detrt.backends.inductor.early import early_start, starts_early
from detrt.backends.inductor.kernels import attention, ffn_rows, linear_rows

pytestmark = pytest.mark.gpu

TYPES = {"fp16": (torch.float16, 1e-3), "bf16": (torch.bfloat16, 8e-3)}


def parameters(dtype, *shapes):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(*shape, generator=generator) for shape in shapes]
    return [(t / t.shape[-1] ** 0.5 if t.ndim == 2 else t).to(dtype) for t in made]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(300, 256, 288), (100, 4, 512), (900, 256, 256), (300, 1024, 256), (7, 384, 8)]
)
def test_layers_equal_fp64(rows, inputs, outputs, kind):
    dtype, allowed = TYPES[kind]
    data, weight, bias = parameters(dtype, (1, rows, inputs + 64), (outputs, inputs), (outputs,))
    for before, after in ((False, False), (True, True)):
        part = data[..., 64:].double()
        want = F.linear(part.relu() if before else part, weight.double(), bias.double())
        got = linear_rows(data.cuda(), 64, weight.cuda(), bias.cuda(), before, after)
        assert relative(got, want.relu() if after else want) < allowed


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "added"), [(300, 256, 768, 512), (900, 256, 512, 512), (300, 1024, 256, 64)]
)
def test_layers_of_sums_equal_fp64(rows, inputs, outputs, added, kind):
    dtype, allowed = TYPES[kind]
    data, more, weight, bias = parameters(dtype, (1, rows, inputs), (1, rows, inputs), (outputs, inputs), (outputs,))
    weights, biases = weight.double().split([added, outputs - added]), bias.double().split([added, outputs - added])
    total = (data + more).double()
    want = torch.cat([F.linear(x, w, b) for x, w, b in zip((total, data.double()), weights, biases, strict=True)], -1)
    got = linear_rows(data.cuda(), 0, weight.cuda(), bias.cuda(), False, False, more.cuda(), added)
    assert relative(got, want) < allowed


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(("rows", "width", "hidden"), [(300, 256, 1024), (100, 256, 2048), (21, 192, 1024)])
def test_feed_forward_networks_equal_fp64(rows, width, hidden, kind):
    dtype, allowed = TYPES[kind]
    shapes = ((1, rows, width), (hidden, width), (hidden,), (width, hidden), (width,), (width,), (width,))
    given = parameters(dtype, *shapes)
    data, up, bias1, down, bias2, scale, shift = (t.double() for t in given)
    total = data + F.linear(F.linear(data, up, bias1).relu(), down, bias2)
    for limit in (0.0, 1.0):
        want = F.layer_norm(total.clamp(-limit, limit) if limit else total, (width,), scale, shift, 1e-5)
        assert relative(ffn_rows(*(t.cuda() for t in given), 1e-5, limit), want) < 2 * allowed


def test_kernels_start_early_and_wait_for_each_other():
    if not starts_early(torch.device("cuda")):
        pytest.skip("needs Hopper or newer, and PyTorch 2.10 or newer")
    from torch._inductor.utils import run_and_get_code

    data, up, bias1, down, bias2, scale, shift = (
        t.cuda() for t in parameters(torch.float16, (1, 300, 256), (1024, 256), (1024,), (256, 1024), (256,), (256,), (256,))
    )

    def layers(x):
        for _ in range(20):
            y = torch.sin(linear_rows(x * 1.5, 0, up[:256], bias1[:256], False, False))
            y = linear_rows(x, 0, up[:768], bias1[:768], False, False, y, 512)
            x = attention(y, y, y, [0, 256, 512], 8, 32, 0.2) + x
            x = ffn_rows(x, up, bias1, down, bias2, scale, shift, 1e-5)
        return x

    torch._dynamo.reset()
    with early_start(), torch._inductor.config.patch({"triton.enable_pdl": True, "force_disable_caches": True}):
        compiled = torch.compile(layers, fullgraph=True)
        want, code = run_and_get_code(compiled, data)
    text = "\n".join(code)
    assert "'EARLY': False" not in text
    assert text.count("'launch_pdl': True") >= text.count("'EARLY': True") >= 4
    assert relative(want, layers(data)) < 0.02
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compiled(data)
    for _ in range(100):  # a kernel that reads too early reads what the replay before it left, or the memory of another step
        graph.replay()
        assert torch.equal(out, want)
