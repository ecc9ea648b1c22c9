"""Opening OpenVINO models: alone, and of a bundle, where on a CPU the ONNX file may be the faster one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ...bundle import BundleFile, EngineFacts
from ...errors import MissingPackageError, SessionError
from ...system import CPU, processor_name
from ..base import BaseSession
from ..search import FileSearch, Opener, Parts, SessionOptions
from .session import OpenVinoSession

# On a CPU a bundle's OpenVINO model comes before its ONNX file, unless the ONNX file was the faster one on this processor.
PREFERRED_ON_CPU = "running the OpenVINO model, which was the faster one on a CPU (docs/results/cpu.md); `backend=onnxruntime` runs the ONNX file"


class OpenVinoOpener(Opener):
    """Opens OpenVINO models, and those of text encoders."""

    def open_file(self, path: Path, options: SessionOptions) -> BaseSession:
        return OpenVinoSession(path, device=options.device, threads=options.threads, **options.tuning)

    def choose(self, search: FileSearch) -> tuple[BaseSession, BundleFile] | None:
        bundle, options = search.bundle, search.options
        models, note = bundle.of_kind("openvino"), ""
        if options.backend == "auto" and models and options.device in (None, CPU):
            onnx_first, note = _faster_on_cpu(models[0].engine, options.tuning)
            if onnx_first:
                search.note = note
                return None
        for entry in models:
            path = _checked(bundle, entry)
            try:
                session = OpenVinoSession(
                    path, bundle.spec, entry.engine, device=options.device, threads=options.threads, **options.tuning
                )
            except (MissingPackageError, SessionError) as error:
                search.reject(entry, error)
                continue
            search.note = note
            return session, entry
        return None

    def open_text_encoder(self, parts: Parts, detector: BaseSession, options: SessionOptions) -> tuple[BaseSession | None, str]:
        encoders = parts.of_kind("text-openvino")
        if not encoders:
            return None, ""
        path = _checked(parts, encoders[0])
        return OpenVinoSession(path, detector.spec, encoders[0].engine, device=options.device, threads=options.threads), ""


def _checked(parts: Parts, entry: BundleFile) -> Path:
    """Path of a model; its weights, which OpenVINO opens with it, are compared too."""
    return parts.checked_path(entry, PurePosixPath(entry.path).with_suffix(".bin").name)


def _faster_on_cpu(facts: EngineFacts | None, tuning: Mapping[str, Any]) -> tuple[bool, str]:
    """Whether the ONNX file of a bundle runs rather than its OpenVINO model, and why.

    facts: of the OpenVINO model. tuning: what is given for OpenVINO.
    """
    speed = None if facts is None else facts.cpu_speed
    if tuning:
        return False, f"running the OpenVINO model, which `{next(iter(tuning))}` is for"
    if speed is None:
        return False, PREFERRED_ON_CPU
    here = processor_name()
    if speed.processor != here:
        return False, (
            f"{PREFERRED_ON_CPU}. When the bundle was built, both were timed on another processor ({speed.processor}; this one is "
            f"{here}); `build(BUNDLE, targets=openvino)` times them here"
        )
    model, other = ("ONNX file", "openvino") if speed.prefers_onnx else ("OpenVINO model", "onnxruntime")
    return speed.prefers_onnx, (
        f"running the {model}, which was the faster one on this processor when the bundle was built (OpenVINO "
        f"{speed.openvino_ms:.4g} ms, ONNX Runtime {speed.onnxruntime_ms:.4g} ms, {speed.threads} threads); `backend={other}` runs "
        "the other"
    )


OPENER = OpenVinoOpener()
