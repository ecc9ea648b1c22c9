"""The selection of LW-DETR and RF-DETR on maps of 50 cells and more, by the authors' definition and as transformers does."""

from __future__ import annotations

from copy import deepcopy

import pytest

pytest.importorskip("transformers", reason="needs the 'export' extra")

import torch
from authors_files import module_of, write_file

from detrt.models.layers.lw_detr import take_authors_selection
from detrt.models.load import load_source
from detrt.spec import AUTHORS, TRANSFORMERS

WIDTH = 16


def positions_left_out(sides):
    """By the definition: the centre of a cell, or the size of its proposal, is not above 0.01 or not below 0.99."""
    out = []
    for level, (height, width) in enumerate(sides):
        for y in range(height):
            for x in range(width):
                numbers = ((x + 0.5) / width, (y + 0.5) / height, 0.05 * 2**level)
                out.append(not all(0.01 < number < 0.99 for number in numbers))
    return torch.tensor(out)


@pytest.mark.parametrize("sides", ([(4, 4)], [(49, 3)], [(60, 2)], [(2, 60)], [(64, 53)], [(60, 52), (15, 13)]), ids=str)
@pytest.mark.parametrize("family", ("lw_detr", "rf_detr", "rf_detr-seg"))
def test_positions_at_the_border_take_part(family, sides):
    module = load_source(f"random:{family}/tiny").module
    plain = deepcopy(module)
    take_authors_selection(module)
    count = sum(height * width for height, width in sides)
    features = torch.rand(2, count, WIDTH) + 0.5
    padding = torch.zeros(2, count, dtype=torch.bool)
    (ours, boxes, mask), (stock, stock_boxes, stock_mask) = (
        next(part for part in model.modules() if hasattr(part, "gen_encoder_output_proposals")).gen_encoder_output_proposals(
            features, padding, sides
        )
        for model in (module, plain)
    )
    border = positions_left_out(sides)
    assert torch.equal(stock_mask[0, :, 0], border) and not mask.any()
    assert torch.equal(ours, stock) and torch.equal(boxes, stock_boxes)
    assert torch.equal((ours == 0).all(2)[1], border)


def _let_zeros_win(model):
    """Features of zeros get the best score: the class's row is parallel to the normalised features that they lead to, and to no others."""
    with torch.no_grad():
        bias = torch.randn(model.enc_output[0].bias.shape, generator=torch.Generator().manual_seed(1))
        bias -= bias.mean()
        model.enc_output[0].bias.copy_(bias)
        model.enc_output_norm[0].weight.fill_(1)
        model.enc_output_norm[0].bias.zero_()
        model.enc_out_class_embed[0].weight[0] = 5 * bias


@pytest.mark.parametrize("size", ((448, 448), (448, 320)), ids=str)
def test_a_file_selects_them_and_a_folder_does_not(size, tmp_path):
    module = module_of("lw_detr")
    _let_zeros_win(module.model)
    path, labels = write_file("lw_detr", tmp_path / "file.pth", module)
    source = load_source(f"ckpt:{path}", labels=labels)
    assert source.spec.origin == AUTHORS and load_source("random:lw_detr/tiny").spec.origin == TRANSFORMERS
    copied = deepcopy(source.module)
    seen = []
    for one in (source.module, copied, module.eval()):
        with torch.no_grad():
            seen.append(one(pixel_values=torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(0))))
    # A box that starts from a proposal of zeros has no size.
    flat = [int((one.pred_boxes[0, :, 2:] == 0).all(1).sum()) for one in seen]
    assert flat[0] == flat[1] > 0 and flat[2] == 0
