"""Compilation of a captured graph to one file.

Either an AOTInductor package, which C++ opens as well, or, for a GPU, an archive of the artifacts of the compiler (its code, the
kernels as machine code) and the weights; see docs/guide/compiled-packages.md.
"""

from __future__ import annotations

import json
import logging
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config

from ... import files
from ...errors import ExportError, one_line
from .capture import CapturedGraph
from .early import EARLY_PIXELS, early_start, pixels_of
from .package import ARTIFACT, INDEX, WEIGHTS, Run, bind_weights

# Each form of the compiler's C++ header is 150 MB, which PyTorch writes to the folder for temporary files and leaves there.
_COMMON = {"aot_inductor.precompile_headers": False, "cpp_cache_precompile_headers": False}


def options_for(device: str, tune: str = "", pixels: int = 0) -> dict[str, Any]:
    """Options of the compiler. tune: "" for its defaults, "max" to try many kernels for matmuls and convolutions. pixels: of a batch."""
    if device == "cpu":
        # Weights are laid out for the CPU's own convolutions while compiling. Without dynamic threads the code has the number of threads
        # of this process in it, unless that is the number of cores.
        return {**_COMMON, "freezing": True, "cpp.dynamic_threads": True}
    # Padded strides would reach the kernel of deformable attention, which needs dense ones. `shape_padding` times matmuls while
    # compiling, where other work distorts the timing: with it Grounding DINO took 4.5 ms instead of 4.1.
    options: dict[str, Any] = {
        **_COMMON,
        "comprehensive_padding": False,
        "reorder_for_peak_memory": False,
        "shape_padding": False,
    }
    if hasattr(config.triton, "enable_pdl"):  # programmatic dependent launch, of Hopper and newer; PyTorch 2.8 and 2.9 have none
        options["triton.enable_pdl"] = pixels <= EARLY_PIXELS
    if "max" in tune:
        options |= {"max_autotune": True}
    if "gemm" in tune:
        options |= {"max_autotune_gemm": True}
    if "cdt" in tune or "max" in tune:
        options |= {"coordinate_descent_tuning": True}
    return options


def compile_package(captured: CapturedGraph, path: Path, tune: str = "", form: str = "") -> None:
    """Compile a graph to `path`. form: "aoti" or "artifact"; "" is "aoti" for a CPU and "artifact" for a GPU.

    Raises:
        ExportError: the compiler refused the graph.
    """
    device = captured.inputs[0].device.type
    options = options_for(device, tune, pixels_of(captured))
    if (form or ("aoti" if device == "cpu" else "artifact")) == "aoti":
        compile_aoti(captured, path, options)
    else:
        compile_artifact(captured, path, options)


def compile_aoti(captured: CapturedGraph, path: Path, options: dict[str, Any]) -> None:
    program = captured.exported()
    if captured.inputs[0].device.type == "cuda":
        # The code around the kernels runs once, while a CUDA graph is recorded.
        options = {**options, "aot_inductor.compile_wrapper_opt_level": "O0"}
    with _quiet(captured), early_start():
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)


def compile_artifact(captured: CapturedGraph, path: Path | None, options: dict[str, Any]) -> Run:
    """Compile, write to `path` if given, and return the compiled function."""
    program = captured.exported()
    weights, order = _weights(program)
    examples, dynamic = [*weights, *captured.inputs], "from_example_inputs"
    if captured.ranges:
        # Real examples would make sizes all fixed or all symbolic; the values of the graph say which are symbolic.
        examples, dynamic = _symbolic_examples(program.graph_module), "from_graph"
    with _quiet(captured), early_start():
        artifact = torch._inductor.standalone_compile(
            program.graph_module, examples, dynamic_shapes=dynamic, options={"config_patches": options}
        )
        if path is not None:
            with files.scratch() as folder:
                saved, tensors = folder / ARTIFACT, folder / WEIGHTS
                artifact.save(path=str(saved), format="binary")
                torch.save([w.cpu() for w in weights], tensors)
                with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
                    archive.writestr(INDEX, json.dumps({"weights": order, "torch": torch.__version__}))
                    archive.write(saved, ARTIFACT)
                    archive.write(tensors, WEIGHTS)
    return bind_weights(artifact, weights)


def _symbolic_examples(graph: torch.fx.GraphModule) -> list[Any]:
    """The fake inputs of a program's graph; marks its outputs, so that the compiler finds their shapes."""
    for node in graph.graph.output_node().all_input_nodes:
        node.meta["example_value"] = node.meta["val"]
    return [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]


def _weights(program: torch.export.ExportedProgram) -> tuple[list[Tensor], list[str]]:
    """Tensors that the program's graph takes before its inputs, and their names.

    Raises:
        ExportError: the program takes them in another order.
    """
    kinds = torch.export.graph_signature.InputKind
    tensors, names, seen_input = [], [], False
    for entry in program.graph_signature.input_specs:
        if entry.kind == kinds.USER_INPUT:
            seen_input = True
            continue
        target = str(entry.target)
        tensor = program.state_dict.get(target)
        tensors.append(program.constants[target] if tensor is None else tensor)
        names.append(target)
        if seen_input:
            raise ExportError("the captured program takes its weights after its inputs, which detrt does not support")
    return [t.detach() for t in tensors], names


class _quiet:
    """Silence the compiler, and turn its exceptions, which share no base class, into ExportError."""

    def __init__(self, captured: CapturedGraph) -> None:
        self._device = captured.inputs[0].device.type
        self._caught = warnings.catch_warnings()
        self._grad = torch.no_grad()

    def __enter__(self) -> None:
        logging.getLogger("torch._inductor").setLevel(logging.ERROR)
        self._caught.__enter__()
        warnings.simplefilter("ignore")
        self._grad.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._grad.__exit__(kind, error, trace)
        self._caught.__exit__(kind, error, trace)
        if error is not None and isinstance(error, Exception):
            if (full := files.room_error(error)) is not None:  # said at the end of the C++ compiler's long message
                raise full from error
            text = one_line(error, 600)
            raise ExportError(f"PyTorch {torch.__version__} could not compile the model for {self._device}: {text}") from error
