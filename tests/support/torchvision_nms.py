"""torchvision for machines without its compiled library: PyPI's wheel is built for CUDA, and its Python alone does not import.

`batched_nms` is what transformers' processor of OmDet-Turbo calls, for machines without torchvision at all.
"""

from __future__ import annotations

import functools

import numpy as np
import onnxruntime
import torch


def batched_nms(boxes, scores, labels, iou):
    """torchvision's function of this name, by ONNX Runtime's NonMaxSuppression: indices of what stays, best score first."""

    def kept(mine):
        return mine[nms(boxes[mine], scores[mine], iou)]

    stays = torch.cat([kept(torch.nonzero(labels == label)[:, 0]) for label in labels.unique()])
    return stays[scores[stays].argsort(descending=True, stable=True)]


def nms(boxes, scores, iou):
    """torchvision's operator of this name."""
    from onnx import TensorProto, helper

    feeds = {"boxes": boxes[None].numpy(), "scores": scores[None, None].numpy()}
    feeds |= {"most": np.array([len(boxes)]), "iou": np.array([iou], np.float32)}
    kinds = {"boxes": TensorProto.FLOAT, "scores": TensorProto.FLOAT, "most": TensorProto.INT64, "iou": TensorProto.FLOAT}
    inputs = [helper.make_tensor_value_info(name, kinds[name], feeds[name].shape) for name in kinds]
    node = helper.make_node("NonMaxSuppression", list(kinds), ["selected"])
    output = helper.make_tensor_value_info("selected", TensorProto.INT64, ["count", 3])
    opsets = [helper.make_opsetid("", 17)]
    model = helper.make_model(helper.make_graph([node], "nms", inputs, [output]), opset_imports=opsets, ir_version=8)
    (selected,) = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    return torch.from_numpy(selected[:, 2])


@functools.cache
def import_torchvision():
    """The package, its Python as it is; operators of its compiled library are declared where that library does not load.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import torchvision
    except RuntimeError:  # operator torchvision::nms does not exist
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.impl("nms", nms, "CPU")
        import torchvision

        torchvision.detrt_operators = library  # they are gone with it
    return torchvision
