"""Shared fixtures. Exports of the tiny models take seconds each, so one run makes each of them once, whatever its processes."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
os.environ["DETRT_RUNTIME_CACHE"] = "off"  # nothing is left in the home folder
os.environ["DETRT_TRUSTED"] = f"/tmp/detrt-tests-trusted-{os.getuid()}"  # of all processes of a run: one builds, others open
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as `_one_thread_a_session`, for PyTorch here and in child processes

import ast
import fcntl
import functools
import gc
import hashlib
import importlib.util
import pickle
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_HOME, _GIVEN = Path.home(), dict(os.environ)  # before a test changes them

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell starts a background job so, and its children inherit it: the tests of Ctrl-C would wait for ever.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if importlib.util.find_spec("torchvision") is not None:  # make test-torchvision
    sys.path.insert(0, str(Path(__file__).parent / "support"))
    from torchvision_nms import import_torchvision

    import_torchvision()  # before transformers imports it

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
# Modules that import one of these, or whose tests take one of these fixtures, are not part of `make test-fast`.
SLOW_IMPORTS = {
    "torch",
    "transformers",
    "ray",
    "subprocess",
    "selenium",
    "cli_support",
    "serve_support",
    "native",
    "tensorrt_rtx_bindings",
    "detrt.backends.gpu",
    "detrt.backends.inductor",
    "detrt.backends.torch.session",
    "detrt.ExportConfig",
    "detrt.build",
    "detrt.export",
    "detrt.export_onnx",
    "detrt.load_source",
    "detrt.verify",
    "detrt.models",
}
SLOW_FIXTURES = {"tiny", "exported", "real_data", "cli", "bindings"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="only modules that need neither torch nor other processes")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.getoption("--fast") and collection_path.name.startswith("test_"):
        return True if _is_slow(ast.parse(collection_path.read_text("utf-8"))) else None
    return None


def pytest_collection_finish() -> None:
    """Spare a tenth of an export: modules stay for the whole run, so the collector need not look at their objects again."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


def _is_slow(module: ast.Module) -> bool:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.importorskip":
            names = [ast.literal_eval(node.args[0])]
        elif isinstance(node, ast.arg) and node.arg in SLOW_FIXTURES:
            return True
        else:
            continue
        if any(name == slow or name.startswith(slow + ".") for name in names for slow in SLOW_IMPORTS):
            return True
    return False


@pytest.fixture(autouse=True, scope="session")
def _fast_tests_load_no_torch(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if request.config.getoption("--fast"):
        assert "torch" not in sys.modules, "a module of the fast tests loads torch, which takes seconds"


@pytest.fixture(autouse=True, scope="session")
def _home_folder_is_not_for_tests() -> Iterator[None]:
    """The variables above keep tests out of it, and processes that they start; one that removes a variable gives another HOME."""
    from detrt import files

    folder_of_user = files.folder_of_user

    @functools.wraps(folder_of_user)
    def elsewhere(variable: str, usual: str) -> Path | None:
        folder = folder_of_user(variable, usual)
        own = Path(_GIVEN.get(variable) or usual.replace("~", str(_HOME), 1)) / "detrt"
        assert folder != own, f"a test uses '{folder}', where the user's own files are; set HOME to a folder of the test"
        return folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "folder_of_user", elsewhere)
        yield


BOXES = "-boxes"


@pytest.fixture(scope="session")
def tiny():
    """name -> Source of `random:<name>/tiny`, or of a reference such as `embedded:shapes`, with `-boxes` behind it without its masks; do
    not change it."""
    pytest.importorskip("transformers", reason="needs the 'export' extra")
    import torch

    from detrt.errors import SourceError
    from detrt.models.load import load_source

    torch.set_num_threads(1)  # on models this small, threads that share few cores cost three times what they give

    @functools.cache
    def load(name: str) -> Any:
        try:
            if name.endswith(BOXES):
                return load_source(name.removesuffix(BOXES), no_masks=True)
            return load_source(name if ":" in name else f"random:{name}/tiny")
        except SourceError as error:
            if "which detrt does not read with transformers" in str(error):  # make test-transformers
                pytest.skip(str(error))
            raise

    return load


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Callable[[str, Callable[[Path], Any]], Any]:
    """(name, make) -> result of make(folder), once a run: the processes of pytest-xdist share folders and results.

    The result is pickled; what it names lies in the folder, which tests do not change.
    """
    base = tmp_path_factory.getbasetemp()
    base = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    base.mkdir(exist_ok=True)

    def get(name: str, make: Callable[[Path], Any]) -> Any:
        result = base / f"{name}.pickle"
        with open(base / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not result.is_file():
                folder = base / name
                shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed half-way
                folder.mkdir()
                result.write_bytes(pickle.dumps(make(folder)))
        return pickle.loads(result.read_bytes())

    return get


@pytest.fixture(scope="session")
def exported(tiny, shared):
    """(name, **choices) -> ExportReport of a model of `tiny`, with its check, made once for equal choices."""
    pytest.importorskip("onnxslim", reason="needs the 'export' extra")
    from detrt.export import ExportConfig, export_onnx

    @functools.cache
    def make(name: str, **choices):
        words = "_".join([name, *(f"{k}-{v}" for k, v in sorted(choices.items()))])
        return shared(words, lambda folder: export_onnx(tiny(name), folder / "model.onnx", ExportConfig(**choices)))

    return make


@pytest.fixture(autouse=True, scope="session")
def _one_thread_a_session() -> Iterator[None]:
    """Threads of two processes that share two cores wait for each other. Sessions of child processes have the default."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("detrt.backends.onnxruntime.session.usable_cores", lambda: 1)
        yield


@pytest.fixture(autouse=True, scope="session")
def _equal_graphs_are_simplified_once(request: pytest.FixtureRequest, shared) -> Iterator[None]:
    """onnxslim and ONNX Runtime's optimizer take half the time of an export, and many tests export equal models equally."""
    if request.config.getoption("--fast") or importlib.util.find_spec("onnxslim") is None:
        yield
        return
    import onnx
    import onnxslim

    slim = onnxslim.slim

    @functools.wraps(slim)
    def slim_once(model: Any, **choices: Any) -> Any:
        content = model.SerializeToString(deterministic=True) + repr(sorted(choices.items())).encode()
        name = f"slim-{hashlib.sha256(content).hexdigest()}"
        return onnx.load_from_string(shared(name, lambda folder: slim(model, **choices).SerializeToString()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxslim, "slim", slim_once)
        # Where no test module has loaded it, it is not loaded for this: it takes torch.
        if tracer := sys.modules.get("detrt.export.trace"):
            optimize = tracer.optimize_basic
            patch.setattr(
                tracer,
                "optimize_basic",
                lambda model: shared(f"basic-{hashlib.sha256(model).hexdigest()}", lambda folder: optimize(model)),
            )
        yield


@pytest.fixture
def plain_simplifier(monkeypatch):
    """Exports without onnxslim, which takes most of their time: for faults that a check must find behind it."""
    onnxslim = pytest.importorskip("onnxslim", reason="needs the 'export' extra")
    monkeypatch.setattr(onnxslim, "slim", lambda model, **choices: model)


@pytest.fixture(scope="session")
def real_data():
    """Folder with the real checkpoints and images that are not part of the project."""
    if not (DATA / "checkpoints").is_dir():
        pytest.skip(f"the real checkpoints and images are not on this machine ('{DATA}')")
    return DATA
