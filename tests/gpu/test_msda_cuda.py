"""The Triton kernel of deformable attention on an NVIDIA GPU, against FP64 on the CPU: `pytest -m gpu tests/gpu/test_msda_cuda.py`."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")

from relative_norm import relative

from detrt.models.ops import ms_deform_attn, ms_deform_attn_fused, triton_available
from detrt.models.ops.msda_tiles import Tile

pytestmark = pytest.mark.gpu

TYPES = {"fp32": (torch.float32, 1e-5), "fp16": (torch.float16, 1e-3), "bf16": (torch.bfloat16, 8e-3)}
ENCODER = ((100, 134), (50, 67), (25, 34), (13, 17))
SHAPES = {
    # levels, points, batch, heads, head_dim, queries
    "encoder": (ENCODER, (4,) * 4, 1, 8, 32, 0),
    "decoder": (ENCODER, (4,) * 4, 2, 8, 32, 900),
    "rt-detr": (((80, 80), (40, 40), (20, 20)), (4,) * 3, 1, 8, 32, 300),
    "d-fine": (((80, 80), (40, 40), (20, 20)), (3, 6, 3), 3, 8, 32, 300),
    "rf-detr": (((32, 32),), (2,), 2, 16, 16, 300),
    "head 64": (((30, 40), (15, 20)), (4, 4), 2, 4, 64, 100),
    "head 48": (((30, 40), (15, 20)), (4, 4), 2, 4, 48, 100),
    "head 14": (((20, 20), (10, 10)), (4, 2), 2, 8, 14, 77),
    "head 5": (((6, 9), (3, 5), (2, 3)), (3, 6, 1), 2, 3, 5, 33),
    "one cell": (((1, 1), (3, 1)), (2, 2), 1, 2, 8, 5),
    "five levels": (((64, 48), (32, 24), (16, 12), (8, 6), (4, 3)), (4,) * 5, 1, 8, 32, 900),
    "wide": (((300, 480), (150, 240)), (4, 4), 1, 2, 32, 500),
    "many points": (((16, 12), (8, 6)), (40, 41), 1, 2, 16, 50),
}


@pytest.fixture(autouse=True)
def _needs_triton() -> None:
    if not triton_available():
        pytest.skip("needs Triton")


def tensors(name: str, dtype, seed: int = 0, spread: float = 1.3):
    levels, points, batch, heads, dim, queries = SHAPES[name]
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(h * w for h, w in levels)
    queries, total = queries or tokens, sum(points)
    shapes = torch.tensor(levels)
    value = torch.randn(batch, tokens, heads, dim, generator=generator).to(dtype)
    locations = 0.5 + spread * (torch.rand(batch, queries, heads, total, 2, generator=generator) - 0.5)
    weights = torch.randn(batch, queries, heads, total, generator=generator).softmax(-1).to(dtype)
    return value, shapes, locations, weights, list(points)


def on_gpu(*given):
    return [x.cuda() if isinstance(x, torch.Tensor) else x for x in given]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", SHAPES)
def test_kernel_equals_fp64(name: str, kind: str) -> None:
    dtype, allowed = TYPES[kind]
    value, shapes, locations, weights, points = tensors(name, dtype, seed=len(name))
    expected = ms_deform_attn(value.double(), shapes, locations.double(), weights.double(), points)
    found = ms_deform_attn(*on_gpu(value, shapes, locations, weights, points))
    assert found.dtype == dtype
    assert relative(found, expected) < allowed


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("sides", [2, 4])
@pytest.mark.parametrize("name", ["decoder", "d-fine", "rf-detr", "head 14", "five levels", "wide"])
def test_fused_kernel_equals_fp64(name: str, sides: int, kind: str) -> None:
    dtype, allowed = TYPES[kind]
    value, shapes, locations, _, points = tensors(name, dtype, seed=7)
    generator = torch.Generator().manual_seed(1)
    batch, queries, heads, total, _ = locations.shape
    offsets = (2 * torch.randn(locations.shape, generator=generator)).to(dtype)
    logits = (3 * torch.randn(batch, queries, heads, total, generator=generator)).to(dtype)
    for levels in (1, len(points)):
        references = torch.rand(batch, queries, levels, sides, generator=generator)
        args = (value, shapes, references, offsets, logits, points)
        doubled = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
        expected = ms_deform_attn_fused(*doubled)
        assert relative(ms_deform_attn_fused(*on_gpu(*args)), expected) < allowed


@pytest.mark.parametrize("discrete", [False, True])
def test_places_outside_and_not_numbers(discrete: bool) -> None:
    value, shapes, locations, weights, points = tensors("d-fine", torch.float32, spread=3.0)
    for row, bad in enumerate((float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 0.0, 1.0)):
        locations[0, row, :, 0, 0] = bad
        locations[1, row, :, 1, 1] = bad
    expected = ms_deform_attn(value.double(), shapes, locations.double(), weights.double(), points, discrete)
    found = ms_deform_attn(*on_gpu(value, shapes, locations, weights, points), discrete)
    assert torch.isfinite(found).all()
    if discrete:  # a place within rounding of the edge between two cells belongs to either; all others must be equal
        assert float((found.cpu() - expected).abs().amax(-1).gt(1e-4).double().mean()) < 1e-3
    else:
        assert relative(found, expected) < 1e-5


@pytest.mark.parametrize("tile", [Tile(8, 1, 1), Tile(4, 4, 2), Tile(1, 0, 1), Tile(4, 0, 4, True), Tile(16, 2, 4, True)])
def test_every_tile_gives_the_same(tile: Tile) -> None:
    from detrt.models.ops.msda_launch import launch_msda

    for name in ("rt-detr", "head 5"):
        value, shapes, locations, weights, points = tensors(name, torch.float32)
        expected = ms_deform_attn(value.double(), shapes, locations.double(), weights.double(), points)
        found = launch_msda(*on_gpu(value, shapes), None, *on_gpu(locations, weights, points), tile=tile)
        assert relative(found, expected) < 1e-5


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", ["encoder", "d-fine", "head 64", "rf-detr", "one cell"])
def test_kernel_for_many_queries(name: str, kind: str) -> None:
    """Forced for few, too: every type, heads side by side, odd points, references, places that are not numbers."""
    from detrt.models.ops.msda_launch import launch_msda

    dtype, allowed = TYPES[kind]
    value, shapes, locations, weights, points = tensors(name, dtype, spread=2.0)
    for row, bad in enumerate((float("nan"), float("inf"), -float("inf"), 1e30, -1e30)):
        locations[0, row, :, 0, 0] = locations[0, row, :, 1, 1] = bad
    heads_per_program = 1 if value.shape[3] == 64 else 2
    expected = ms_deform_attn(value.double(), shapes, locations.double(), weights.double(), points)
    for tile in (Tile(16, 4, 4, heads_per_program=heads_per_program), Tile(8, 2, 1, heads_per_program=heads_per_program)):
        found = launch_msda(*on_gpu(value, shapes), None, *on_gpu(locations, weights, points), tile=tile)
        assert relative(found, expected) < allowed
        assert launch_msda(*on_gpu(value, shapes * 2), None, *on_gpu(locations, weights, points), tile=tile).isnan().all()
    offsets, logits = (2 * torch.randn(locations.shape)).to(dtype), torch.randn(weights.shape).to(dtype)
    references = torch.rand(1, locations.shape[1], 1, 4)
    args = (value, shapes, references, offsets, logits, points)
    doubled = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args]
    found = launch_msda(*on_gpu(*args), tile=Tile(16, 4, 4, heads_per_program=heads_per_program))
    assert relative(found, ms_deform_attn_fused(*doubled)) < allowed


def test_every_element_is_written_and_nothing_else() -> None:
    value, shapes, locations, weights, points = on_gpu(*tensors("head 5", torch.float32))
    torch.cuda.empty_cache()
    poison = torch.full((1 << 22,), float("nan"), device="cuda")
    del poison
    assert torch.isfinite(ms_deform_attn(value, shapes, locations, weights, points)).all()


def test_int32_shapes_empty_batches_slices_and_host_shapes() -> None:
    value, shapes, locations, weights, points = on_gpu(*tensors("rt-detr", torch.float16))
    expected = ms_deform_attn(value, shapes, locations, weights, points)
    assert torch.equal(ms_deform_attn(value, shapes.int(), locations, weights, points), expected)
    assert torch.equal(ms_deform_attn(value, shapes.cpu(), locations, weights, points), expected)
    both = torch.stack([value, value + 1], 2)[:, :, 0]  # every second head block: tokens further apart
    assert torch.equal(ms_deform_attn(both, shapes, locations, weights, points), expected)
    odd = value.transpose(2, 3).contiguous().transpose(2, 3)
    assert torch.equal(ms_deform_attn(odd, shapes, locations, weights, points), expected)
    assert ms_deform_attn(value[:0], shapes, locations[:0], weights[:0], points).shape == (0, 300, 256)
    assert ms_deform_attn(value, shapes, locations[:, :0], weights[:, :0], points).shape == (1, 0, 256)


def test_sizes_that_do_not_fit_give_no_numbers() -> None:
    value, shapes, locations, weights, points = on_gpu(*tensors("rt-detr", torch.float32))
    for wrong in (shapes * 2, shapes - 1, shapes.flip(0) * 3):
        assert ms_deform_attn(value, wrong, locations, weights, points).isnan().all()


def test_indices_beyond_32_bits() -> None:
    """A value of 2**31 elements and more: the last token is read."""
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of GPU memory")
    side, heads, dim = 4096, 8, 32
    value = torch.zeros(1, side * side, heads, dim, dtype=torch.float16, device="cuda")
    value[:, -1] = 3.0
    shapes = torch.tensor([[side, side]], device="cuda")
    locations = torch.full((1, 4, heads, 1, 2), 1 - 0.5 / side, device="cuda")
    found = ms_deform_attn(value, shapes, locations, torch.ones(1, 4, heads, 1, device="cuda"), [1])
    assert torch.equal(found, torch.full_like(found, 3.0))


def test_compiled_without_a_break_and_for_another_size() -> None:
    value, shapes, locations, weights, points = on_gpu(*tensors("rt-detr", torch.float16))

    def layer(value, shapes, locations, weights):
        return ms_deform_attn(value * 2, shapes, locations, weights, points) + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for count in (300, 41):
        args = (value, shapes, locations[:, :count], weights[:, :count])
        assert relative(compiled(*args), layer(*args).double().cpu()) < 1e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(value, shapes, locations, weights)
    graph.replay()
    assert torch.equal(out, layer(value, shapes, locations, weights))


PACKED = """
import sys, torch
from detrt.models.ops import ms_deform_attn_fused

class Plain(torch.nn.Linear):
    pass

class Layer(torch.nn.Module):
    def forward(self, value, shapes, references, offsets, logits):
        return ms_deform_attn_fused(value * 2, shapes, references, offsets, logits, [4, 4, 4]) + 1

if sys.argv[2] == "plain":
    module, args = Plain(4, 4).cuda(), (torch.randn(2, 4, device="cuda"),)
else:
    shapes = torch.tensor([[80, 80], [40, 40], [20, 20]], device="cuda")
    half = dict(dtype=torch.float16, device="cuda")
    args = (torch.randn(1, 8400, 8, 32, **half), shapes, torch.rand(1, 300, 1, 4, device="cuda"))
    args += (torch.randn(1, 300, 8, 12, 2, **half), torch.randn(1, 300, 8, 12, **half))
    module = Layer()
with torch.no_grad():
    program = torch.export.export(module, args)
    whole = sum("ms_deform_attn_fused" in str(node.target) for node in program.graph.nodes)
    path = torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1])
    found, expected = torch._inductor.aoti_load_package(path)(*args).float(), module(*args).float()
print(whole, float((found - expected).norm() / expected.norm()))
"""


def test_exported_program_packs_the_kernel(tmp_path) -> None:
    """AOTInductor takes the kernel into its package; the program holds one node until then."""

    def packed(what: str):
        command = [sys.executable, "-c", PACKED, str(tmp_path / f"{what}.pt2"), what]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    if packed("plain").returncode < 0:
        pytest.skip(f"torch {torch.__version__} crashes here when it loads the AOTInductor package of one Linear")
    done = packed("kernel")
    assert done.returncode == 0, done.stderr[-3000:]
    whole, difference = done.stdout.split()[-2:]
    assert int(whole) == 1
    assert float(difference) < 1e-3
