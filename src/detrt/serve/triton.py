"""A bundle as a model of Triton Inference Server: its configuration, and a `model.py` that opens the bundle with detrt."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from .. import files
from ..bundle import MANIFEST, Bundle
from ..data.preprocess import check_size
from ..errors import OutputError, SpecError
from ..spec import TensorInfo
from .detection_tensors import detection_inputs, detection_outputs
from .kserve import config_type
from .triton_config import BUNDLE, MODEL_NAME, TritonConfig

CONFIG, SCRIPT = "config.pbtxt", "model.py"
_SCRIPT = "from detrt.serve.triton_model import TritonPythonModel  # noqa: F401\n"
_CONFIG = """\
name: {name}
backend: "python"
max_batch_size: {max_batch}
input [
{inputs}
]
output [
{outputs}
]
instance_group [ {{ count: {instances} kind: {kind} }} ]
dynamic_batching {{ {batching} }}
parameters [
{parameters}
]
"""


@dataclass(frozen=True, slots=True)
class TritonRepo:
    """The written model. folder: of the repository. command: starts Triton. notes: for people."""

    folder: Path
    model: str
    version: int
    command: str
    notes: tuple[str, ...] = ()


def write_triton_repo(bundle_folder: Path | str, output: Path | str, config: TritonConfig | None = None) -> TritonRepo:
    """Write a version of a model: a copy of the bundle and its `model.py`, and `config.pbtxt` where the model is new.

    Raises:
        SpecError: not a bundle, a damaged one, no name for the model, or a size that it does not take.
        OutputError: `output` is in a model or a bundle, this version is there, or another one that was written with other choices or for other tensors.
    """
    config = config or TritonConfig()
    bundle = Bundle.open(bundle_folder)
    name = config.name or re.sub(r"[^A-Za-z0-9_.-]", "_", Path(os.path.abspath(bundle_folder)).name)
    if not MODEL_NAME.fullmatch(name):
        raise SpecError(f"'{bundle_folder}' gives no name for a model; give one with `name`")
    check_size(bundle.spec.input, config.size)
    _check_repository(Path(output), name)
    for entry in bundle.files:
        bundle.checked_path(entry)
    _write(Path(output) / name, str(config.version), bundle, config_text(bundle, name, config))
    notes = []
    if not config.environment:
        notes.append(
            "the Python environment of Triton needs detrt (or give another one with `environment`), with NumPy 1 until Triton 2.51"
        )
    if shlex.quote(path := os.path.abspath(output)) != path:
        # Its Python backend starts models by `bash -c` and does not quote the path; then it waits for ever. It reads paths as ASCII.
        notes.append(
            f"Triton 2.51 starts no model in '{path}': its paths may have ASCII letters, digits and _@%+=:,./- only; move the repository"
        )
    command = f"tritonserver --model-repository={shlex.quote(str(output))}"
    return TritonRepo(Path(output), name, config.version, command, tuple(notes))


def _check_repository(output: Path, name: str) -> None:
    """Raise OutputError where a repository in `output` would be inside a model or a bundle, or its model among other files."""
    for folder in (output.absolute(), *output.absolute().parents):
        for file, what in ((CONFIG, "a model of a repository"), (MANIFEST, "a bundle")):
            if (folder / file).exists():
                raise OutputError(f"'{folder}' is {what}; give the folder above it with `output`, or another one")
    model = output / name
    if model.is_dir() and not (model / CONFIG).exists() and any(model.iterdir()):
        raise OutputError(
            f"'{model}' is there and is no model of Triton: it has no {CONFIG}; give another `output`, another `name`, or delete it"
        )


def config_text(bundle: Bundle, name: str, config: TritonConfig) -> str:
    """`config.pbtxt` in the text form of protobuf, which is as that of JSON but for the names of fields; see `model_config.proto`."""
    spec = bundle.spec
    text = spec.text
    takes = detection_inputs(
        prompt=text is not None,
        task=text is not None and text.prompt_kind.takes_task,
        query_images=bool(bundle.of_kind("query")) and not spec.decode.in_graph,
    )
    batching = [f"max_queue_delay_microseconds: {round(config.max_delay_ms * 1000)}"]
    if config.preferred_batch:
        batching.insert(0, f"preferred_batch_size: {list(config.preferred_batch)}")
    if config.queue:
        batching.append(f"default_queue_policy {{ max_queue_size: {config.queue} }}")
    parameters = {
        "backend": config.backend,
        "device": config.device,
        "precision": config.precision,
        "threshold": float(config.threshold),
        "image_decoder": config.image_decoder,
        "threads": config.threads,
        "size": config.size and f"{config.size[0]}x{config.size[1]}",
        "EXECUTION_ENV_PATH": config.environment,
    }
    return _CONFIG.format(
        name=json.dumps(name),
        max_batch=config.max_batch,
        inputs=",\n".join(_tensor(info, " optional: true" + " allow_ragged_batch: true" * (-1 in _dims(info))) for info in takes),
        outputs=",\n".join(_tensor(info, rows=config.rows) for info in detection_outputs(spec)),
        instances=config.instances,
        kind=f"KIND_GPU gpus: {config.gpus}" if config.gpus else "KIND_CPU",
        batching=" ".join(batching),
        parameters=",\n".join(
            f"  {{ key: {json.dumps(key)} value {{ string_value: {json.dumps(str(value))} }} }}"
            for key, value in parameters.items()
            if value is not None
        ),
    )


def _dims(info: TensorInfo, rows: int | None = None) -> list[int]:
    """Without the batch; a symbolic axis is `rows`, or -1."""
    return [axis if isinstance(axis, int) else rows or -1 for axis in info.shape[1:]]


def _tensor(info: TensorInfo, more: str = "", rows: int | None = None) -> str:
    return f"  {{ name: {json.dumps(info.name)} data_type: {config_type(info.dtype)} dims: {_dims(info, rows)}{more} }}"


def _write(model: Path, version: str, bundle: Bundle, text: str) -> None:
    """Put a whole version in its place, and before it the configuration, where there is none.

    Raises:
        OutputError: it cannot be written, or what is there differs.
    """
    place = model / version
    if os.path.lexists(place):
        raise OutputError(f"'{place}' is there already; give another `version`, another `name`, or delete it")
    files.check_place(place)
    try:
        written = (model / CONFIG).read_bytes() if (model / CONFIG).exists() else None
        if written not in (None, text.encode()):
            raise OutputError(
                f"'{model / CONFIG}' was written with other choices, edited, or for a model with other inputs or outputs, and all versions "
                f"share it: it has {_difference(written.decode('utf-8', 'replace'), text)}; give the same options, or another `name`, or "
                "another `output` and move the version here"
            )
        is_new = not os.path.lexists(model)
        with files.making_parents(model), files.temporary_folder(_staging(model), model.name) as temporary:
            staged = temporary / version
            for name in sorted({MANIFEST, *bundle.names()}):
                if (bundle.folder / name).is_file():
                    (staged / BUNDLE / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(bundle.folder / name, staged / BUNDLE / name)
            (staged / SCRIPT).write_text(_SCRIPT, "utf-8")
            if written is None:
                files.write_text((temporary if is_new else model) / CONFIG, text)
            files.move(temporary if is_new else staged, model if is_new else place)
    except OSError as error:
        raise files.output_error(place, error) from error


def _difference(written: str, text: str) -> str:
    """The first lines that differ."""
    had, asked = next(
        pair for pair in zip_longest(written.split("\n"), text.split("\n"), fillvalue="no more") if pair[0] != pair[1]
    )
    return f"'{had.strip()[:150]}', and now it would be '{asked.strip()[:150]}'"


def _staging(model: Path) -> Path:
    """The folder in which a version is put together, on the same file system.

    Triton takes every folder of a repository for a model, hidden ones too, and does not start with one that is none; of those in a
    model it reads versions only. A process that was killed must not leave such a folder, so that of a new model is beside the repository,
    where there is room for it.
    """
    if os.path.lexists(model):
        return model
    repository = model.parent.resolve()
    above = repository.parent
    return above if os.access(above, os.W_OK) and above.stat().st_dev == repository.stat().st_dev else repository
