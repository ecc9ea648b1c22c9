"""The exception tree of detrt. Only these leave the public functions for bad input.

DetrtError                 exit code 2
├── SourceError            a checkpoint, its config or its family
├── SpecError              a ModelSpec, its JSON or its labels
├── ExportError            PyTorch -> ONNX
├── GraphError             an ONNX file or a pass over it
├── EngineError            ONNX -> TensorRT engine, or a wrong or stale engine
├── SessionError           running a model
├── PromptError            what to look for: a prompt, a list of class names
├── ImageError             an image, a video or a list of them
├── OutputError            a place that cannot be written
├── MissingPackageError    an optional package that is not installed
└── GateError              exit code 3: the work was done, and the result failed its check
"""

from __future__ import annotations


class DetrtError(Exception):
    """Bad input or a missing package; the message says what was wrong, got, allowed and what to do."""

    exit_code = 2


class SourceError(DetrtError):
    pass


class SpecError(DetrtError):
    pass


class ExportError(DetrtError):
    pass


class GraphError(DetrtError):
    pass


class EngineError(DetrtError):
    pass


class SessionError(DetrtError):
    pass


class PromptError(DetrtError):
    pass


class ImageError(DetrtError):
    pass


class OutputError(DetrtError):
    pass


class MissingPackageError(DetrtError):
    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package '{package}', which is not installed; run: pip install 'detrt[{extra}]'")
        self.package = package
        self.extra = extra
        self.purpose = purpose

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        return type(self), (self.package, self.extra, self.purpose)  # from one process to another


class GateError(DetrtError):
    exit_code = 3
