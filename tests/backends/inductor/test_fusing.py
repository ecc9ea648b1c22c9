"""Passes for GPUs, on a CPU: constants of fixed sizes, epilogues of products and convolutions, attention inside windows."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from interpreted import run_interpreted
from relative_norm import relative

from detrt.backends.inductor import convolving
from detrt.backends.inductor.attention import fuse_plain_attention
from detrt.backends.inductor.capture import module_of
from detrt.backends.inductor.convolving import fold_stem, fuse_depthwise, linear_patches, linear_pointwise
from detrt.backends.inductor.folding import fold_constants, fold_fills
from detrt.backends.inductor.fusing import fuse_epilogues, fuse_gelu, pad_heads
from detrt.backends.inductor.kernels import (
    attention,
    conv_relu,
    depthwise_conv,
    linear_gelu,
    linear_relu,
    portable,
    window_attention,
)
from detrt.backends.inductor.passes import prepare, tune_for_gpu
from detrt.backends.inductor.windows import fuse_windows
from detrt.models.contract import ExportConfig, exported_spec
from detrt.models.layers.swin import shift_mask
from detrt.models.load import load_source
from detrt.spec import Precision


def graph_of(module, *inputs):
    with torch.no_grad():
        return module_of(torch.export.export(module.eval(), inputs, strict=False).run_decompositions({}))


def targets(graph):
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def test_fills_of_fixed_size_are_constants():
    class Mask(torch.nn.Module):
        def forward(self, x):
            keep = torch.ones_like(x[:, 0]).cumsum(-1) / 4 + torch.full_like(x[:, 0], 0.5) + x.new_zeros(4)
            return x * keep[:, None]

    x = torch.randn(2, 3, 5, 4)
    graph = graph_of(Mask(), x)
    fold_fills(graph)
    fold_constants(graph)
    graph.recompile()
    assert len(targets(graph)) == 1, "a product with a constant"
    assert torch.equal(graph(x), Mask()(x))


def test_epilogues_equal_separate_steps():
    x, weight, bias = torch.randn(2, 7, 12), torch.randn(5, 12), torch.randn(5)
    assert torch.allclose(linear_relu(x, weight, bias), torch.nn.functional.linear(x, weight, bias).relu(), atol=1e-5)
    data, kernel, residual = torch.randn(2, 4, 9, 8), torch.randn(6, 2, 3, 3), torch.randn(2, 6, 5, 4)
    shape = ([2, 2], [1, 1], [1, 1], 2)
    whole = torch.conv2d(data, kernel, torch.ones(6), *shape)
    assert torch.allclose(conv_relu(data, kernel, torch.ones(6), None, *shape), whole.relu(), atol=1e-5)
    found = conv_relu(data, kernel, torch.ones(6), residual, *shape)
    assert torch.allclose(found, (whole + residual).relu(), atol=1e-5)
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.library.opcheck(linear_relu, (x, weight, bias), test_utils=("test_schema", "test_faketensor"))
    arguments = (data, kernel, torch.ones(6), residual, *shape)
    torch.library.opcheck(conv_relu, arguments, test_utils=("test_schema", "test_faketensor"))


class Block(torch.nn.Module):
    """A bottleneck of ResNet: two ReLUs inside, one after the sum with a convolution of the input."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Conv2d(8, 4, 1), torch.nn.Conv2d(4, 4, 3, 2, 1)
        self.c, self.side = torch.nn.Conv2d(4, 8, 1), torch.nn.Conv2d(8, 8, 1, 2)

    def forward(self, x):
        return (self.c(self.b(self.a(x).relu()).relu()) + self.side(x)).relu()


def test_a_bottleneck_has_three_epilogues():
    module, x = Block().to(torch.bfloat16), torch.randn(1, 8, 9, 7, dtype=torch.bfloat16)
    graph = graph_of(module, x)
    assert fuse_epilogues(graph) == 3
    graph.recompile()
    found = [node for node in graph.graph.nodes if node.op == "call_function"]
    assert [node.target for node in found].count(conv_relu) == 3 and len(found) == 4
    assert [node.args[3] is not None for node in found if node.target == conv_relu] == [False, False, True]
    with torch.no_grad():
        assert relative(graph(x), module(x)) < 0.02


def test_depthwise_convolutions_stay_apart():
    module = torch.nn.Sequential(torch.nn.Conv2d(8, 8, 5, padding=2, groups=8), torch.nn.ReLU()).to(torch.bfloat16)
    assert fuse_epilogues(graph_of(module, torch.randn(1, 8, 6, 6, dtype=torch.bfloat16))) == 0


@pytest.mark.slow
def test_a_backbone_loses_its_relus():
    source = load_source("random:detr/tiny")
    spec = exported_spec(source, ExportConfig(height=64, width=96, mask=False))
    captured = prepare(source, spec, (1, 1), Precision.BF16)
    with torch.no_grad():
        want = captured.graph(*captured.inputs)
        tune_for_gpu(captured)
        got = captured.graph(*captured.inputs)
    found = targets(captured.graph)
    assert found.count(conv_relu) >= 8 and found.count(linear_relu) >= 4
    assert sum(1 for node in captured.graph.graph.nodes if node.target == conv_relu and node.args[3] is not None) == 4, (
        "residuals"
    )
    assert all(relative(b, a) < 0.02 for a, b in zip(want, got, strict=True))
    assert captured.exported() is not None, "traces again with the ops in it"


def test_odd_heads_are_padded():
    module = torch.nn.Linear(16, 91).to(torch.bfloat16)
    x = torch.randn(3, 5, 16, dtype=torch.bfloat16)
    graph = graph_of(module, x)
    assert pad_heads(graph) == 1
    graph.recompile()
    assert next(n for n in graph.graph.nodes if n.target == torch.ops.aten.linear.default).meta["val"].shape[-1] == 96
    with torch.no_grad():
        found = graph(x)
        assert found.shape == (3, 5, 91) and relative(found, module(x)) < 0.01


def test_fp32_keeps_its_relus():
    graph = graph_of(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.randn(2, 4))
    assert fuse_epilogues(graph) == 0


class Windows(torch.nn.Module):
    """As Swin has it; `split`: three products, joined by a pass, as in transformers."""

    def __init__(self, heads: int, dim: int, tokens: int, mask: torch.Tensor | None, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv = torch.nn.Linear(heads * dim, 3 * heads * dim)
        self.register_buffer("bias", torch.randn(1, heads, tokens, tokens))
        self.register_buffer("mask", mask)

    def forward(self, x):
        windows, tokens, width = x.shape
        q, k, v = self.qkv(x).view(windows, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, self.bias)
        else:
            scores = (q * (width // self.heads) ** -0.5) @ k.transpose(-1, -2) + self.bias
            if self.mask is not None:
                scores = scores.view(-1, len(self.mask), self.heads, tokens, tokens) + self.mask[None, :, None]
                scores = scores.view(windows, self.heads, tokens, tokens)
            out = scores.softmax(-1) @ v
        return out.transpose(1, 2).reshape(windows, tokens, width)


@pytest.mark.parametrize(("masked", "fused"), [(True, False), (False, False), (False, True)])
def test_attention_inside_windows_is_one_op(masked, fused):
    heads, dim, window = 2, 16, 4
    mask = shift_mask(8, 12, window).to(torch.bfloat16) if masked else None
    module = Windows(heads, dim, window**2, mask, fused).to(torch.bfloat16)
    x = torch.randn(12, window**2, heads * dim, dtype=torch.bfloat16)  # two images of six windows
    graph = graph_of(module, x)
    fold_constants(graph)
    assert fuse_windows(graph) == 1
    graph.recompile()
    found = targets(graph)
    assert window_attention in found and torch.ops.aten.softmax.int not in found
    with torch.no_grad():
        assert relative(graph(x), module.float()(x.float())) < 0.02


def test_slices_in_another_order_are_left_alone():
    class Turned(Windows):
        def forward(self, x):
            k, q, v = self.qkv(x).view(6, 16, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, self.bias)

    module = Turned(2, 16, 16, None, True).to(torch.float16)
    assert fuse_windows(graph_of(module, torch.randn(6, 16, 32, dtype=torch.float16))) == 0


def test_the_window_op_checks_its_shapes():
    qkv, bias, mask = torch.randn(6, 16, 96), torch.randn(2, 16, 16), torch.randn(3, 16, 16)
    assert torch.equal(window_attention(qkv, bias, mask, 2, 0.25), portable(qkv, bias, mask, 2, 0.25))
    torch.library.opcheck(window_attention, (qkv, bias, mask, 2, 0.25), test_utils=("test_schema", "test_faketensor"))
    for wrong, says in (((qkv, bias, mask, 5, 1.0), "multiple of"), ((qkv, bias[:1], None, 2, 1.0), "bias must be")):
        with pytest.raises(ValueError, match=says):
            window_attention(*wrong)
    with pytest.raises(ValueError, match="divisor of 6 windows"):
        window_attention(qkv, bias, torch.randn(4, 16, 16), 2, 1.0)


@pytest.fixture
def any_type(monkeypatch):
    """Passes that are for 16 bits, in FP64, where equal means equal."""
    monkeypatch.setattr(convolving, "is_low", lambda node: True)


def passed(rewrite, module, x):
    """(how often the pass rewrote the graph, the largest difference to the module)."""
    module, x = module.double(), x.double()
    graph = graph_of(module, x)
    count = rewrite(graph)
    graph.recompile()
    with torch.no_grad():
        got, want = graph(x), module(x)
    assert got.shape == want.shape
    return count, float((got - want).abs().max())


@pytest.mark.parametrize(
    ("kernel", "padding", "size"),
    [
        (7, 3, (64, 96)),
        (7, 3, (65, 97)),
        (3, 1, (64, 67)),
        (3, 0, (33, 34)),
        (5, 2, (40, 41)),
        (4, 1, (32, 36)),
        ((3, 5), (1, 2), (30, 31)),
    ],
)
def test_a_stem_over_blocks_is_the_same_convolution(any_type, kernel, padding, size):
    count, difference = passed(fold_stem, torch.nn.Conv2d(3, 8, kernel, 2, padding), torch.randn(2, 3, *size))
    assert count == 1 and difference < 1e-12


@pytest.mark.parametrize(("patch", "size"), [(14, (56, 70)), (4, (33, 38)), ((8, 16), (32, 64))])
def test_patches_are_one_matmul(any_type, patch, size):
    count, difference = passed(linear_patches, torch.nn.Conv2d(3, 16, patch, patch), torch.randn(2, 3, *size))
    assert count == 1 and difference < 1e-12


def test_a_convolution_of_one_pixel_is_a_matmul(any_type):
    assert passed(linear_pointwise, torch.nn.Conv2d(16, 24, 1), torch.randn(2, 16, 9, 7)) == (1, pytest.approx(0, abs=1e-12))


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(5, 1, 2), (3, 2, 1), ((3, 5), 1, (0, 2))])
@pytest.mark.parametrize("relu", [True, False])
def test_depthwise_convolutions_take_their_relu(any_type, kernel, stride, padding, relu):
    layers = [torch.nn.Conv2d(8, 8, kernel, stride, padding, groups=8), torch.nn.ReLU() if relu else torch.nn.Tanh()]
    count, difference = passed(fuse_depthwise, torch.nn.Sequential(*layers), torch.randn(2, 8, 9, 12))
    assert count == 1 and difference < 1e-12


@pytest.mark.parametrize(
    ("rewrite", "layer", "size"),
    [
        (fold_stem, torch.nn.Conv2d(4, 8, 3, 2, 1), (4, 16, 16)),  # not three channels
        (fold_stem, torch.nn.Conv2d(3, 8, 3, 1, 1), (3, 16, 16)),
        (fold_stem, torch.nn.Conv2d(3, 8, 3, 2, 1, dilation=2), (3, 16, 16)),
        (linear_patches, torch.nn.Conv2d(3, 8, 4, 4, 1), (3, 16, 16)),  # patches with a margin
        (linear_patches, torch.nn.Conv2d(3, 8, 5, 4), (3, 16, 16)),  # that overlap
        (linear_pointwise, torch.nn.Conv2d(8, 8, 1, 2), (8, 16, 16)),
        (linear_pointwise, torch.nn.Conv2d(8, 8, 1, groups=2), (8, 16, 16)),
        (linear_pointwise, torch.nn.Conv2d(8, 8, 1, bias=False), (8, 16, 16)),
        (fuse_depthwise, torch.nn.Conv2d(8, 8, 3, groups=4), (8, 16, 16)),
        (fuse_depthwise, torch.nn.Conv2d(8, 16, 3, groups=8), (8, 16, 16)),
        (fuse_depthwise, torch.nn.Conv2d(8, 8, 3, (1, 2), groups=8), (8, 16, 16)),
    ],
)
def test_other_convolutions_stay(any_type, rewrite, layer, size):
    assert passed(rewrite, layer, torch.randn(1, *size)) == (0, 0.0)


def test_the_bias_of_a_shortcut_moves_into_the_sum():
    module, x = Block().to(torch.bfloat16), torch.randn(1, 8, 9, 7, dtype=torch.bfloat16)
    graph = graph_of(module, x)
    fuse_epilogues(graph)
    shortcut = next(node for node in graph.graph.nodes if node.target == torch.ops.aten.conv2d.default)
    assert shortcut.args[2] is None


class Attention(torch.nn.Module):
    """As decoders have it: queries and keys of one tensor, values of another; or all of one."""

    def __init__(self, heads: int, dim: int, merged: bool) -> None:
        super().__init__()
        self.heads, self.merged, width = heads, merged, heads * dim
        self.qk, self.v = torch.nn.Linear(width, (3 if merged else 2) * width), torch.nn.Linear(width, width)

    def forward(self, x):
        split = self.qk(x).split(x.shape[-1], -1)
        q, k = split[:2]
        v = split[2] if self.merged else self.v(x * 2)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("merged", [True, False])
def test_attention_reads_what_its_matmul_wrote(merged):
    module, x = Attention(4, 16, merged).to(torch.bfloat16), torch.randn(2, 30, 64, dtype=torch.bfloat16)
    graph = graph_of(module, x)
    assert fuse_plain_attention(graph) == 1
    graph.recompile()
    assert torch.ops.aten.scaled_dot_product_attention.default not in targets(graph)
    node = next(node for node in graph.graph.nodes if node.target == attention)
    assert node.args[3] == [0, 64, 128 if merged else 0] and node.args[0] is node.args[1], "no copies of the slices"
    with torch.no_grad():
        assert relative(graph(x), module.float()(x.float())) < 0.02


def test_attention_with_a_mask_or_in_fp32_stays():
    class Causal(torch.nn.Module):
        def forward(self, q):
            return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    q = torch.randn(1, 2, 8, 16, dtype=torch.float16)
    assert fuse_plain_attention(graph_of(Causal(), q)) == 0
    assert fuse_plain_attention(graph_of(Attention(2, 16, True), torch.randn(1, 8, 32))) == 0
    huge = Attention(8, 64, True).to(torch.float16)
    assert fuse_plain_attention(graph_of(huge, torch.randn(1, 2000, 512, dtype=torch.float16))) == 0, "cuDNN's is faster"


def test_gelu_joins_wide_layers_of_few_inputs():
    module, x = torch.nn.Sequential(torch.nn.Linear(96, 384), torch.nn.GELU()), torch.randn(1, 11000, 96)
    module, x = module.to(torch.bfloat16), x.to(torch.bfloat16)
    graph = graph_of(module, x)
    assert fuse_gelu(graph) == 1
    graph.recompile()
    assert targets(graph) == [linear_gelu]
    with torch.no_grad():
        assert relative(graph(x), module(x)) < 0.01
    assert fuse_gelu(graph_of(module, x[:, :100])) == 0
    tanh = torch.nn.Sequential(torch.nn.Linear(96, 384), torch.nn.GELU("tanh")).to(torch.bfloat16)
    assert fuse_gelu(graph_of(tanh, x)) == 0


def test_the_ops_of_layers_check_their_shapes():
    qkv = torch.randn(2, 10, 96)
    checks = {"test_utils": ("test_schema", "test_faketensor")}
    torch.library.opcheck(attention, (qkv, qkv, qkv, [0, 32, 64], 2, 16, 0.25), **checks)
    for at, keys, says in (([0, 32, 80], qkv, "from column 80 on"), ([0, 0, 0], torch.randn(3, 10, 96), "same images")):
        with pytest.raises(ValueError, match=says):
            attention(qkv, keys, keys, at, 2, 16, 0.25)
    torch.library.opcheck(
        depthwise_conv, (torch.randn(1, 8, 9, 7), torch.randn(3, 5, 8), torch.randn(8), 2, [1, 2], True), **checks
    )
    torch.library.opcheck(linear_gelu, (torch.randn(2, 3, 8), torch.randn(5, 8), torch.randn(5)), **checks)


@pytest.mark.parametrize("name", ["rt_detr_v2", "d_fine", "rf_detr"])
def test_a_tuned_graph_takes_a_range_of_batches(name):
    source = load_source(f"random:{name}/tiny")
    spec = exported_spec(source, ExportConfig(height=64, width=64, mask=False) if source.spec.input.dynamic else ExportConfig())
    captured = prepare(source, spec, (1, 4), Precision.BF16)
    with torch.no_grad():
        want = captured.graph(*captured.inputs)
        tune_for_gpu(captured)
        got = captured.graph(*captured.inputs)
        program = captured.exported()
        one = program.module()(*(t[:1] for t in captured.inputs))
    assert all(t.shape[0] == 1 for t in one) and all(a.shape == b.shape for a, b in zip(want, got, strict=True))


def test_the_kernels_of_layers_under_the_interpreter():
    assert run_interpreted("interpret_layers.py") == "equal"
