"""The first opening of a TensorRT-RTX engine on a GPU: the engine is compared with its graph.

Such engines may be built on machines without the GPU that runs them, where `detrt build` cannot compare them. The verdict is stored
beside the compiled kernels, so that one process pays for it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ... import files
from ...bundle import Bundle, BundleFile
from ...errors import GateError, MissingPackageError, OutputError, SessionError, SpecError
from ..base import BaseSession
from ..engine_check import compare_sessions, shapes_of
from ..prompted import detector_of

FIRST_SECONDS = 10.0  # after which no further scenes are run: the session opens only then


def check_first_opening(session: BaseSession, bundle: Bundle, entry: BundleFile, open_graph: Callable[[], BaseSession]) -> None:
    """Compare an RTX engine with its graph at its least and usual shape, unless a verdict about it on this GPU is stored: by `build`,
    which compares where the GPU is there, or by an opening before.

    Nothing is compared without a file for compiled kernels (`default_runtime_cache`), or of another target.

    Args:
        session: the opened engine, with its text encoder where the model takes a prompt.
        entry: its file in the bundle.
        open_graph: opens the bundle's graph in ONNX Runtime on the CPU.

    Raises:
        GateError: the engine detects something else than its graph, now or at its first opening.
    """
    facts, info = entry.engine, detector_of(session).info
    if facts is None or facts.target != "tensorrt-rtx" or info.path is None:
        return
    built = bundle.provenance.options.get("engine_checks", {}).get(entry.path, {})
    if (built.get("engine_sha256"), built.get("gpu")) == (entry.sha256, info.gpu_name):
        return
    from .session import default_runtime_cache

    kernels = default_runtime_cache(info.path, facts, info.gpu_name)
    if kernels is None:
        return
    path = kernels.with_suffix(".json")
    stored = _read(path)
    if stored.get("engine_sha256") != entry.sha256:
        try:
            graph = open_graph()
        except (MissingPackageError, SessionError, SpecError) as error:
            session.add_note(f"{entry.path} was not compared with its graph at this first opening: {error}")
            return
        with contextlib.closing(graph):
            found = compare_sessions(graph, session, facts.lowest_precision, shapes=shapes_of(session)[:2], seconds=FIRST_SECONDS)
        stored = {"engine_sha256": entry.sha256, "verdict": found.verdict, **found.to_dict()}
        session.add_note(f"{entry.path} was compared with its graph at this first opening: {found.verdict}")
        with contextlib.suppress(OutputError):
            files.write_text(path, json.dumps(stored))
    if not stored["passed"] and not (bundle.provenance.has_random_weights and stored.get("ran", True)):
        raise GateError(
            f"the engine '{bundle.path_of(entry)}' does not detect on this GPU what its ONNX graph detects: {stored['verdict']}. Run the "
            "graph with `backend=onnxruntime`, or build the engine again with `msda=gather` or another `precision`"
        )


def _read(path: Path) -> dict[str, Any]:
    """The stored verdict; empty where there is none, or a damaged one."""
    try:
        stored = files.read_json(path, "verdict")
    except SpecError:
        return {}
    return stored if isinstance(stored, dict) and {"passed", "verdict"} <= stored.keys() else {}
