# Two commands: `make demo` sets everything up and does the main job; `make test` runs the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch is pinned: newer builds on PyPI bring gigabytes of CUDA packages that nothing here needs.
TORCH := torch==2.13.0
EXTRAS := export,rtx,openvino,video,eval,bench,supervision,track,ray,serve,dev

DOCS := build/docs-venv

# The installation compiles no bytecode: without files of it every process would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test triton interpreter test-fast test-slow test-transformers test-torchvision test-lowest setup lint docs wheel clean cpp-early cpp-setup cpp-sanitize cpp-build cpp-check cpp-test cpp-test-slow cpp-tsan cpp-aarch64

demo: setup
	$(BIN)/detrt demo -o demo --target tensorrt-rtx

# The C++ runtime is built, as far as it needs no PyTorch, while packages are downloaded, and checked before the tests run. Where its
# Debian packages cannot be had, its tests say so and are left out.
test:
	$(MAKE) --no-print-directory -j 2 setup cpp-early
	$(MAKE) --no-print-directory triton || echo "Triton Inference Server could not be had; its tests are left out." >&2
	$(MAKE) --no-print-directory interpreter || echo "Triton's interpreter could not be had; tests of kernels are left out." >&2
	if test -d $(CPP_BUILD)/sanitize; then $(MAKE) --no-print-directory cpp-check; fi
	$(BIN)/python -m pytest -n 2 --dist worksteal

cpp-early:
	if $(MAKE) --no-print-directory cpp-setup; then $(MAKE) --no-print-directory cpp-sanitize; fi

# The inner loop: what needs neither torch nor other processes, in under a minute.
test-fast: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal --fast --ignore tests/meta/test_docs.py

test-slow: setup
	$(BIN)/python -m pytest -m "slow and not gpu and not network"

# The export tests with another version of transformers, in an environment that shares all other packages with $(VENV):
# make test-transformers VERSION=5.12.1
TRANSFORMERS := build/transformers-$(VERSION)

test-transformers: setup
	@test -n "$(VERSION)" || { echo "say which version: make test-transformers VERSION=5.12.1" >&2; exit 2; }
	test -x $(TRANSFORMERS)/bin/python || $(BIN)/python -m venv --without-pip $(TRANSFORMERS)
	shared=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	own=$$($(TRANSFORMERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	printf '%s\n' "$$shared" "$(CURDIR)/src" > $$own/shared.pth
	$(BIN)/python -m pip --python $(TRANSFORMERS)/bin/python install --quiet --disable-pip-version-check transformers==$(VERSION)
	$(TRANSFORMERS)/bin/python -m pytest -n 2 --dist worksteal -rs tests/export/test_families.py tests/export/test_prompted.py \
	  tests/export/test_dino.py tests/models/test_rewrites.py

# What users touch first, with the lowest versions of all direct dependencies that pyproject.toml allows; torch stays as pinned above,
# because its older wheels on PyPI need gigabytes of CUDA.
LOWEST := build/lowest
LOWEST_EXTRAS := export,video,eval,text,serve
LOWEST_TESTS := tests/test_detector.py tests/test_spec.py tests/test_bundle.py tests/test_detections.py tests/data/test_images.py \
  tests/data/test_postprocess.py tests/data/test_video_player.py tests/data/test_video_formats.py tests/data/test_sinks.py \
  tests/data/test_coco.py tests/data/test_draw.py tests/jobs/test_failing_images.py tests/cli/test_detect.py \
  tests/cli/test_prompt.py tests/text tests/evaluation/test_coco.py tests/serve/test_app.py tests/backends/onnxruntime

test-lowest: setup
	test -x $(LOWEST)/bin/python || $(BIN)/python -m venv --without-pip $(LOWEST)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/python -m uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct --index-strategy unsafe-best-match \
	  $(TORCH) -e '.[$(LOWEST_EXTRAS)]' 'pytest>=8' 'scipy>=1.11' 'psutil>=5.9' 'httpx>=0.27'
	$(LOWEST)/bin/python -m pytest -rs $(LOWEST_TESTS)

# The comparisons with processors that transformers has for torchvision only. PyPI's wheel needs CUDA, its Python does not, so it stays
# out of $(VENV), where nothing could import it.
TORCHVISION := build/torchvision-0.28.0

test-torchvision: setup
	test -d $(TORCHVISION) || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(TORCHVISION) torchvision==0.28.0
	PYTHONPATH=$(TORCHVISION) $(BIN)/python -m pytest -rs -m "slow or not slow" \
	  -k "rf_detr or pp_doclayout or omdet or torchvision or as_its_users" tests/bench/test_bundles.py \
	  tests/data/test_preprocess_parity.py tests/evaluation/test_published.py tests/export/test_masks.py tests/export/test_saved_folders.py \
	  tests/export/test_sam3.py

# Triton Inference Server for its tests, from the wheel of pytriton (55 MB), which has the plain server with its Python backend. The
# environment of its models shares all packages with $(VENV) but NumPy: the backend is built for NumPy 1.
TRITON := build/triton-2.51

triton: $(TRITON)/.installed

$(TRITON)/.installed: $(VENV)/.installed
	test -x $(TRITON)/bin/python || $(BIN)/python -m venv --without-pip $(TRITON)
	own=$$($(TRITON)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$own/shared.pth; echo "$(CURDIR)/src" >> $$own/shared.pth
	$(BIN)/python -m pip --python $(TRITON)/bin/python install --quiet --disable-pip-version-check --no-deps --no-compile \
	  --only-binary :all: numpy==1.26.4 nvidia-pytriton==0.7.0
	touch $@

# The language Triton, whose interpreter runs the kernels of GPUs on a CPU, in a folder of its own: with it in $(VENV) PyTorch would
# behave as on a machine with a GPU. 3.7 is the first that takes NumPy 2.4.
INTERPRETER := build/interpreter-3.7.1

interpreter: $(INTERPRETER)/.installed

$(INTERPRETER)/.installed: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --only-binary :all: \
	  --target $(INTERPRETER) triton==3.7.1
	touch $@

CPP_PACKAGES := g++ cmake ninja-build nlohmann-json3-dev libjpeg-dev libpng-dev libssl-dev libstb-dev libcli11-dev doctest-dev
CPP_BUILD := build/cpp

cpp-setup:
	@if dpkg -s $(CPP_PACKAGES) >/dev/null 2>&1; then exit 0; fi; \
	SUDO=$$(test "$$(id -u)" = 0 || echo sudo -n); \
	$$SUDO apt-get update -qq && $$SUDO apt-get install -y -qq --no-install-recommends $(CPP_PACKAGES) >/dev/null || { \
	echo "The C++ runtime needs these Debian packages, which could not be installed here: $(CPP_PACKAGES)" >&2; exit 1; }

cpp-build: setup cpp-sanitize
	cmake -S cpp --preset test >/dev/null && cmake --build $(CPP_BUILD)/test

cpp-sanitize:
	cmake -S cpp --preset sanitize >/dev/null && cmake --build $(CPP_BUILD)/sanitize

# Unit tests under the sanitizers, and a bounded run of the fuzz targets.
cpp-check: cpp-build
	$(CPP_BUILD)/sanitize/tests/detrt-tests
	$(BIN)/python cpp/fuzz/run.py $(CPP_BUILD)/sanitize --seconds 4

cpp-test: cpp-setup cpp-check
	$(BIN)/python -m pytest tests/cpp

# Eight threads on one detector and on one each, under ThreadSanitizer: the unit tests, and the C program with a real model. What OpenVINO
# does in itself is not instrumented, and left out; its thread library refuses sanitizers unless it is told.
TSAN := $(CPP_BUILD)/sanitize-threads

cpp-tsan: setup cpp-setup
	cmake -S cpp --preset sanitize-threads >/dev/null && cmake --build $(TSAN)
	$(TSAN)/tests/detrt-tests
	rm -rf $(TSAN)/scenes
	$(BIN)/detrt demo-data $(TSAN)/scenes --count 1
	$(BIN)/detrt build embedded:shapes --no-masks -o $(TSAN)/shapes --target openvino
	TBB_ENABLE_SANITIZERS=1 TSAN_OPTIONS=ignore_noninstrumented_modules=1 $(TSAN)/tests/detrt-c $(TSAN)/shapes $(TSAN)/scenes/images/000001.jpg 8

# For Jetson: libdetrt, detrt-run and their unit tests for aarch64, which run under qemu (docs/guide/jetson.md names the packages).
cpp-aarch64:
	cmake -S cpp --preset aarch64 && cmake --build $(CPP_BUILD)/aarch64
	ctest --test-dir $(CPP_BUILD)/aarch64 --output-on-failure

cpp-test-slow: cpp-setup cpp-check
	$(BIN)/python cpp/fuzz/run.py $(CPP_BUILD)/sanitize --seconds 120
	cmake -S cpp --preset sanitize-libtorch >/dev/null && cmake --build $(CPP_BUILD)/sanitize-libtorch
	$(BIN)/python -m pytest -m "slow or not slow" tests/cpp

setup: $(VENV)/.installed

# Python compiles a module to bytecode where it is first imported: a quarter of the 20000 in these packages ever are.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("detrt needs Python 3.10 or newer; got " + sys.version.split()[0] + "; run: make PYTHON=python3.11") if sys.version_info < (3, 10) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python .ci/install.py $(TORCH) -e '.[$(EXTRAS)]'
	touch $@

lint: setup
	$(BIN)/ruff check src tests training benchmarks
	$(BIN)/ruff format --check src tests training benchmarks
	$(BIN)/mypy

# The documentation as a site: build/site/index.html. Its tools have an environment of their own, without torch.
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict

$(DOCS)/.installed: pyproject.toml
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	touch $@

# dist/detrt-*.whl, for machines without this folder: pip install dist/detrt-*.whl
wheel: setup
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

clean:
	rm -rf demo build dist src/*.egg-info .pytest_cache .ruff_cache
