"""torchvision's `batched_nms`, which transformers' processor of OmDet-Turbo calls, for machines without torchvision."""

from __future__ import annotations

import numpy as np
import onnxruntime
import torch


def batched_nms(boxes, scores, labels, iou):
    """torchvision's function of this name, by ONNX Runtime's NonMaxSuppression: indices of what stays, best score first."""
    from onnx import TensorProto, helper

    def kept(mine):
        feeds = {"boxes": boxes[mine][None].numpy(), "scores": scores[mine][None, None].numpy()}
        feeds |= {"most": np.array([len(mine)]), "iou": np.array([iou], np.float32)}
        kinds = {"boxes": TensorProto.FLOAT, "scores": TensorProto.FLOAT, "most": TensorProto.INT64, "iou": TensorProto.FLOAT}
        inputs = [helper.make_tensor_value_info(name, kinds[name], feeds[name].shape) for name in kinds]
        node = helper.make_node("NonMaxSuppression", list(kinds), ["selected"])
        output = helper.make_tensor_value_info("selected", TensorProto.INT64, ["count", 3])
        opsets = [helper.make_opsetid("", 17)]
        model = helper.make_model(helper.make_graph([node], "nms", inputs, [output]), opset_imports=opsets, ir_version=8)
        (selected,) = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
        return mine[torch.from_numpy(selected[:, 2])]

    stays = torch.cat([kept(torch.nonzero(labels == label)[:, 0]) for label in labels.unique()])
    return stays[scores[stays].argsort(descending=True, stable=True)]
