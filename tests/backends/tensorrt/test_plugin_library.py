"""The TensorRT plugin library and libdetrt's TensorRT backend, built against TensorRT's public headers.

Needs nvcc, cmake and the headers: their folder in DETRT_TENSORRT_INCLUDE, or where Debian's packages put them. With headers of
TensorRT 8 and DETRT_TENSORRT_LIBRARY=libnvinfer.so.8, that library registers the plugin too.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

CPP = Path(__file__).resolve().parents[3] / "cpp"
PLACES = (os.environ.get("DETRT_TENSORRT_INCLUDE", ""), "/usr/include/x86_64-linux-gnu", "/usr/local/tensorrt/include")
HEADERS = next((place for place in PLACES if place and (Path(place) / "NvInferRuntime.h").is_file()), None)
NVCC = shutil.which("nvcc")
CUDA_PLACES = (Path(NVCC or "/").resolve().parent.parent / "include", Path("/usr/local/cuda/include"))
CUDA = next((place for place in CUDA_PLACES if (place / "cuda_runtime_api.h").is_file()), CUDA_PLACES[-1])

VERSION = (Path(HEADERS) / "NvInferVersion.h").read_text() if HEADERS else ""
MAJOR = int((re.search(r"define (?:NV_TENSORRT_MAJOR|TRT_MAJOR_ENTERPRISE) (\d+)", VERSION) or [0, 0])[1])
rtx = pytest.mark.skipif(MAJOR < 11, reason=f"TensorRT-RTX needs headers of TensorRT 11 or newer; these are of {MAJOR}")

pytestmark = [
    pytest.mark.skipif(HEADERS is None, reason="no TensorRT headers: give their folder in DETRT_TENSORRT_INCLUDE"),
    pytest.mark.skipif(NVCC is None or shutil.which("cmake") is None, reason="needs nvcc and cmake"),
]


def run(*command: object, code: int = 0) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=900)
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


@pytest.mark.parametrize("define", [(), pytest.param(("-DDETRT_TENSORRT_RTX",), marks=rtx)], ids=["tensorrt", "tensorrt-rtx"])
@pytest.mark.parametrize("name", ["backend", "library", "session"])
def test_back_end_compiles_without_warnings(name, define):
    run(
        *("g++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror"),
        *(
            "-I",
            CPP,
            "-I",
            CPP / "include",
            "-I",
            CPP / "src",
            "-isystem",
            HEADERS,
            "-isystem",
            CUDA,
            *define,
            CPP / "tensorrt" / f"{name}.cpp",
        ),
    )


@pytest.mark.slow
def test_plugin_library_through_tensorrts_interfaces(tmp_path):
    build = tmp_path / "build"
    run("cmake", "-S", CPP / "plugin", "-B", build, "-DCMAKE_CUDA_ARCHITECTURES=90-real", f"-DTENSORRT_INCLUDE_DIR={HEADERS}")
    run("cmake", "--build", build)
    library = build / "libdetrt_plugin.so"
    told = run(build / "plugin_harness", library)
    assert re.search(r"\b0 wrong; enqueue (ran on the GPU|did not run: no CUDA device)", told), told
    # It must load where neither libnvinfer nor libtorch is, and show nothing but TensorRT's two entry points.
    assert not re.search("libnvinfer|libtorch|libcudart", run("ldd", library))
    exported = re.findall(r" T (\S+)", run("nm", "-D", "--defined-only", library))
    wanted = ["getCreators", "setLoggerFinder"] if MAJOR >= 10 else ["getPluginCreators"]
    assert sorted(name for name in exported if not name.startswith("_")) == wanted
    check_library_of_triton(build / "libdetrt_plugin_triton.so")
    if MAJOR < 10 and (tensorrt := os.environ.get("DETRT_TENSORRT_LIBRARY")):
        assert run(build / "plugin_registry", tensorrt, library) == "registered\n"


# As Triton's TensorRT back end: its libnvinfer has no global symbols, and the library is only opened.
TRITON = """
import ctypes, sys
import tensorrt_rtx_bindings as trt
registry = trt.get_plugin_registry()
assert registry.get_creator("MSDeformAttn", "1", "detrt") is None
ctypes.CDLL(sys.argv[1], mode=0)
assert registry.get_creator("MSDeformAttn", "1", "detrt") is not None
"""


def check_library_of_triton(library):
    if MAJOR < 11 or importlib.util.find_spec("tensorrt_rtx_bindings") is None:
        return
    run(sys.executable, "-c", TRITON, library)
    told = run(sys.executable, "-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1])", library)
    assert "open this library after TensorRT" in told


@rtx
@pytest.mark.slow
def test_back_end_links_with_tensorrt_rtx_and_says_that_there_is_no_gpu(tmp_path):
    spec = importlib.util.find_spec("tensorrt_rtx_libs")
    if spec is None:
        pytest.skip("needs detrt[rtx]")
    from detrt import build

    library = next(Path(spec.submodule_search_locations[0]).glob("libtensorrt_rtx.so*"))
    options = ("-DDETRT_TENSORRT=ON", f"-DTENSORRT_INCLUDE_DIR={HEADERS}", f"-DTENSORRT_LIBRARY={library}")
    run("cmake", "-S", CPP, "-B", tmp_path / "build", "-DCMAKE_CXX_FLAGS_RELEASE=-O1", *options)
    run("cmake", "--build", tmp_path / "build", "-j2")
    build("embedded:shapes", tmp_path / "bundle")
    image = tmp_path / "image.png"
    Image.new("RGB", (64, 48)).save(image)
    told = run(tmp_path / "build" / "detrt-run", tmp_path / "bundle", image, code=2)
    assert "no CUDA device was found" in told and "libnvinfer" not in run("ldd", tmp_path / "build" / "detrt-run")
    told = run(tmp_path / "build" / "detrt-run", tmp_path / "bundle", image, "--device", "cpu", code=2)
    assert "TensorRT runs on an NVIDIA GPU" in told
