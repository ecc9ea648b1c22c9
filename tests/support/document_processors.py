"""transformers' image processors of PP-DocLayout without torchvision, which their modules import: their own code of what needs none."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers


def document_processor(version: int) -> Any:
    """The processor of PP-DocLayoutV2, 3 or 4: post-processing, not the images, for which `resized` is."""
    package = Path(transformers.__file__).parent / "models" / f"pp_doclayout_v{version}"
    tree = ast.parse((package / f"image_processing_pp_doclayout_v{version}.py").read_text("utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    found.bases, found.decorator_list = [], []
    found.body = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name != "_preprocess"]
    for method in found.body:
        method.decorator_list = []
    scope: dict[str, Any] = {"torch": torch, "np": np, "defaultdict": defaultdict, "TensorType": Any}
    if version == 3:
        import cv2

        scope["cv2"] = cv2
    if version == 4:
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import connected_components

        scope |= {"coo_matrix": coo_matrix, "connected_components": connected_components}
    exec(compile(ast.fix_missing_locations(ast.Module([found], [])), str(package), "exec"), scope)
    processor = scope[found.name]()
    processor.size = {"height": 800, "width": 800}
    return processor


def resized(image: np.ndarray, side: int, *, rounded: bool) -> np.ndarray:
    """(1, 3, side, side) float32 in 0..1: what torchvision's bicubic resize without antialiasing makes of (height, width, 3) uint8."""
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None]
    pixels = pixels if rounded else pixels / 255
    found = torch.nn.functional.interpolate(pixels, size=(side, side), mode="bicubic", align_corners=False, antialias=False)
    return (found / 255 if rounded else found.clamp(0, 1)).numpy()
