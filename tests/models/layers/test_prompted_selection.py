"""Queries of prompted detectors on maps of 50 cells and more, where positions lie on the border of what is allowed: as transformers selects them,
and so do the authors of Grounding DINO, MM-Grounding-DINO and OmDet-Turbo.

A position on the border has features of zeros, is scored like the others, and has a box of ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from detrt.models.layers.grounding_dino import GroundingDetector
from detrt.models.layers.omdet_turbo import OmDetDetector
from detrt.models.load import load_source

SHAPES = [(50, 64), (100, 50), (25, 50), (13, 25)]


def drawn(seed: int, *size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def compare(got: Tensor, want: Tensor, border_wins: bool) -> None:
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)  # tables of positions are FP32
    outside = int((want == 1).all(-1).sum())
    assert (outside > 0) == border_wins


@pytest.mark.parametrize("border_wins", [False, True])
@pytest.mark.parametrize("family", ["grounding_dino", "mm_grounding_dino"])
def test_grounding_dino_selects_positions_at_the_border_as_transformers(family: str, border_wins: bool) -> None:
    module: Any = load_source(f"random:{family}/tiny").module.double()
    detector, model = GroundingDetector(module), module.model
    shapes = SHAPES[: len(model.input_proj_vision)]
    masks = [torch.ones(2, *shape) for shape in shapes]
    for mask in masks:  # the second image is padded
        mask[1, mask.shape[1] * 4 // 5 :] = 0
    valid = torch.cat([mask.flatten(1) for mask in masks], 1) > 0
    tokens = torch.tensor([[True] * 7, [True] * 5 + [False] * 2])
    vision, text = drawn(1, 2, valid.shape[1], detector.width), drawn(2, 2, 7, detector.width)
    if border_wins:  # features of zeros are like a token of both images then, and others like none
        text[1] = text[0]
        model.enc_output.bias.data, model.enc_output.weight.data = 4 * text[0, 0], drawn(3, detector.width, detector.width)
    with torch.no_grad():
        features, proposals = model.generate_encoder_output_proposals(vision, ~valid, shapes)
        scores = model.encoder_output_class_embed(features, text, tokens).amax(-1)
        boxes = (model.encoder_output_bbox_embed(features) + proposals).sigmoid()
        index = scores.topk(detector.queries, dim=1).indices
        want = boxes.gather(1, index.unsqueeze(-1).expand(-1, -1, 4))
        compare(detector._select(vision, text, masks, valid, tokens), want, border_wins)


@pytest.mark.parametrize("border_wins", [False, True])
def test_omdet_selects_positions_at_the_border_as_transformers(border_wins: bool) -> None:
    module: Any = load_source("random:omdet_turbo/tiny").module.double().eval()
    detector, decoder = OmDetDetector(module), module.decoder
    shapes = SHAPES[:3]
    vision = drawn(1, 2, sum(height * width for height, width in shapes), decoder.encoder_vision_features[0].in_features)
    names = drawn(2, 5, 1, decoder.encoder_class_head.in_features).expand(-1, 2, -1)  # (classes, batch, width) in transformers
    with torch.no_grad():
        if border_wins:
            decoder.encoder_vision_features[0].bias.copy_(4 * decoder.encoder_class_head(names)[0, 0])
        wanted_x, _, want, *_ = decoder._get_decoder_input(vision, tuple(shapes), names)
        x, got = detector._select(vision, shapes, names.transpose(0, 1), torch.ones(2, 5, dtype=torch.bool))
        compare(got, want, border_wins)
        torch.testing.assert_close(x, wanted_x, atol=1e-12, rtol=1e-12)
