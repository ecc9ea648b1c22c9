"""What is installed, which targets work here, which GPU there is, and what to install for the rest."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .errors import DetrtError, SessionError, install_hint

# package -> (import name, extra, what it is for)
PACKAGES: dict[str, tuple[str, str, str]] = {
    "onnxruntime": ("onnxruntime", "", "run ONNX files"),
    "openvino": ("openvino", "openvino", "run OpenVINO models"),
    "torch": ("torch", "export", "load checkpoints"),
    "transformers": ("transformers", "export", "load checkpoints"),
    "onnx": ("onnx", "export", "write ONNX graphs"),
    "onnxslim": ("onnxslim", "export", "simplify ONNX graphs"),
    "tensorrt-rtx-cu13-bindings": ("tensorrt_rtx_bindings", "rtx", "build engines for GeForce RTX and RTX PRO, without a GPU"),
    "tensorrt": ("tensorrt", "trt", "build engines on the GPU that runs them"),
    "cuda-python": ("cuda.bindings", "gpu", "run engines"),
    "tokenizers": ("tokenizers", "text", "models that take a prompt"),
    "av": ("av", "video", "read and write videos"),
    "nvidia-nvimgcodec-cu13": ("nvidia.nvimgcodec", "decode", "`image_decoder=gpu`: JPEG files"),
    "pycocotools": ("pycocotools", "eval", "COCO AP"),
    "matplotlib": ("matplotlib", "bench", "plots of bench, eval"),
    "supervision": ("supervision", "supervision", "Detections.to_supervision"),
    "trackers": ("trackers", "track", "`track`"),
    "fastapi": ("fastapi", "serve", "detrt serve"),
    "uvicorn": ("uvicorn", "serve", "detrt serve"),
}


# Callbacks of long work. Progress(fraction 0 to 1 or None, what is being done); StageProgress(stage, fraction, what is being
# done); CountProgress(items done, all items).
Progress = Callable[[float | None, str], None]
StageProgress = Callable[[str, float | None, str], None]
CountProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Package:
    """An optional package. extra: of detrt, which brings it; "": none. install: what to do where it is missing."""

    name: str
    version: str | None
    purpose: str
    extra: str
    install: str


@dataclass(frozen=True, slots=True)
class TargetStatus:
    """Something detrt can build for or run on: whether it works here, and what to do if not."""

    name: str
    works: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Ability:
    """What a machine may be able to do, with what it takes.

    packages: of `PACKAGES`. on_gpu: also an NVIDIA GPU and its driver; compute_capabilities: of these, empty: any. works: what is
    said where it works; "": where it runs.
    """

    name: str
    packages: tuple[str, ...]
    on_gpu: bool = False
    compute_capabilities: tuple[int, ...] = ()
    works: str = ""


OWN_ABILITIES = (
    Ability("load and export checkpoints", ("torch", "transformers", "onnx", "onnxslim"), works="PyTorch on this CPU"),
    Ability("detect with ONNX Runtime", ("onnxruntime",)),
)
DECODING = Ability("decode JPEG files and videos on the GPU", ("nvidia-nvimgcodec-cu13", "av"), on_gpu=True)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    machine: dict[str, Any]
    gpus: tuple[dict[str, str], ...]
    packages: tuple[Package, ...]
    targets: tuple[TargetStatus, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def diagnose(abilities: Sequence[Ability] = ()) -> Diagnosis:
    """Look at this machine without importing any of the heavy packages. abilities: what it is asked for, beside detrt's own."""
    packages = tuple(_package(name) for name in PACKAGES)
    gpus = tuple(_gpus())
    rows = _abilities((*OWN_ABILITIES, *abilities, DECODING), {package.name: package for package in packages}, gpus)
    return Diagnosis(_machine(), gpus, packages, tuple(row for _, row in rows))


def able(abilities: Sequence[Ability]) -> list[Ability]:
    """Those of the abilities that this machine has."""
    names = dict.fromkeys(name for ability in abilities for name in ability.packages)
    have = {name: _package(name) for name in names}
    return [ability for ability, row in _abilities(abilities, have, tuple(_gpus())) if row.works]


def _package(name: str) -> Package:
    from importlib import metadata, util  # slow to load, which help need not wait for

    module, extra, purpose = PACKAGES[name]
    version: str | None = None
    try:
        if util.find_spec(module) is not None:
            version = metadata.version(name)
    except (ImportError, metadata.PackageNotFoundError):
        # onnxruntime also comes as onnxruntime-gpu and others: present, under another distribution name.
        # TensorRT of JetPack and of tar files comes without metadata: present, of a version that only an import tells.
        top = module.split(".")[0]
        if util.find_spec(top):  # first: the next line reads the files of all installed packages
            owners = metadata.packages_distributions().get(top, [])
            loaded = getattr(sys.modules.get(top), "__version__", "of unknown version")
            version = metadata.version(owners[0]) if owners else loaded
    return Package(name, version, purpose, extra, install_hint(extra, name))


def _machine() -> dict[str, Any]:
    memory = None
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "cores": usable_cores(),
        "memory_gib": memory,
        "disk_free_gib": round(shutil.disk_usage(".").free / 2**30, 1),
    }


def _gpus() -> list[dict[str, str]]:
    """Name, driver, memory and compute capability of every NVIDIA GPU, from nvidia-smi."""
    command = nvidia_smi()
    if command is None:
        return []
    fields = ("name", "driver_version", "memory.total", "compute_cap")
    try:
        result = subprocess.run(
            [command, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in result.stdout.splitlines() if line.strip()]
    return [dict(zip(fields, row, strict=False)) for row in rows if len(row) == len(fields)]


def compute_capabilities_here() -> tuple[int, ...]:
    """Of the GPUs of this machine, e.g. (89, 120), in nvidia-smi's order; empty where it finds none."""
    found = (one["compute_cap"].replace(".", "") for one in _gpus())
    return tuple(int(digits) for digits in found if digits.isdecimal())


# Folders of the driver beside the system's own, which the linker may not know: WSL; containers of the older runtime and of GKE; Debian's
# alternatives, Jetson; NixOS. NVIDIA's container toolkit looks for it in such places.
_DRIVER_FOLDERS = (
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    *(
        f"/usr/lib/{machine}-linux-gnu{end}"
        for machine in ("x86_64", "aarch64")
        for end in ("", "/nvidia/current", "/nvidia", "/tegra")
    ),
    "/usr/lib64",
    "/run/opengl-driver/lib",
)
# Of programs of the driver, where they are not beside its library or in PATH.
_PROGRAM_FOLDERS = ("/usr/local/nvidia/bin", "/run/current-system/sw/bin")


def has_driver() -> bool:
    """Whether a driver of an NVIDIA GPU can be loaded. It stays loaded, so that libraries which look for it by its name find it."""
    names = ["nvcuda.dll"] if sys.platform == "win32" else ["libcuda.so.1", *(f"{one}/libcuda.so.1" for one in _DRIVER_FOLDERS)]
    for name in names:
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return True
    return False


def nvidia_smi() -> str | None:
    """The program of the driver that lists GPUs, in PATH or where the driver is; None where it is not here."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *_PROGRAM_FOLDERS, *_DRIVER_FOLDERS])
    return shutil.which("nvidia-smi", path=path)


def check_driver(what: str, error: type[DetrtError], instead: str) -> None:
    """Raise `error` where no driver of an NVIDIA GPU is here, before a package is asked for that would not help.

    what: needs the GPU. instead: what to do without one.
    """
    if not has_driver():
        raise error(
            f"{what} needs an NVIDIA GPU, and there is no CUDA device: this machine has none, or no driver for it; {instead}"
        )


def _abilities(
    asked: Sequence[Ability], have: Mapping[str, Package], gpus: tuple[dict[str, str], ...]
) -> Iterator[tuple[Ability, TargetStatus]]:
    """Each ability, and whether this machine has it."""
    gpu = f"{gpus[0]['name']} (compute capability {gpus[0]['compute_cap']})" if gpus else "no NVIDIA GPU"
    caps = {int(one["compute_cap"].replace(".", "")) for one in gpus if one["compute_cap"].replace(".", "").isdecimal()}
    for ability in asked:
        missing = [have[name] for name in ability.packages if not have[name].version]
        extras = "".join(f"[{extra}]" for extra in dict.fromkeys(p.extra for p in missing) if extra)
        lacking = [", ".join(p.name for p in missing) + (f" {extras}" if extras else "")] if missing else []
        if ability.on_gpu:
            lacking += [f"{name} for CUDA" for name in ability.packages if (have[name].version or "").endswith("+cpu")]
            if not (gpus and has_driver()):
                lacking.append("an NVIDIA GPU and its driver")
            elif ability.compute_capabilities and not caps & set(ability.compute_capabilities):
                lacking.append(f"a GPU of compute capability {', '.join(map(str, ability.compute_capabilities))}")
        works = ability.works or (gpu if ability.on_gpu else "on this CPU")
        yield ability, TargetStatus(ability.name, not lacking, f"needs {' and '.join(lacking)}" if lacking else works)


# How many cores this process may use.
def usable_cores() -> int:
    """Cores that this process may use; fewer than the machine has inside many containers."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_name() -> str:
    """Of the CPU, e.g. "Intel(R) Xeon(R) Processor @ 2.50GHz"."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as facts:
            for line in facts:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux: the platform module knows less, but something
    return platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """Instruction sets of this CPU by the names of Linux, such as avx2 and avx512_vnni; empty where the system names none."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as facts:
            found = (line.partition(":")[2] for line in facts if line.startswith(("flags", "Features")))  # x86, ARM
            return frozenset(next(found, "").split())
    except OSError:
        return frozenset()


def saturates_int8() -> bool:
    """Whether this CPU has no exact INT8 products: x86 without VNNI, as far as the system tells (Linux).

    Its instruction for them, `vpmaddubsw`, clips the sum of two products to 16 bits. OpenVINO and ONNX Runtime use it.
    """
    flags = cpu_flags()
    return "sse2" in flags and not any("vnni" in flag for flag in flags)


SATURATES = (
    "this CPU has no VNNI: OpenVINO and ONNX Runtime clip sums of INT8 products to 16 bits on it, which costs average precision; "
    "run FP32 here, or compare with: detrt verify, detrt eval"
)


# Peak memory of this process.
def peak_memory_mib() -> float:
    """Largest resident memory of this process so far, MiB; 0 if the system does not report it.

    Linux's `ru_maxrss` survives fork and exec, so a child starts with its parent's peak; `VmHWM` is its own.
    """
    try:
        with open("/proc/self/status", encoding="utf-8") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) / 2**10
    except OSError:
        pass  # not Linux, or /proc is not mounted: ask the other way
    try:
        import resource
    except ImportError:  # Windows has no such module
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def return_freed_memory() -> None:
    """Give freed memory back to the system, for the processes beside this one; glibc keeps that of blocks below 32 MiB."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
        if trim is not None:
            trim(0)


@contextlib.contextmanager
def repeating(say: Callable[[], object], seconds: float, name: str) -> Iterator[None]:
    """Call `say` in a thread of that name every so many seconds while the block runs; an OSError ends it."""
    done = threading.Event()

    def repeat() -> None:
        with contextlib.suppress(OSError):
            while not done.wait(seconds):
                say()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


CPU = "cpu"
RUN_THREAD = "detrt-run"  # of the thread that runs a model on a CPU beside its caller
IMAGE_DECODERS = ("cpu", "gpu")
_FORM = "comma-separated numbers of GPUs and 'cpu', or cuda:all; e.g. 0,1 or cuda:0,cuda:1 or cpu,cpu; for OpenVINO also xpu (Intel GPU) and npu"


def parse_devices(text: str) -> tuple[str, ...]:
    """ "0,1" -> ("cuda:0", "cuda:1"); also "cuda:1", "cpu", "cuda:all" for every GPU, and OpenVINO's "xpu:0" and "npu".

    A device may be named several times: that many processes then share it.

    Raises:
        SessionError: another form, or "cuda:all" where there is no GPU.
    """
    found = []
    for part in (piece.strip().lower() for piece in text.split(",")):
        match = re.fullmatch(r"(?:(?:cuda|gpu):?)?(\d{1,4})", part)
        if match:
            found.append(f"cuda:{int(match[1])}")
        elif part == CPU:
            found.append(CPU)
        elif part in ("cuda", "gpu"):
            found.append("cuda:0")
        elif re.fullmatch(r"xpu(:\d{1,2})?|npu", part):
            found.append(part)
        elif part in ("all", "cuda:all"):
            found += _every_gpu()
        else:
            raise SessionError(f"`device` takes {_FORM}; got {text!r}")
    return tuple(found)


def _every_gpu() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = len([name for name in visible.split(",") if name.strip() and name.strip() != "-1"])
    else:
        try:
            done = subprocess.run([nvidia_smi() or "nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SessionError(
                f"`device=cuda:all`: nvidia-smi, which lists the GPUs, cannot be run ({error}); name them: 0,1"
            ) from None
        count = len(re.findall(r"^GPU \d+:", done.stdout, re.MULTILINE))
    if not count:
        raise SessionError("`device=cuda:all`: there is no NVIDIA GPU here; name the devices, e.g. `device=cpu,cpu`")
    return [f"cuda:{index}" for index in range(count)]


def cpu_threads(devices: Sequence[str]) -> int:
    """Threads for one worker, so that one worker for each of `devices` shares the cores of this machine."""
    return max(1, usable_cores() // max(1, len(devices)))


def package_version() -> str:
    """The version of detrt that is installed, or "0+unknown" in a source tree that is not."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("detrt")
    except PackageNotFoundError:
        return "0+unknown"


class _LosingFile(io.FileIO):
    """A file for messages: what it cannot take is lost."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def lose_unwritten_messages() -> None:
    """A stderr that is full, read-only or without a reader loses messages, as in GNU's tools, and fails nobody's work."""
    stream = sys.stderr
    if stream is not None and stream is sys.__stderr__:  # not one that a caller has put there
        with contextlib.suppress(OSError, ValueError):
            file = _LosingFile(stream.fileno(), "w", closefd=False)
            sys.stderr = io.TextIOWrapper(file, stream.encoding, "backslashreplace", line_buffering=True, write_through=True)
