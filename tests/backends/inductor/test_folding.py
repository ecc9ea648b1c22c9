"""Branches of captured graphs: parallel convolutions as one, and stacks of which one tensor is read; PyTorch says what is right."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")

from torch import nn

from detrt.backends.inductor.capture import module_of
from detrt.backends.inductor.folding import merge_convolutions, read_past_stacks
from detrt.backends.inductor.nodes import aten


def captured(module, *inputs):
    return module_of(torch.export.export(module.eval(), inputs).run_decompositions({}))


def count(graph, target):
    return sum(node.target == target for node in graph.graph.nodes)


def conv(kernel, padding, **options):
    return nn.Conv2d(4, 4, kernel, padding=padding, **options)


class Sum(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return torch.relu(self.first(x) + self.second(x))


PAIRS = {
    "RepVGG": (conv(3, 1), conv(1, 0), 1),
    "the small one first": (conv(1, 0), conv(3, 1), 1),
    "without biases": (conv(3, 1, bias=False), conv(1, 0, bias=False), 1),
    "one bias": (conv(3, 1), conv(1, 0, bias=False), 1),
    "strides": (conv(3, 1, stride=2), conv(1, 0, stride=2), 1),
    "groups": (conv(3, 1, groups=2), conv(1, 0, groups=2), 1),
    "a row and a square": (conv(3, 1), conv((1, 3), (0, 1)), 1),
    "different groups": (conv(3, 1, groups=2), conv(1, 0), 0),
    "different dilations": (conv(3, 2, dilation=2), conv(3, 1), 0),
}


@pytest.mark.parametrize("case", PAIRS)
def test_parallel_convolutions_become_one(case):
    first, second, expected = PAIRS[case]
    x = torch.randn(2, 4, 9, 7, generator=torch.Generator().manual_seed(0))
    graph = captured(Sum(first, second), x)
    before = graph(x)
    assert merge_convolutions(graph) == expected
    graph.recompile()
    assert count(graph, aten.conv2d.default) == 2 - expected
    torch.testing.assert_close(graph(x), before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("index", [-1, 0, 2])
def test_the_tensor_that_is_read_is_not_stacked(index):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(4, 5) for _ in range(3))

        def forward(self, x):
            return torch.stack([head(x) for head in self.heads], dim=1)[:, index]

    x = torch.randn(2, 6, 4)
    graph = captured(Heads(), x)
    before = graph(x)
    assert read_past_stacks(graph) == 1
    graph.recompile()
    assert count(graph, aten.linear.default) == 1
    torch.testing.assert_close(graph(x), before)
