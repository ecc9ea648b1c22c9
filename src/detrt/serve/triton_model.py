"""The model of Triton's Python backend that opens a bundle: `detrt triton-repo` writes a `model.py` that imports it.

Images are decoded, put in batches, run and post-processed by the code of a worker of `detrt serve`. Of this package only this module
imports `triton_python_backend_utils`, which Triton itself provides.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from PIL import Image

from ..backends.base import BaseSession
from ..bundle import Bundle
from ..errors import DetrtError, EngineError, SpecError
from ..spec import TensorInfo, parse_size
from .config import ServeConfig, ServedModel
from .detection_tensors import detection_inputs, detection_outputs, detection_tensors, image_tasks
from .errors import Refused
from .kserve import config_type
from .messages import Answer, Batch, ImageTask, Setup
from .triton_config import BUNDLE
from .worker import BatchImages, Model, run_batch


class TritonPythonModel:
    """One instance of a model, on one device."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the bundle in the version folder. Raises TritonModelException where it cannot be opened or run."""
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the configuration has its own limit, and says so
        try:
            _check_arrays()
            self._open(args, json.loads(args["model_config"]))
        except DetrtError as error:
            raise pb_utils.TritonModelException(str(error)) from None

    def _open(self, args: Mapping[str, str], config: Mapping[str, Any]) -> None:
        given = {name: value["string_value"] for name, value in config.get("parameters", {}).items()}
        device = _device(given.pop("device", "cpu"), args)
        precision = given.pop("precision", "")
        folder = Path(args["model_repository"], args["model_version"], BUNDLE)
        served = ServedModel(args["model_name"], str(folder))
        instances = sum(group["count"] * max(1, len(group.get("gpus", ()))) for group in config["instance_group"])
        if not config["max_batch_size"]:
            raise SpecError(
                "config.pbtxt must have a max_batch_size of at least 1: the first axis of every tensor is that of the images"
            )
        self._config = ServeConfig(
            models=(served,),
            max_batch=config["max_batch_size"],
            devices=(device,),
            workers=instances,
            **_options(given),
        )
        self._setup = Setup.of(self._config, device)
        self._model = Model(served, self._setup)
        inputs = detection_inputs(**self._model.facts.takes)
        try:
            _check_precision(folder, self._model.session, precision)
            _check_tensors("input", config["input"], inputs)
            self._rows = _check_tensors("output", config["output"], detection_outputs(self._model.spec))
            self._model.warm_up()
        except BaseException:
            self._model.close()
            raise
        self._threads = ThreadPoolExecutor(self._setup.threads, "detrt-decode")
        self._opener = ThreadPoolExecutor(1, "detrt-open")
        self._inputs = [info.name for info in inputs]
        self._outputs = [row["name"] for row in config["output"]]
        print(f"detrt: {served.name} on {device}: {self._model.facts.backend}; {self._model.facts.note}".rstrip("; "), flush=True)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Responses in order; those with what cannot be read are errors, and do not affect the others."""
        asked: list[list[ImageTask] | Refused] = []
        for request in requests:
            try:
                asked.append(self._tasks(request))
            except Refused as refusal:
                asked.append(refusal)
        tasks = [task for one in asked if not isinstance(one, Refused) for task in one]
        most = self._model.facts.max_batch
        results = iter([result for first in range(0, len(tasks), most) for result in self._run(tasks[first : first + most])])
        return [
            _error(one) if isinstance(one, Refused) else self._response(request, [next(results) for _ in one])
            for request, one in zip(requests, asked, strict=True)
        ]

    def _tasks(self, request: Any) -> list[ImageTask]:
        """Raises Refused."""
        given = {name: pb_utils.get_input_tensor_by_name(request, name) for name in self._inputs}
        return image_tasks(
            {name: tensor.as_numpy() for name, tensor in given.items() if tensor is not None}, self._config.threshold
        )

    def _run(self, tasks: Sequence[ImageTask]) -> Sequence[Answer | Refused]:
        name = self._model.facts.name
        batch = Batch(0, name, tuple(tasks))
        images = BatchImages(batch, self._threads, self._opener, self._setup)
        return run_batch({name: self._model}, batch, images).results

    def _response(self, request: Any, results: Sequence[Answer | Refused]) -> Any:
        for number, result in enumerate(results):
            if isinstance(result, Refused):
                return _error(result, f"image {number}: " if len(results) > 1 else "")
        found = [result.detections for result in results if isinstance(result, Answer) and result.detections is not None]
        outputs = detection_tensors(found, self._model.spec, self._rows)
        wanted = request.requested_output_names()
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, outputs[name]) for name in self._outputs if name in wanted])

    def finalize(self) -> None:
        self._threads.shutdown()
        self._opener.shutdown()
        self._model.close()


def _error(refusal: Refused, where: str = "") -> Any:
    kinds = pb_utils.TritonError
    code = kinds.INVALID_ARG if refusal.status < 500 else kinds.INTERNAL
    return pb_utils.InferenceResponse(output_tensors=[], error=kinds(where + refusal.message, code))


def _device(kind: str, args: Mapping[str, str]) -> str:
    """The device of an instance. kind: "cpu", or "cuda", whose number Triton gives, or one of OpenVINO's."""
    return f"cuda:{args['model_instance_device_id']}" if kind == "cuda" else kind


_PARAMETERS: dict[str, Callable[[str], Any]] = {
    "backend": str,
    "threads": int,
    "threshold": float,
    "size": parse_size,
    "image_decoder": str,
    "max_pixels": int,
    "max_prompt_runs": int,
}


def _options(given: Mapping[str, str]) -> dict[str, Any]:
    """Fields of `ServeConfig` from parameters of the configuration. Raises SpecError for others."""
    found = {}
    for name, text in given.items():
        if name == "EXECUTION_ENV_PATH":  # of Triton itself
            continue
        if name not in _PARAMETERS:
            known = ", ".join(("device", "precision", *_PARAMETERS))
            raise SpecError(f"config.pbtxt has the parameter '{name}', which is not known; known are: {known}")
        try:
            found[name] = _PARAMETERS[name](text)
        except ValueError:
            raise SpecError(f"config.pbtxt: the parameter '{name}' must be a number; got {text!r}") from None
    return found


def _check_precision(folder: Path, session: BaseSession, wanted: str) -> None:
    """Raise EngineError where a model was opened that computes in another precision. wanted: "" takes any."""
    facts = session.info.facts
    built = Bundle.open(folder).provenance.options.get("precision") or {"precision": "fp32"}
    found = str(facts.lowest_precision if facts is not None else built["precision"])
    if wanted not in ("", found):
        raise EngineError(
            f"'{folder}' was opened with {session.info.name}, in {found}, and config.pbtxt asks for {wanted}"
            + (f" ({session.info.note})" if session.info.note else "")
        )


def _check_tensors(side: str, given: Sequence[Mapping[str, Any]], infos: Sequence[TensorInfo]) -> int | None:
    """The declared number of detections; None: as many as there are. side: "input" or "output".

    Tensors may be left out, and an axis of any length may be declared with one. Triton itself does not compare outputs with the declared ones.

    Raises:
        SpecError: a tensor that the bundle does not have, has with another type or shape, or outputs with different numbers of detections.
    """
    known = {info.name: info for info in infos}
    rows = {}
    for row in given:
        name, kind, dims = row["name"], row["data_type"], [int(axis) for axis in row["dims"]]
        if name not in known:
            raise SpecError(f"config.pbtxt has the {side} '{name}', and this bundle has: {', '.join(known)}")
        axes = known[name].shape[1:]
        kept = len(dims) == len(axes) and all(isinstance(axis, str) or axis == had for axis, had in zip(axes, dims, strict=True))
        needed = config_type(known[name].dtype)
        if kind != needed or not kept:
            wanted = [axis if isinstance(axis, int) else -1 for axis in axes]
            raise SpecError(f"config.pbtxt has the {side} '{name}' as {kind} {dims}; this bundle has it as {needed} {wanted}")
        if isinstance(axes[0], str):
            rows[name] = dims[0]
    if side == "output" and len(set(rows.values())) > 1:
        raise SpecError(f"config.pbtxt must have the same number of detections, the first axis, in all outputs; got {rows}")
    return next((count for count in rows.values() if count > 0), None)


def _check_arrays() -> None:
    """Raise SpecError where this build of the Python backend cannot read arrays of this NumPy.

    Those until Triton 2.51 were compiled for NumPy 1. With NumPy 2 every input repeats its first element, and outputs are empty.
    """
    numbers = np.arange(3, dtype=np.float32)
    again = pb_utils.Tensor.from_dlpack("again", pb_utils.Tensor("numbers", numbers)).as_numpy()
    if not np.array_equal(again, numbers):
        raise SpecError(
            f"Triton's Python backend cannot read arrays of NumPy {np.__version__}: it was built for NumPy 1, as those until Triton "
            "2.51; in the environment of Triton: pip install 'numpy<2'"
        )
