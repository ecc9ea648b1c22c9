"""Linear layers over few rows, on a CPU: which layers become which kernel, and that the graph computes the same."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from interpreted import run_interpreted
from relative_norm import relative

from detrt.backends.inductor.capture import module_of
from detrt.backends.inductor.early import early_start, with_early_start
from detrt.backends.inductor.few_rows import fuse_few_rows
from detrt.backends.inductor.fusing import fuse_epilogues, merge_linears, pad_heads
from detrt.backends.inductor.kernels import (
    attention,
    ffn_rows,
    linear_relu,
    linear_rows,
    linear_rows_is_faster,
)
from detrt.backends.inductor.passes import prepare, tune_for_gpu
from detrt.models.contract import ExportConfig, exported_spec
from detrt.models.load import load_source
from detrt.spec import Precision

OURS = (linear_rows, ffn_rows)


class Layer(torch.nn.Module):
    """A decoder layer without its attention: a projection and a norm, a feed-forward network, and a head of three layers that shares its
    first matmul with the values of the next layer."""

    def __init__(self, width=64, hidden=1024):
        super().__init__()
        self.out, self.up, self.down = (torch.nn.Linear(*sizes) for sizes in ((width, width), (width, hidden), (hidden, width)))
        self.norm, self.last = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.values, self.head = torch.nn.Linear(width, width), [torch.nn.Linear(width, n) for n in (width, width, 4)]
        self.heads = torch.nn.ModuleList(self.head)

    def forward(self, x, y):
        x = self.norm(x + F.dropout(self.out(y), 0.0))
        x = self.last(F.dropout(self.down(F.dropout(self.up(x).relu(), 0.0)), 0.0) + x)
        return self.values(x), self.heads[2](self.heads[1](self.heads[0](x).relu()).relu())


def fused(module, *inputs):
    """(the graph after the passes that meet these layers, its ops)."""
    with torch.no_grad():
        graph = module_of(torch.export.export(module.eval(), inputs, strict=False).run_decompositions({}))
    merge_linears(graph)
    fuse_epilogues(graph)
    pad_heads(graph)
    fuse_few_rows(graph)
    graph.recompile()
    return graph, [node.target for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_decoder_layer_becomes_five_calls(dtype):
    torch.manual_seed(0)
    module = Layer().to(dtype)
    inputs = [torch.randn(1, 30, 64, dtype=dtype) for _ in range(2)]
    graph, targets = fused(module, *inputs)
    # The projection; the feed-forward network; the values with the head's first layer; the rest of the head.
    assert [target for target in targets if target in OURS] == [linear_rows, ffn_rows, *[linear_rows] * 3]
    assert (
        torch.ops.aten.linear.default not in targets and linear_relu not in targets and torch.ops.aten.relu.default not in targets
    )
    with torch.no_grad():
        got = graph(*inputs)
        want = module.double()(*(t.double() for t in inputs))
    assert all(relative(a, b) < (0.003 if dtype == torch.float16 else 0.02) for a, b in zip(got, want, strict=True))


class Attending(torch.nn.Module):
    """Self-attention of queries with positions, as decoders have it; `kept`: something else reads the values."""

    def __init__(self, width=64, kept=False):
        super().__init__()
        self.both, self.values, self.out = (torch.nn.Linear(width, n) for n in (2 * width, width, width))
        self.kept = kept

    def forward(self, x, positions):
        both, values = self.both(positions + x), self.values(x)
        out = self.out(attention(both, both, values, [0, 64, 0], 2, 32, 0.2))
        return (out, values) if self.kept else out


@pytest.mark.parametrize("kept", [False, True])
def test_queries_and_values_are_one_layer(kept):
    torch.manual_seed(0)
    module = Attending(kept=kept).half()
    inputs = list(torch.randn(2, 1, 30, 64).half())
    graph, targets = fused(module, *inputs)
    assert torch.ops.aten.add.Tensor not in targets and targets.count(linear_rows) == (3 if kept else 2)
    node = next(node for node in graph.graph.nodes if node.target == attention)
    assert node.args[3] == ([0, 64, 0] if kept else [0, 64, 128])
    with torch.no_grad():
        got = graph(*inputs)
        want = module(*inputs)
    pairs = zip(got, want, strict=True) if kept else [(got, want)]
    assert all(relative(a, b) < 0.003 for a, b in pairs)


def test_a_sum_that_is_read_elsewhere_stays():
    class Kept(Attending):
        def forward(self, x, positions):
            total = x + positions
            return self.both(total), total

    _, targets = fused(Kept().half(), *torch.randn(2, 1, 30, 64).half())
    assert torch.ops.aten.add.Tensor in targets and targets.count(linear_rows) == 1


def test_what_else_reads_the_hidden_units_keeps_them():
    class Shared(Layer):
        def forward(self, x, y):
            hidden = self.up(x).relu()
            return self.last(self.down(hidden) + x), hidden

    _, targets = fused(Shared().half(), *torch.randn(2, 1, 30, 64).half())
    assert [target for target in targets if target in OURS] == [linear_rows, linear_rows]


def test_the_sum_of_a_feed_forward_network_may_be_limited():
    class Limited(Layer):
        def forward(self, x, y):
            return self.last((self.down(self.up(x).relu()) + x).clamp(-0.5, 0.5))

    module, inputs = Limited().half(), torch.randn(2, 1, 30, 64).half()
    graph, targets = fused(module, *inputs)
    assert targets == [ffn_rows]
    with torch.no_grad():
        assert relative(graph(*inputs), module(*inputs)) < 0.003


def test_another_residual_is_no_feed_forward_network():
    class Crossed(Layer):
        def forward(self, x, y):
            return self.last(self.down(self.up(x).relu()) + y)

    _, targets = fused(Crossed().half(), *torch.randn(2, 1, 30, 64).half())
    assert ffn_rows not in targets and torch.ops.aten.layer_norm.default in targets


@pytest.mark.parametrize("what", ["weight", "bias", "scale"])
def test_parameters_that_would_be_copied_first_stay(what):
    """A kernel that starts early reads its parameters before a copy of them is there."""
    module = Layer().half()
    inputs = [torch.randn(1, 30, 64, dtype=torch.float16) for _ in range(2)]
    apart = {"weight": lambda t: t.t().contiguous().t(), "bias": lambda t: t.repeat_interleave(2)[::2]}
    if what == "scale":
        module.last.weight.data = apart["bias"](module.last.weight.data)
    else:
        parameter = getattr(module.down, what)
        parameter.data = apart[what](parameter.data)
    _, targets = fused(module, *inputs)
    assert ffn_rows not in targets


def test_fp32_and_many_rows_stay():
    _, targets = fused(Layer(), *torch.randn(2, 1, 30, 64))
    assert not set(targets) & set(OURS)
    _, targets = fused(Layer().half(), *torch.randn(2, 1, 5000, 64).half())
    assert not set(targets) & set(OURS)
    assert not linear_rows_is_faster(5000, 256, 256)


def test_ops_equal_separate_layers():
    data, up, down = torch.randn(3, 5, 20), torch.randn(32, 16), torch.randn(16, 32)
    bias1, bias2, scale, shift = torch.randn(32), torch.randn(16), torch.randn(16), torch.randn(16)
    part = data[..., 4:]
    layer = F.linear(part.relu(), up, bias1)
    assert torch.allclose(linear_rows(data, 4, up, bias1, True, False), layer, atol=1e-5)
    assert torch.allclose(linear_rows(data, 4, up, bias1, True, True), layer.relu(), atol=1e-5)
    want = F.layer_norm(part + F.linear(F.linear(part, up, bias1).relu(), down, bias2), (16,), scale, shift, 1e-5)
    assert torch.allclose(ffn_rows(part, up, bias1, down, bias2, scale, shift, 1e-5), want, atol=1e-4)
    want = torch.cat([F.linear(part + 2 * part, up[:24], bias1[:24]), F.linear(part, up[24:], bias1[24:])], -1)
    assert torch.allclose(linear_rows(part, 0, up, bias1, False, False, 2 * part, 24), want, atol=1e-4)
    for op, arguments in (
        (linear_rows, (data, 4, up, bias1, True, True)),
        (linear_rows, (part, 0, up, bias1, False, False, part, 32)),
        (ffn_rows, (part, up, bias1, down, bias2, scale, shift, 1e-5)),
    ):
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rt_detr_v2", "d_fine", "detr"])
def test_a_model_computes_the_same(name):
    source = load_source(f"random:{name}/tiny")
    spec = exported_spec(source, ExportConfig(height=64, width=64, mask=False))
    captured = prepare(source, spec, (1, 1), Precision.BF16)
    tune_for_gpu(captured)
    with torch.no_grad():
        want = captured.graph(*captured.inputs)
        assert fuse_few_rows(captured.graph) > 10
        captured.graph.recompile()
        got = captured.graph(*captured.inputs)
    assert all(relative(b, a) < 0.01 for a, b in zip(want, got, strict=True))


def test_early_start_changes_the_kernels_that_have_the_argument():
    head = "@triton_heuristics.user_autotune(\n    triton_meta={'signature': {}, 'constants': {'ROW': 4, 'EARLY': False}},\n)"
    changed = with_early_start(head)
    assert "triton_meta={'launch_pdl': True, 'signature'" in changed and "'EARLY': True" in changed
    plain = head.replace(", 'EARLY': False", "")
    assert with_early_start(plain) == plain


def test_early_start_ends_with_the_compilation():
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    before = PythonWrapperCodegen.define_kernel
    with early_start():
        assert PythonWrapperCodegen.define_kernel is not before
    assert PythonWrapperCodegen.define_kernel is before


def test_the_sequences_that_are_measured_under_the_interpreter():
    assert run_interpreted("interpret_few_rows.py") == "equal to FP64: 27"
