# syntax=docker/dockerfile:1
# Two images that run bundles; neither torch nor transformers is in them.
#   docker build --target cpu -t detrt:cpu .
#   docker build --target cuda -t detrt:cuda .

ARG PYTHON_IMAGE=python:3.12-slim-bookworm
# ONNX Runtime's GPU build and TensorRT-RTX 1.7 are made for CUDA 13; the driver comes from the host.
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-cudnn-runtime-ubuntu24.04

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON_IMAGE} AS cpu
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install "$(echo /wheels/detrt-*.whl)[serve,text,video,ray]" \
    && useradd --create-home --uid 10001 detrt
USER 10001
WORKDIR /home/detrt
# detrt sets these itself; for whatever else starts Python here.
ENV ORT_DISABLE_TELEMETRY=1 HF_HUB_DISABLE_TELEMETRY=1 RAY_USAGE_STATS_ENABLED=0
EXPOSE 8000
# /readyz answers once every worker has opened its models; a server that drains is not ready.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/readyz', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["detrt"]
CMD ["serve", "/models/default", "--host", "0.0.0.0", "--port", "8000"]

FROM ${CUDA_IMAGE} AS cuda
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 DEBIAN_FRONTEND=noninteractive
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENV PATH=/opt/detrt/bin:${PATH}
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/detrt \
    && useradd --create-home --uid 10001 detrt
# Both builds of ONNX Runtime are the module "onnxruntime"; the GPU build has to be the one that stays.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install "$(echo /wheels/detrt-*.whl)[serve,text,video,ray,rtx,gpu]" \
    && pip uninstall --yes onnxruntime \
    && pip install "onnxruntime-gpu>=1.31"
USER 10001
WORKDIR /home/detrt
# detrt sets these itself; for whatever else starts Python here.
ENV ORT_DISABLE_TELEMETRY=1 HF_HUB_DISABLE_TELEMETRY=1 RAY_USAGE_STATS_ENABLED=0
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=180s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/readyz', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["detrt"]
CMD ["serve", "/models/default", "--host", "0.0.0.0", "--port", "8000", "--device", "cuda:all"]
