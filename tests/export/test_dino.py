"""Tiny DINO and Co-DINO as graphs: other batches and sizes, both lowerings, padding, and an engine."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")
pytest.importorskip("onnxslim", reason="needs the 'export' extra")

import torch.nn.functional as F
from engine_graphs import rtx
from tiny_exports import SHARED

from detrt import graph
from detrt.backends.compare import relative_error
from detrt.backends.onnxruntime.session import OnnxSession
from detrt.graph.clean import with_outputs
from detrt.graph.selections import topk_outputs
from detrt.models.example_inputs import example_feeds
from detrt.models.hooks import forced_topk
from detrt.models.layers.deformable import level_masks
from detrt.models.load import load_source
from detrt.models.wrapper import ExportModule
from detrt.spec import PIXEL_MASK, PIXEL_VALUES, Precision

# name -> choices: one of each lowering.
SWIN = "co_dino-swin-l"
CASES = {"dino": SHARED["dino"], "co_dino-r50": SHARED["co_dino-r50"], SWIN: {"msda": "gridsample"}}
NAMES = [name if name in SHARED else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
# A size that neither the trace (256x320) nor the built-in check (352x224) has, and no level divides.
ODD = (157, 203)


def pair(report, module, feeds):
    """Outputs of PyTorch and of the graph, with the graph's selections forced on PyTorch."""
    model = graph.load(report.path)
    names = topk_outputs(model)
    got = OnnxSession(with_outputs(model, names).SerializeToString(), report.spec).run(feeds)
    plain = ExportModule(module, report.spec).eval()
    with torch.no_grad(), forced_topk([torch.from_numpy(got[name]) for name in names]):
        want = plain(*(torch.from_numpy(feeds[name]) for name in plain.input_names))
    return dict(zip(plain.output_names, (w.numpy() for w in want), strict=True)), got


@pytest.mark.parametrize("batch", (1, 3, 5))
@pytest.mark.parametrize("name", NAMES)
def test_other_batches_and_odd_sizes(name, batch, exported, tiny):
    report = exported(name, **CASES[name])
    assert report.worst <= Precision.FP32.output_tolerance / 10
    sampled = any(node.op_type == "GridSample" for node in graph.load(report.path).graph.node)
    assert sampled is ("msda" in CASES[name])
    want, got = pair(report, tiny(name).module, example_feeds(report.spec, batch, ODD, seed=batch))
    for output in want:
        assert want[output].shape[0] == batch
        assert relative_error(want[output], got[output]) <= 1e-4, output


@pytest.mark.slow
def test_vit_at_another_size(exported, tiny):
    """Windows, the table of positions and rotary positions all follow the size, in steps of 32 pixels."""
    report = exported("co_dino-vit-l")
    assert report.worst <= Precision.FP32.output_tolerance / 10
    want, got = pair(report, tiny("co_dino-vit-l").module, example_feeds(report.spec, 3, (96, 160), seed=1))
    for output in want:
        assert relative_error(want[output], got[output]) <= 1e-4, output


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[:1])
def test_both_lowerings_are_one_function(name, exported, tiny):
    report = exported(name, msda="gridsample")
    assert any(node.op_type == "GridSample" for node in graph.load(report.path).graph.node)
    assert not any(node.op_type == "GridSample" for node in graph.load(exported(name).path).graph.node)
    want, got = pair(report, tiny(name).module, example_feeds(report.spec, 3, ODD, seed=2))
    for output in want:
        assert relative_error(want[output], got[output]) <= 1e-4, output


@pytest.mark.parametrize("name", NAMES[:1])
def test_each_tensor_has_one_shape(name, exported):
    found = graph.load(exported(name).path).graph.value_info
    assert len({value.name for value in found}) == len(found) > 500


@pytest.mark.parametrize("name", NAMES[:1])
def test_what_lies_under_the_padding_does_not_matter(name, exported):
    session = OnnxSession(exported(name).path)
    feeds = example_feeds(session.spec, 3, ODD, seed=4)
    clean = session.run(feeds)
    noise = np.random.default_rng(0).integers(0, 256, feeds[PIXEL_VALUES].shape).astype(np.uint8)
    dirty = session.run({**feeds, PIXEL_VALUES: np.where(feeds[PIXEL_MASK][:, None] == 1, feeds[PIXEL_VALUES], noise)})
    for output in clean:
        np.testing.assert_array_equal(dirty[output], clean[output])


@pytest.mark.parametrize("name", NAMES[:1])
def test_a_image_does_not_see_the_others_of_its_batch(name, tiny):
    source = tiny(name)
    module = ExportModule(source.module, source.spec).eval()
    feeds = {k: torch.from_numpy(v) for k, v in example_feeds(source.spec, 3, ODD, seed=4).items()}
    with torch.no_grad():
        together = module(*(feeds[n] for n in module.input_names))
        alone = module(*(feeds[n][1:2] for n in module.input_names))
    for a, b in zip(together, alone, strict=True):
        # Sorted, because rounding may swap two proposals with nearly equal scores.
        assert relative_error(np.sort(b[0].numpy(), 0), np.sort(a[1].numpy(), 0)) <= 1e-4


def test_masks_of_levels_are_nearest_cells():
    for height in (20, 33, 57, 800, 801, 1333):
        mask = (torch.rand(2, height, height + 3, generator=torch.Generator().manual_seed(height)) > 0.5).to(torch.int64)
        sides = [(height, height + 3)]
        for _ in range(6):
            sides.append(((sides[-1][0] + 1) // 2, sides[-1][1] // 2 + 1))
        maps = [torch.zeros(2, 1, *side) for side in sides[2:]]
        for x, got in zip(maps, level_masks(mask, maps), strict=True):
            assert torch.equal(got, F.interpolate(mask[None].float(), size=x.shape[-2:])[0] > 0.5)


@pytest.mark.parametrize("name", ("dino-swin-l", SWIN))
def test_the_other_models_run(name):
    source = load_source(f"random:{name}/tiny")
    module = ExportModule(source.module, source.spec).eval()
    feeds = {k: torch.from_numpy(v) for k, v in example_feeds(source.spec, 2, (96, 128)).items()}
    with torch.no_grad():
        logits, boxes = module(*(feeds[n] for n in module.input_names))
    assert logits.shape == (2, 20, 7) and boxes.shape == (2, 20, 4)
    assert torch.isfinite(logits).all() and logits.std() > 0.1 and boxes.std(1).mean() > 0.01


@rtx
@pytest.mark.slow
@pytest.mark.parametrize("name", ("dino", SWIN))
def test_one_engine(name, exported, tmp_path):
    from detrt.backends.tensorrt import EngineConfig, build_engine

    sides = (128, 256, 320)
    built = build_engine(
        exported(name).path,
        tmp_path / "m.engine",
        EngineConfig(sms=(89,), batch=(1, 1, 2), height=sides, width=sides),
    )
    assert built.size > 10_000 and built.facts.precision == "fp32"
