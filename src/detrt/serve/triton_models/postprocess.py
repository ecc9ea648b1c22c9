"""Outputs of a detector -> boxes in pixels, scores, class ids and names, inside Triton's Python backend."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from detrt.data.postprocess import decode
from detrt.errors import DetrtError
from detrt.serve.triton import NAMES, ORIGINAL_SIZE, input_name
from detrt.spec import BOXES, LABELS, LOGITS, NUM_DETECTIONS, PRED_BOXES, SCORES, read_spec_file


class TritonPythonModel:
    """What the detector returns and original_size (n, 2) -> boxes (n, m, 4) x0 y0 x1 y1 in pixels of the original image,
    scores (n, m) falling, labels (n, m) class ids, names (n, m) and num_detections (n, 1); rows behind that number are 0.

    The parameter "threshold" of the model's configuration keeps scores above it.
    """

    def initialize(self, args: dict[str, Any]) -> None:
        folder = Path(args["model_repository"], args["model_version"])
        self.spec = read_spec_file(folder / "spec.json")
        parameters = json.loads(args["model_config"]).get("parameters", {})
        self.threshold = float(parameters.get("threshold", {}).get("string_value", 0.5))
        in_graph = self.spec.decode.in_graph
        self.names = (BOXES, SCORES, LABELS, NUM_DETECTIONS) if in_graph else (LOGITS, PRED_BOXES)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        given = {name: pb_utils.get_input_tensor_by_name(request, input_name(name)).as_numpy() for name in self.names}
        if NUM_DETECTIONS in given:
            given[NUM_DETECTIONS] = given[NUM_DETECTIONS].reshape(-1)
        sizes = pb_utils.get_input_tensor_by_name(request, ORIGINAL_SIZE).as_numpy()
        try:
            found = decode(given, self.spec, [(int(h), int(w)) for h, w in sizes], threshold=self.threshold)
        except DetrtError as error:
            return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(str(error)))
        most = self.spec.decode.max_detections
        boxes = np.zeros((len(found), most, 4), np.float32)
        scores, labels = np.zeros((len(found), most), np.float32), np.zeros((len(found), most), np.int64)
        names = np.full((len(found), most), b"", object)
        for index, one in enumerate(found):
            count = len(one)
            boxes[index, :count], scores[index, :count], labels[index, :count] = one.boxes_xyxy, one.scores, one.class_ids
            names[index, :count] = [label.encode() for label in one.labels]
        counts = np.array([[len(one)] for one in found], np.int64)
        values = {BOXES: boxes, SCORES: scores, LABELS: labels, NAMES: names, NUM_DETECTIONS: counts}
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor(name, value) for name, value in values.items()])
