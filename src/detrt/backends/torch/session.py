"""Sessions of checkpoints in PyTorch, the reference of all comparisons."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...errors import ExportError, SessionError, SourceError, one_line
from ...models.contract import ExportConfig, contract, exported_spec, query_encoder_contract, text_encoder_contract
from ...models.hooks import forced_choices, recorded_cuts, recorded_topk
from ...models.wrapper import ExportModule
from ...spec import ModelSpec, TextSpec
from ...tasks.reading_order import cuts_coordinates
from ...text.tokenizer import PromptTokenizer
from ..base import BaseSession, Choices, Feeds, Outputs, SessionInfo, check_feeds
from ..prompted import PromptedSession
from .threads import FORKED, is_forked, use_threads

if TYPE_CHECKING:
    from ...models.source import Source


def open_torch(source: Source, *, device: str = "cpu", spec: ModelSpec | None = None, threads: int | None = None) -> BaseSession:
    """A TorchSession; of a model that takes a prompt a `PromptedSession`, whose detector takes token ids if
    the original model does.

    Raises:
        SessionError: a device that does not exist. SourceError: the checkpoint has no tokenizer.
    """
    spec = spec or exported_spec(source, ExportConfig())
    text = spec.text
    if text is None:
        return TorchSession(source, device=device, spec=spec, threads=threads)
    if source.tokenizer is None:
        raise SourceError(f"'{source.provenance.source}' has no tokenizer; give one with `tokenizer=FILE`")
    tokenizer = PromptTokenizer(source.tokenizer, text)
    # The original model has a separate text encoder for class names only, and does not decode boxes.
    spec = spec.with_decode(in_graph=False, nms_in_graph=False, score_threshold=0.0)
    spec = replace(spec, text=replace(text, encoder=_text_encoder_of(text)))
    options: dict[str, Any] = {"device": device, "spec": spec, "threads": threads}
    encoder = TorchSession(source, **options, part="text encoder") if _text_encoder_of(text) else None
    detector = TorchSession(source, **options)
    part = "encoder of query images"
    queries = functools.partial(TorchSession, source, **options, part=part) if text.prompt_kind.takes_images else None
    return PromptedSession(detector, tokenizer, encoder, query_encoder=queries)


def _text_encoder_of(text: TextSpec) -> str:
    return "" if text.prompt_kind.reads_ids else (text.encoder or "text.onnx")


class TorchSession(BaseSession):
    """A Session over the plain model, without rewrites; on a GPU, deformable attention runs as detrt's kernel.

    source: the checkpoint. device: "cpu", "cuda" or "cuda:N". spec: the contract of inputs and
    outputs; the default takes raw uint8 pixels and returns logits and boxes. part: "detector", or
    "text encoder" or "encoder of query images" of a model that takes a prompt; `open_torch` puts them together. threads: on a CPU; None: PyTorch's.

    Raises:
        SessionError: a device that does not exist.
    """

    def __init__(
        self,
        source: Source,
        *,
        device: str = "cpu",
        spec: ModelSpec | None = None,
        part: str = "detector",
        threads: int | None = None,
    ) -> None:
        try:
            self._device = torch.device(device)
            if self._device.type == "cuda" and not torch.cuda.is_available():
                raise SessionError(f"device {device!r}: PyTorch sees no CUDA device here; use `device=cpu`")
            self.spec = spec or exported_spec(source, ExportConfig())
            self.module = _module(source, self.spec, part).eval().to(self._device)
        except (RuntimeError, ValueError) as error:
            raise SessionError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from None
        self._threads = threads if self._device.type == "cpu" else None
        note = _use_kernel(source.module) if self._device.type == "cuda" else ""
        contracts = {"detector": contract, "text encoder": text_encoder_contract}
        inputs, outputs = contracts.get(part, query_encoder_contract)(self.spec)
        where = str(self._device) if self._device.index is not None or self._device.type == "cpu" else "cuda:0"
        self._info = SessionInfo("torch", f"torch-{self._device.type}", where, inputs, outputs, notes=(note,) if note else ())
        if self._device.type == "cpu" and is_forked():
            self.add_note(FORKED)

    tells_selections = takes_selections = True
    _closed = False

    def selections(self, feeds: Feeds) -> tuple[Outputs, Choices]:
        with recorded_topk() as chosen, recorded_cuts() as integers:
            outputs = self.run(feeds)
        selections, cuts = ([tensor.cpu().numpy() for tensor in tensors] for tensors in (chosen, integers))
        return outputs, Choices(selections, cuts if cuts_coordinates(self.spec) else None)

    def run(self, feeds: Feeds, force: Choices | None = None) -> Outputs:
        """Run the model.

        Raises:
            SessionError: feeds that do not fit, another number or shape of selections, or PyTorch failed.
        """
        if self._closed or self._forked:
            raise self._unusable()
        check_feeds(self.inputs, feeds)
        use_threads(self._threads)
        tensors = [torch.from_numpy(np.ascontiguousarray(feeds[i.name])).to(self._device) for i in self.inputs]
        try:
            # PyTorch's default for convolutions on a GPU is TF32, which a reference must not use.
            exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
            forced = contextlib.nullcontext() if force is None else forced_choices(*force)
            with torch.inference_mode(), exact, forced:
                results = self.module(*tensors)
        except ExportError as error:
            raise SessionError(str(error)) from error
        except RuntimeError as error:
            raise SessionError(f"PyTorch failed: {one_line(error, 400)}") from error
        arrays = (r.float().cpu().numpy() if r.is_floating_point() else r.cpu().numpy() for r in results)
        return dict(zip((info.name for info in self.outputs), arrays, strict=True))

    def in_double(self, feeds: Feeds, force: Choices) -> Outputs:
        """`run` of a copy of the model in FP64: what FP32 rounds."""
        from copy import deepcopy

        inner, kept = deepcopy(self.module).double(), self.module

        def widen(_: Any, args: Any, kwargs: Any) -> Any:
            def wide(x: Any) -> Any:
                return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

            return tuple(map(wide, args)), {name: wide(value) for name, value in kwargs.items()}

        inner.model.register_forward_pre_hook(widen, with_kwargs=True)
        self.module = inner
        try:
            return self.run(feeds, force)
        finally:
            self.module = kept

    def close(self) -> None:
        self._closed = True
        self.module = torch.nn.Identity()  # type: ignore[assignment]


def _module(source: Source, spec: ModelSpec, part: str) -> torch.nn.Module:
    if spec.text is None:
        return ExportModule(source.module, spec)
    from ...models.wrapper import StockQueryEncoder, StockTextEncoder, StockTextModule

    if part == "text encoder":
        return StockTextEncoder(source)
    return StockTextModule(source, spec) if part == "detector" else StockQueryEncoder(source, spec)


def _use_kernel(model: torch.nn.Module) -> str:
    """Run deformable attention as the fused op; a note if some modules are not supported."""
    from ...models.ops.replace import install, missing

    install(model)
    return "".join(f"{name} is not the code that detrt knows, and runs without its kernel; " for name in missing(model)).strip(
        "; "
    )
