"""Run a package of the target `inductor`: PyTorch's compiled code, with CUDA graphs on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...bundle import EngineFacts, open_sidecar
from ...data.preprocess import BatchPlan, SizeHW, size_words
from ...data.raw_image import LoadedImage
from ...errors import EngineError, MissingPackageError, SessionError, number_of, one_line
from ...models import trust
from ...spec import PIXEL_VALUES, ModelSpec, TensorInfo
from ...system import check_driver, cpu_flags
from ..base import BaseSession, Choices, Feeds, ImageRunner, Outputs, PendingOutputs, SessionInfo, check_feeds
from .config import NATIVE

if TYPE_CHECKING:
    from ..gpu.decoder import GpuDecoder
    from ..gpu.runner import GpuRunner


# Input shapes with a CUDA graph; each holds the memory of a run.
MAX_GRAPHS = 8
_CPU_LEVELS = ("DEFAULT", "NO AVX", "AVX2", "AVX512")


class InductorSession(BaseSession):
    """A Session over a compiled package.

    path: the `.pt2` file. spec, facts: from the bundle; None: from the sidecar beside the file. compare: see `TensorRTSession`. device: "cuda:N" for
    packages of a GPU; None is the first one. graphs: replay a CUDA graph for each input shape. threads: on a CPU; None: PyTorch's.

    Raises:
        EngineError: built by another version of PyTorch, for another GPU or a better CPU, or damaged.
        MissingPackageError: torch is not installed. SessionError: a device that the package was not built for.
    """

    def __init__(
        self,
        path: Path | str,
        spec: ModelSpec | None = None,
        facts: EngineFacts | None = None,
        *,
        compare: Callable[[], object] | None = None,
        device: str | None = None,
        graphs: bool = True,
        threads: int | None = None,
    ) -> None:
        path = Path(path)
        if spec is None or facts is None:
            spec, facts, beside = open_sidecar(path)
            compare = compare or beside
        if facts.target == "inductor-cuda":
            check_driver(f"'{path.name}'", EngineError, "build another with: `build(device=cpu)`")
        try:
            import torch
        except ImportError:
            raise MissingPackageError("torch", "export", f"running '{path.name}'") from None
        from ..torch.threads import FORKED, is_forked, use_threads
        from .package import load_package

        self._torch, self.path, self.spec, self.facts = torch, path, spec, facts
        kind = facts.target.removeprefix("inductor-")
        self._device = _device(torch, kind, device, path.name)
        _check_versions(torch, facts, path.name, self._device)
        if compare is not None:
            compare()
        trust.require(path, NATIVE)
        inputs = tuple(TensorInfo(i["name"], i["dtype"], tuple(i["shape"])) for i in facts.inputs)
        outputs = tuple(TensorInfo(o["name"], o["dtype"], tuple(o["shape"])) for o in facts.outputs)
        first = facts.profile[inputs[0].name]
        self._info = SessionInfo(
            "inductor",
            f"inductor-{self._device.type}",
            str(self._device),
            inputs,
            outputs,
            path=path,
            min_batch=first["min"][0],
            max_batch=first["max"][0],
            facts=facts,
            compiled=True,
        )
        graphs = graphs and self._device.type == "cuda"
        self._use_threads = partial(use_threads, threads)
        if self._device.type == "cpu" and is_forked():
            self.add_note(FORKED)
        try:
            self._run: Any = load_package(path, str(self._device), threads=not graphs)
        except EngineError:
            raise
        except Exception as error:  # what PyTorch raises here shares no base class
            raise EngineError(
                f"'{path.name}' cannot be loaded by PyTorch {torch.__version__}: {one_line(error, 400)}; build it again with: detrt build"
            ) from None
        self._replays: dict[tuple[tuple[int, ...], ...], _ReplayGraph] | None = {} if graphs else None
        self._runner: GpuRunner | None = None

    def run(self, feeds: Feeds, force: Choices | None = None) -> Outputs:
        """Run one batch.

        Raises:
            SessionError: feeds that do not fit, a failure inside the model, or a closed session.
        """
        self._refuse(force)
        if self._run is None or self._forked:
            raise self._unusable()
        check_feeds(self.inputs, feeds)
        arrays = [np.ascontiguousarray(feeds[info.name]) for info in self.inputs]
        count = arrays[0].shape[0]
        smallest, largest = self._info.min_batch, self._info.max_batch
        if not smallest <= count <= (largest or count):
            raise SessionError(
                f"the package '{self.path.name}' takes batches from {smallest} to {largest}; got {count}; give "
                "another `batch` to build for others"
            )
        try:
            results = self._forward(arrays)
        except (RuntimeError, AssertionError) as error:  # compiled code asserts sizes
            raise SessionError(f"'{self.path.name}' failed: {one_line(error, 400)}") from error
        return dict(zip((info.name for info in self.outputs), results, strict=True))

    def _forward(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        torch = self._torch
        with torch.inference_mode():
            if self._device.type == "cpu":
                self._use_threads()
                outputs = self._run(*(torch.from_numpy(a) for a in arrays))
                return [t.numpy().copy() for t in outputs]
            with torch.cuda.device(self._device), self._convolution_flags():
                if self._replays is None:
                    outputs = self._run(*(torch.from_numpy(a).to(self._device) for a in arrays))
                    return [t.cpu().numpy() for t in outputs]
                key = tuple(a.shape for a in arrays)
                if key not in self._replays:
                    if len(self._replays) >= MAX_GRAPHS:
                        self._replays.pop(next(iter(self._replays)))
                    self._replays[key] = _ReplayGraph(torch, self._run, arrays, self._device)
                return self._replays[key](arrays)

    @property
    def image_runner(self) -> GpuRunner | None:
        """None on a CPU."""
        if self._replays is None or self._run is None or self._forked:
            return None
        if self._runner is None:
            from ..gpu.runner import GpuRunner, stream_for

            stream = stream_for(self._device.index or 0)
            self._runner = GpuRunner(
                self.spec,
                self.inputs,
                self.outputs,
                self._device,
                lambda inputs, finish: self._capture(stream, inputs, finish),
                stream,
            )
        return self._runner

    def _capture(self, stream: Any, inputs: Mapping[str, Any], finish: Any) -> tuple[Any, list[Any]]:
        """A CUDA graph of the model on these tensors and of `finish` on its outputs."""
        tensors = [inputs[info.name] for info in self.inputs]

        def step() -> list[Any]:
            outputs: list[Any] = finish(dict(zip((info.name for info in self.outputs), self._run(*tensors), strict=True)))
            return outputs

        from ..gpu.cuda_graph import capture_graph

        with self._convolution_flags():
            graph, results = capture_graph(step, stream)
        return graph.replay, results

    def _convolution_flags(self) -> Any:
        """cuDNN flags: search for the fastest convolutions in the first run, and TF32 only if the package has it."""
        return self._torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=self.facts.precision == "tf32")

    def close(self) -> None:
        """Release the model's memory; closing twice is fine."""
        self._run, self._replays, self._runner = None, None, None


class _ReplayGraph:
    """A CUDA graph of one run: pinned host memory, fixed device memory, copies that do not wait."""

    def __init__(self, torch: Any, run: Any, arrays: list[np.ndarray], device: Any) -> None:
        from ..gpu.cuda_graph import capture_graph

        self._torch = torch
        self._stream = torch.cuda.Stream(device)
        self._hosts = [torch.from_numpy(a).clone().pin_memory() for a in arrays]
        with torch.cuda.stream(self._stream):
            self._inputs = [h.to(device, non_blocking=True) for h in self._hosts]
            self._graph, self._outputs = capture_graph(lambda: list(run(*self._inputs)), self._stream)
            self._results = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in self._outputs]

    def __call__(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        for host, array in zip(self._hosts, arrays, strict=True):
            host.numpy()[...] = array
        with self._torch.cuda.stream(self._stream):
            for tensors, host in zip(self._inputs, self._hosts, strict=True):
                tensors.copy_(host, non_blocking=True)
            self._graph.replay()
            for result, output in zip(self._results, self._outputs, strict=True):
                result.copy_(output, non_blocking=True)
            self._stream.synchronize()
        return [r.numpy().copy() for r in self._results]


def _device(torch: Any, kind: str, requested: str | None, name: str) -> Any:
    try:
        device = torch.device(requested or ("cuda:0" if kind == "cuda" else "cpu"))
    except RuntimeError:
        raise SessionError(f"`device={requested}` is not a device of PyTorch; write cpu, cuda or cuda:1") from None
    if device.type != kind:
        raise SessionError(
            f"'{name}' was compiled for {kind}; got `device={requested}`; build another with: `build(device={device.type})`"
        )
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise EngineError(
                f"'{name}' was compiled for a GPU, and PyTorch sees no CUDA device here; build another with: `build(device=cpu)`"
            )
        if (device.index or 0) >= torch.cuda.device_count():
            raise SessionError(
                f"`device={requested}`: PyTorch sees {number_of(torch.cuda.device_count(), 'GPU')} here, from cuda:0"
            )
    return device


def _check_versions(torch: Any, facts: EngineFacts, name: str, device: Any) -> None:
    """Compiled code calls PyTorch's libraries, so it runs only with the version that compiled it."""
    rebuild = "build it again with: `build(MODEL, output=OUT, targets=inductor)`"
    if facts.runtime_version != torch.__version__:
        raise EngineError(f"'{name}' was compiled by PyTorch {facts.runtime_version}, here is {torch.__version__}; {rebuild}")
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major * 10 + minor not in facts.compute_capabilities:
            raise EngineError(
                f"'{name}' was compiled for compute capability {', '.join(map(str, facts.compute_capabilities))}, this GPU has "
                f"{major * 10 + minor} ({torch.cuda.get_device_name(device)}); {rebuild}"
            )
        if facts.options.get("format") != "aoti":
            return  # of an artifact only the kernels of the GPU are machine code
    known = cpu_flags()
    missing = [flag for flag in facts.options.get("cpu_flags", ()) if flag not in known] if known else []
    if missing:
        raise EngineError(
            f"'{name}' was compiled for a CPU with {', '.join(missing[:4])}{' and more' * (len(missing) > 4)}, which this one has not; "
            f"{rebuild}"
        )
    built_for, here = str(facts.options.get("cpu_capability", "")), torch.backends.cpu.get_cpu_capability()
    if built_for in _CPU_LEVELS and here in _CPU_LEVELS and _CPU_LEVELS.index(built_for) > _CPU_LEVELS.index(here):
        raise EngineError(f"'{name}' was compiled for a CPU with {built_for}, this one has {here}; {rebuild}")


class SizedSession(BaseSession):
    """Several packages of one model, one per input size, as one session. Batches run in the session of their size.

    sessions: of one model and device, in order of preference; spec and info are those of the first. A `Detector` gives every image the size of `info.sizes`
    whose aspect ratio is nearest to its own, the first of equal ones.
    """

    def __init__(self, sessions: Sequence[BaseSession]) -> None:
        first = sessions[0]
        self._sessions = {_size(session): session for session in sessions}
        self.spec = first.spec
        self._info = replace(
            first.info,
            min_batch=max(session.info.min_batch for session in sessions),
            max_batch=min((session.info.max_batch for session in sessions if session.info.max_batch), default=None),
            sizes=tuple(self._sessions),
            facts_by_size={size: one.info.facts for size, one in self._sessions.items() if one.info.facts is not None},
        )

    def run(self, feeds: Feeds, force: Choices | None = None) -> Outputs:
        """Run one batch.

        Raises:
            SessionError: as `InductorSession.run`; a size that is none of `info.sizes`.
        """
        self._refuse(force)
        return self.of(tuple(feeds[PIXEL_VALUES].shape[2:]) if PIXEL_VALUES in feeds else None).run(feeds)

    @property
    def image_runner(self) -> ImageRunner | None:
        """Itself if the sessions resize on their device."""
        return self if next(iter(self._sessions.values())).image_runner is not None else None

    def submit(self, images: Sequence[LoadedImage], plan: BatchPlan) -> PendingOutputs:
        """As `ImageRunner.submit`."""
        runner = self.of(plan.tensor_hw).image_runner
        assert runner is not None
        return runner.submit(images, plan)

    def stage_times(self, images: Sequence[LoadedImage], plan: BatchPlan, repeats: int) -> dict[str, list[float]]:
        """As `ImageRunner.stage_times`."""
        runner = self.of(plan.tensor_hw).image_runner
        assert runner is not None
        return runner.stage_times(images, plan, repeats)

    def decoder(self) -> GpuDecoder:
        """As `ImageRunner.decoder`."""
        runner = self.of(None).image_runner
        assert runner is not None
        return runner.decoder()

    def of(self, size_hw: SizeHW | None) -> BaseSession:
        """The session of a size, or of the first. Raises SessionError: no package has that size."""
        if size_hw is None:
            size_hw = self.info.sizes[0]
        if size_hw not in self._sessions:
            raise SessionError(f"there is no package for {size_hw[0]}x{size_hw[1]}; there are {size_words(self.info.sizes)}")
        return self._sessions[size_hw]

    def close(self) -> None:
        for session in self._sessions.values():
            session.close()


def _size(session: BaseSession) -> SizeHW:
    shape = session.info.pixel_shape
    return int(shape[2]), int(shape[3])
