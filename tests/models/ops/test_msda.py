"""The ops of deformable attention without a GPU: definition, shapes, export, compilation, the models that use them."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")

from interpreted import run_interpreted
from relative_norm import relative

from detrt.models.ops import install, ms_deform_attn, ms_deform_attn_fused, triton_available
from detrt.models.ops import msda as portable
from detrt.models.ops.msda_tiles import Tile, choose

LEVELS = ((9, 12), (5, 6), (3, 3))
POINTS = [3, 6, 3]


def tensors(dtype=torch.float32, *, batch=2, heads=2, dim=8, queries=7, spread=1.6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(h * w for h, w in LEVELS)
    value = torch.randn(batch, tokens, heads, dim, generator=generator).to(dtype)
    locations = 0.5 + spread * (torch.rand(batch, queries, heads, sum(POINTS), 2, generator=generator) - 0.5)
    weights = torch.randn(batch, queries, heads, sum(POINTS), generator=generator).softmax(-1)
    return value, torch.tensor(LEVELS), locations, weights


def fused_tensors(sides=4, levels=1, **choices):
    value, shapes, locations, _ = tensors(**choices)
    generator = torch.Generator().manual_seed(9)
    offsets = 2 * torch.randn(locations.shape, generator=generator)
    logits = 3 * torch.randn(locations.shape[:-1], generator=generator)
    references = torch.rand(value.shape[0], locations.shape[1], levels, sides, generator=generator)
    return value, shapes, references, offsets, logits


@pytest.mark.parametrize("discrete", [False, True])
def test_traceable_form_equals_the_definition(discrete):
    value, shapes, locations, weights = tensors(spread=3.0)
    for row, bad in enumerate((float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 0.0, 1.0)):
        locations[0, row, 0, 0, 0] = bad
        locations[1, row, 1, 4, 1] = bad
    expected = portable.reference(value.double(), shapes, locations.double(), weights.double(), POINTS, discrete)
    assert torch.isfinite(expected).all()
    for form in (portable.reference, portable.traceable_reference, ms_deform_attn):
        assert relative(form(value, shapes, locations, weights, POINTS, discrete), expected) < 1e-6


@pytest.mark.parametrize("discrete", [False, True])
def test_location_that_is_not_a_number_contributes_zero(discrete):
    value, shapes, locations, weights = tensors()
    locations[..., 0, 1] = float("nan")
    without = weights.clone()
    without[..., 0] = 0
    safe = locations.nan_to_num(0.5)
    found = ms_deform_attn(value, shapes, locations, weights, POINTS, discrete)
    torch.testing.assert_close(found, ms_deform_attn(value, shapes, safe, without, POINTS, discrete))


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_half_values_are_summed_in_full_precision(dtype, allowed):
    """Coordinates in FP16 would be off by more than this on a level of this width."""
    shapes, points = torch.tensor([[4, 320]]), [8]
    generator = torch.Generator().manual_seed(3)
    value = torch.randn(1, 1280, 2, 16, generator=generator).to(dtype)
    locations = torch.rand(1, 50, 2, 8, 2, generator=generator)
    weights = torch.rand(1, 50, 2, 8, generator=generator).to(dtype)
    expected = ms_deform_attn(value.double(), shapes, locations.double(), weights.double(), points)
    for form in (ms_deform_attn, portable.traceable_reference):
        found = form(value, shapes, locations, weights, points)
        assert found.dtype == dtype
        assert relative(found, expected) < allowed
        assert relative(form(value, shapes, locations.to(dtype), weights, points), expected) > 10 * allowed


@pytest.mark.parametrize("levels", [1, 3])
@pytest.mark.parametrize("sides", [2, 4])
def test_fused_op_equals_its_parts_by_hand(sides, levels):
    value, shapes, references, offsets, logits = fused_tensors(sides, levels)
    level_of = torch.repeat_interleave(torch.arange(3), torch.tensor(POINTS))
    centres = references.expand(-1, -1, 3, -1)[:, :, level_of].unsqueeze(2)  # (batch, queries, 1, points, sides)
    if sides == 2:
        locations = centres + offsets / shapes.flip(-1)[level_of]
    else:
        share = 1 / torch.tensor(POINTS, dtype=torch.float32)[level_of].unsqueeze(-1)
        locations = centres[..., :2] + offsets * share * 0.25 * centres[..., 2:]
    expected = ms_deform_attn(value, shapes, locations, logits.softmax(-1), POINTS)
    found = ms_deform_attn_fused(value, shapes, references, offsets, logits, POINTS, 0.25)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_empty_batch_and_no_queries():
    value, shapes, locations, weights = tensors()
    assert ms_deform_attn(value[:0], shapes, locations[:0], weights[:0], POINTS).shape == (0, 7, 16)
    assert ms_deform_attn(value, shapes, locations[:, :0], weights[:, :0], POINTS).shape == (2, 0, 16)


def test_shapes_that_do_not_belong_together():
    value, shapes, locations, weights = tensors()
    for wrong, word in (
        ((value, shapes, locations[..., :5, :], weights, POINTS), "12 points"),
        ((value, shapes, locations, weights[..., :5], POINTS), "weights"),
        ((value, shapes[:2], locations, weights, POINTS), "spatial_shapes"),
        ((value, shapes, locations, weights, [3, 6, 0]), "positive"),
        ((value[0], shapes, locations, weights, POINTS), "head_dim"),
    ):
        with pytest.raises(ValueError, match=word):
            ms_deform_attn(*wrong)
        with pytest.raises(ValueError, match=word), torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            ms_deform_attn(*wrong)
    value, shapes, references, offsets, logits = fused_tensors()
    with pytest.raises(ValueError, match="reference_points"):
        ms_deform_attn_fused(value, shapes, references[..., :3], offsets, logits, POINTS)


@pytest.mark.parametrize(
    "checks", [("test_schema", "test_faketensor"), pytest.param(("test_aot_dispatch_dynamic",), marks=pytest.mark.slow)]
)
def test_opcheck(checks):
    """The quick tests below export and compile the operator with a symbolic batch."""
    torch.library.opcheck(torch.ops.detrt.ms_deform_attn.default, (*tensors(), POINTS), test_utils=checks)
    torch.library.opcheck(torch.ops.detrt.ms_deform_attn_fused.default, (*fused_tensors(), POINTS), test_utils=checks)


class Layer(torch.nn.Module):
    def forward(self, value, shapes, references, offsets, logits):
        return ms_deform_attn_fused(value + 1, shapes, references, offsets, logits, POINTS) * 2


def test_exported_program_keeps_one_node_of_any_batch():
    args = fused_tensors()
    batch = torch.export.Dim("batch", min=2, max=64)
    dynamic = ({0: batch}, None, {0: batch}, {0: batch}, {0: batch})
    program = torch.export.export(Layer(), args, dynamic_shapes=dynamic)
    assert [str(n.target) for n in program.graph.nodes if "detrt" in str(n.target)] == ["detrt.ms_deform_attn_fused.default"]
    more = fused_tensors(batch=3)
    torch.testing.assert_close(program.module()(*more), Layer()(*more))


def test_compiled_program_is_one_graph_of_plain_operators():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    from torch._dynamo.backends.common import aot_autograd

    compiled = torch.compile(Layer(), backend=aot_autograd(fw_compiler=backend), fullgraph=True)
    with torch.no_grad():
        found = compiled(*fused_tensors())
    torch.testing.assert_close(found, Layer()(*fused_tensors()), rtol=1e-4, atol=1e-5)
    targets = [str(n.target) for graph in graphs for n in graph.graph.nodes if n.op == "call_function"]
    assert len(graphs) == 1
    assert targets
    assert not [t for t in targets if "detrt" in t]
    torch._dynamo.reset()


FAMILIES = {
    "deformable_detr": 4,
    "rt_detr": 2,
    "rt_detr_v2": 2,
    "d_fine": 2,
    "deimv2": 2,
    "ecseg": 2,
    "lw_detr": 2,
    "rf_detr": 2,
    "dino": 4,
    "grounding_dino": 4,
    "mm_grounding_dino": 4,
    "omdet_turbo": 2,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_reaches_the_fused_op(name, tiny):
    """The model's own sampling against the fused op, in the whole model, at a size with levels of odd sides."""
    from detrt.backends.torch.session import TorchSession
    from detrt.models.ops.replace import missing

    source = copy.deepcopy(tiny(name))
    assert missing(source.module) == []
    if source.family.text is None:
        session = TorchSession(source)
        inputs = feeds_of(session)
        plain = session.run(inputs)
        assert install(source.module) == FAMILIES[name]  # on the CPU nothing changes
        assert all((session.run(inputs)[key] == plain[key]).all() for key in plain)
        for module in source.module.modules():
            vars(module).pop("forward", None)
        calls = []
        with Calls(calls):
            assert install(source.module, everywhere=True) == FAMILIES[name]
            found = session.run(inputs)
        assert calls.count("detrt.ms_deform_attn_fused.default") == FAMILIES[name]
        for key in plain:
            assert abs(found[key] - plain[key]).max() < 1e-4 * max(abs(plain[key]).max(), 1)
    else:
        assert install(source.module, everywhere=True) == FAMILIES[name]


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """Names of the ops that run in the block."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def feeds_of(session):
    from detrt.models.example_inputs import example_feeds

    size = session.spec.input.size_hw if not session.spec.input.dynamic else (96, 160)
    return example_feeds(session.spec, batch=2, size_hw=size)


def test_tiles_follow_the_work():
    assert choose(300 * 8, 12, 32, fused=False) == choose(300 * 8, 12, 32, fused=True) == Tile(1, 0, 1)
    assert choose(22223 * 8, 16, 32, fused=False) == Tile(4, 2, 1)
    assert choose(22223 * 8, 16, 32, fused=True) == Tile(2, 0, 1, heads_first=True)
    assert choose(73656 * 8, 20, 32, fused=True) == Tile(8, 2, 1)  # five levels: 12 of 32 places would be empty
    assert choose(22223 * 8, 16, 32, fused=True, heads=8) == Tile(16, 4, 4, heads_per_program=2)
    assert choose(22223 * 6, 16, 16, fused=False, heads=6) == Tile(32, 4, 4, heads_per_program=2)  # four heads do not divide six
    assert choose(300 * 8, 12, 32, fused=True, heads=8) == Tile(1, 0, 1)
    for outputs, points, dim, fused in itertools.product((1, 10**4, 10**7), (1, 16, 4095), (1, 14, 64, 256), (False, True)):
        tile = choose(outputs, points, dim, fused=fused)
        assert tile.queries & (tile.queries - 1) == 0 < tile.queries
        assert tile.points or points <= 32  # not thousands of points side by side


def test_import_needs_no_triton():
    """The CPU builds of PyTorch have none; the ops must be there all the same."""
    code = "import sys; sys.modules['triton'] = None; import detrt.models.ops.replace; print(sorted(m for m in sys.modules if m == 'detrt.models.ops.msda_launch'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert triton_available() == (importlib.util.find_spec("triton") is not None)


def test_kernel_in_the_interpreter():
    assert run_interpreted("interpret_msda.py") == "20 cases"
