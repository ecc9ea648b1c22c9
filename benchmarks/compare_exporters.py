"""The same weights exported by detrt, by the models' authors and by transformers, compiled by one TensorRT-RTX and timed beside each other.

    python benchmarks/compare_exporters.py export OUT MODEL... --authors CLONES [--batch N]
    python benchmarks/compare_exporters.py build OUT [--batch N] [--sm NN]
    python benchmarks/compare_exporters.py time OUT ROWS.jsonl

CLONES holds clones of facebookresearch/detr, lyuwenyu/RT-DETR and Peterande/D-FINE under the names of MODELS; RF-DETR is the installed
`rfdetr`. Deformable DETR and Grounding DINO have no exporter of their authors, so detrt's seeded weights are taken. The graphs of others
are FP32, as their scripts write them, and become FP16 with NVIDIA's AutoCast (`nvidia-modelopt`, `onnx-graphsurgeon`), because
TensorRT-RTX takes the types of the graph. Weights are random, with classes spread so that queries are not selected by rounding.
Graphs of others have the batch size of `export`; detrt's take any. AutoCast holds every tensor of a graph: 20 GB at batch size 8.

Needs, beside detrt's extras: torchvision, nvidia-modelopt, onnx-graphsurgeon, polygraphy, rfdetr. `time` needs a GPU, and `build` does
without --sm; with it, such as --sm 89, it prints how many kernels each engine has, which runs on that GPU alone.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
import types
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
from program import at_least, make_parser, run, stop

# What authors' packages import beside what exporting needs.
LEFT_OUT = {
    "absl", "calflops", "cppimport", "cv2", "faster_coco_eval", "lief", "loguru", "matplotlib", "pandas", "pycocotools",
    "roboflow", "scipy", "seaborn", "supervision", "tensorboard",
}  # fmt: skip
BEST = 100  # detections of PyTorch that an engine is to find
NEAR, ALIKE = 0.01, 0.02  # of the image's side, of the score
RUNS = 100


@dataclass(frozen=True, slots=True)
class Model:
    """random: detrt's name of it. size: height, width. clone: folder of the authors' code; "" for an installed package, None for no exporter of theirs."""

    random: str
    size: tuple[int, int]
    clone: str | None = None
    tokens: int = 0  # of the prompt
    family: str = ""  # where it cannot be inferred


MODELS = {
    "detr-r50": Model("detr", (800, 1066), "detr"),
    "rt_detr_v2-r50": Model("rt_detr_v2", (640, 640), "RT-DETR"),
    "d_fine-l": Model("d_fine", (640, 640), "D-FINE", family="d_fine"),
    "rf_detr-base": Model("rf_detr", (560, 560), ""),
    "deformable_detr-r50": Model("deformable_detr", (800, 1066)),
    "grounding_dino-t": Model("grounding_dino", (800, 1200), tokens=16),
}


class _Absent(types.ModuleType):
    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[:1].isupper() else MagicMock(name=name)  # what a class may be derived from


class _Finder:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]  # an installed package tries modules of its own that may be absent: SciPy does
        left_out = top in LEFT_OUT and (name == top or isinstance(sys.modules.get(top), _Absent))
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if left_out else None

    def create_module(self, spec):
        return _Absent(spec.name)

    def exec_module(self, module):
        pass


def spread(module, batch_norm_image):
    """Give BatchNorm the statistics of an image, queries class logits that differ by more than FP16 rounds, and biases values, in place."""
    import torch

    norms = [m for m in module.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    module.eval()
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    with torch.no_grad():
        module(batch_norm_image)
    module.eval()
    for norm in norms:  # a channel that is dead on this image may live on others
        norm.running_var.clamp_(min=float(norm.running_var.mean()) / 4)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "class_embed" in name or "score_head" in name:
                if parameter.ndim == 2:
                    parameter.copy_(torch.randn_like(parameter) * 2.0 / parameter.shape[1] ** 0.5)
                else:
                    parameter.fill_(-2.0)
            elif "bbox" in name and name.endswith(
                "layers.2.weight"
            ):  # zero at the start of training: every box would be its anchor
                parameter.copy_(torch.randn_like(parameter) * 0.3 / parameter.shape[1] ** 0.5)
            elif name.endswith("bias") and not parameter.any():  # an addition of zero, which some exporters leave out
                parameter.normal_(std=0.02)


def image_of(size, seed=0):
    """(height, width, 3) uint8: smooth noise of several scales."""
    import torch
    from torch.nn import functional

    generator = torch.Generator().manual_seed(seed)
    sides = (4, 16, 64, 200)
    layers = [functional.interpolate(torch.randn(1, 3, side, side, generator=generator), size, mode="bilinear") for side in sides]
    image = torch.stack(layers).sum(0)
    return ((image - image.min()) / (image.max() - image.min()) * 255).round()[0].permute(1, 2, 0).to(torch.uint8).numpy()


def authors_module(name, clones):
    """(the authors' module with its own initial weights, what exports or deploys it, names of inputs and outputs, opset)."""
    import torch

    model = MODELS[name]
    if model.clone:
        sys.path.insert(0, str(clones / model.clone / ("rtdetrv2_pytorch" if model.clone == "RT-DETR" else "")))
    if name == "detr-r50":
        import hubconf
        from models import backbone

        backbone.is_main_process = lambda: False  # which alone downloads weights
        return hubconf.detr_resnet50(pretrained=False), None, ("inputs",), ("pred_logits", "pred_boxes"), 12
    if name == "rf_detr-base":
        from rfdetr import RFDETRBase
        from rfdetr.models.backbone import dinov2

        backbone = dinov2.WindowedDinov2WithRegistersBackbone
        backbone.from_pretrained = classmethod(lambda cls, name, *, config, **_: cls(config))
        detector = RFDETRBase(pretrain_weights=None, device="cpu")
        return detector.model.model, detector, ("input",), ("dets", "labels"), 17
    from src.core import YAMLConfig

    where = clones / model.clone
    if name == "d_fine-l":
        config = YAMLConfig(str(where / "configs/dfine/dfine_hgnetv2_l_coco.yml"))
        config.yaml_cfg["HGNetv2"]["pretrained"] = False
    else:
        config = YAMLConfig(str(where / "rtdetrv2_pytorch/configs/rtdetrv2/rtdetrv2_r50vd_6x_coco.yml"))
        config.yaml_cfg["PResNet"]["pretrained"] = False
    return torch.nn.Module.eval(config.model), config, ("images", "orig_target_sizes"), ("labels", "boxes", "scores"), 16


def export_authors(name, clones, out, batch):
    """Write the authors' FP32 graph and a checkpoint of the same weights. Returns detrt's reference to it."""
    import torch

    torch.manual_seed(0)
    height, width = MODELS[name].size
    module, holder, inputs, outputs, opset = authors_module(name, clones)
    noise = (torch.from_numpy(image_of((height, width), 1)).permute(2, 0, 1)[None].float() / 64 - 2).repeat(batch, 1, 1, 1)
    if name == "rf_detr-base":
        from rfdetr.utilities.tensors import nested_tensor_from_tensor_list

        nested = nested_tensor_from_tensor_list(list(noise))
        spread(module, nested)
    else:
        spread(module, noise)
    checkpoint = out / "weights.pth"
    saved = {"model": dict(module.state_dict())}
    torch.save(saved, checkpoint)
    path = out / "authors.onnx"
    if name == "rf_detr-base":
        written = holder.export(output_dir=str(out / "authors"), verbose=False, batch_size=batch)
        Path(written).rename(path)
    else:
        feeds = (noise,)
        if name in ("rt_detr_v2-r50", "d_fine-l"):

            class Deployed(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.model, self.postprocessor = holder.model.deploy(), holder.postprocessor.deploy()

                def forward(self, images, orig_target_sizes):
                    return self.postprocessor(self.model(images), orig_target_sizes)

            module, feeds = Deployed(), (noise, torch.tensor([[width, height]] * batch))
        with torch.no_grad():
            module(*feeds)
        torch.onnx.export(
            module.eval(), feeds, str(path), input_names=list(inputs), output_names=list(outputs), opset_version=opset, do_constant_folding=True, dynamo=False
        )  # fmt: skip
    return f"ckpt:{checkpoint}"


def export_transformers(name, module, spec, out, batch):
    """Write the FP32 graph of a transformers module as `torch.onnx` traces it, with opset 17 and a fixed size."""
    import torch

    height, width = MODELS[name].size
    feeds = {"pixel_values": torch.randn(batch, 3, height, width)}
    if spec.input.mask:
        feeds["pixel_mask"] = torch.ones(batch, height, width, dtype=torch.int64)
    if MODELS[name].tokens:
        feeds |= {key: value.repeat(batch, 1) for key, value in prompt_of(MODELS[name].tokens).items()}

    class Outputs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, *values):
            found = self.module(**dict(zip(feeds, values, strict=True)))
            return found.logits, found.pred_boxes

    def write(**keywords):
        torch.onnx.export(
            Outputs().eval(), tuple(feeds.values()), str(out / "transformers.onnx"), input_names=list(feeds), output_names=["logits", "pred_boxes"],
            **keywords,
        )  # fmt: skip

    try:
        write(opset_version=17, dynamo=False)
    except Exception as error:  # what the older exporter lacks
        (out / "transformers.note").write_text(f"dynamo, opset 18, because: {error}"[:400])
        try:
            write(opset_version=18, dynamo=True, external_data=False)
            fold(out / "transformers.onnx")
        except Exception as later:
            (out / "transformers.failed").write_text(f"torch.onnx, opset 17: {error}; dynamo, opset 18: {later}"[:800])


def fold(path):
    """Fold constants of any size in place: TensorRT refuses the antialiased Resize of RF-DETR's position embeddings, above the default limits."""
    import onnx
    import onnxscript.optimizer

    onnx.save(onnxscript.optimizer.optimize(onnx.load(path), input_size_limit=1 << 24, output_size_limit=1 << 24), path)


def prompt_of(tokens):
    """Ids of a prompt of `tokens` tokens: words of one class each, between "." as Grounding DINO's tokenizer writes them."""
    import torch

    ids = [101, *([2000 + 7 * i if i % 2 == 0 else 1012 for i in range(tokens - 2)]), 102]
    return {
        "input_ids": torch.tensor([ids]),
        "token_type_ids": torch.zeros(1, tokens, dtype=torch.int64),
        "attention_mask": torch.ones(1, tokens, dtype=torch.int64),
    }


def leave_out():
    """Import stand-ins for the packages of LEFT_OUT that are not installed."""
    sys.meta_path.append(_Finder())
    sys.modules["torch.utils.tensorboard"] = _Absent("torch.utils.tensorboard")


def to_fp16(path):
    """Write `path` with AutoCast's FP16, beside it. Returns seconds. In a process of its own, since it takes a minute of one core."""
    start = time.perf_counter()
    leave_out()
    import onnx
    from modelopt.onnx.autocast import convert_to_mixed_precision

    onnx.save(
        convert_to_mixed_precision(str(path), low_precision_type="fp16", keep_io_types=True), path.with_suffix(".fp16.onnx")
    )
    return round(time.perf_counter() - start, 1)


def export(name, clones, out, batch, pool):
    """Everything of one model into `out`, with an image and what PyTorch finds on it in FP32. AutoCast runs in `pool`."""
    import torch

    leave_out()
    from detrt.models.load import load_source
    from detrt.models.load_options import LoadOptions

    model = MODELS[name]
    height, width = model.size
    out.mkdir(parents=True, exist_ok=True)
    seconds, casts = {}, {}

    @contextlib.contextmanager
    def timed(what):
        start = time.perf_counter()
        yield
        seconds[what] = round(time.perf_counter() - start, 1)

    ref = f"random:{model.random}"
    if model.clone is not None:
        with timed("authors"):
            ref = export_authors(name, clones, out, batch)
        casts["authors"] = pool.submit(to_fp16, out / "authors.onnx")
    options = ("--family", model.family) if model.family and model.clone else ()
    source = load_source(ref, LoadOptions(family=model.family) if options else None)
    image = image_of(model.size)
    entry = source.spec.input
    pixels = torch.from_numpy(image).permute(2, 0, 1)[None].float() / 255
    pixels = (pixels - torch.tensor(entry.mean).view(3, 1, 1)) / torch.tensor(entry.std).view(3, 1, 1)
    more = prompt_of(model.tokens) if model.tokens else {}
    with torch.no_grad():
        found = source.module(pixel_values=pixels, **more)
    np.savez(
        out / "reference.npz", image=image, pixels=pixels.numpy(), logits=found.logits.numpy(), boxes=found.pred_boxes.numpy()
    )
    with timed("transformers"):
        export_transformers(name, source.module, source.spec, out, batch)
    if (out / "transformers.onnx").is_file():
        casts["transformers"] = pool.submit(to_fp16, out / "transformers.onnx")
    (out / "facts.json").write_text(json.dumps({"activation": source.spec.decode.activation, "ref": ref}))
    with timed("detrt"):
        run_detrt(
            "build",
            ref,
            "-o",
            out / "detrt",
            "--target",
            "onnx",
            "--precision",
            "fp16",
            "--no-check",
            "--min-fraction",
            "0.5",
            "--size",
            f"{height}x{width}",
            *options,
        )
    for other, cast in casts.items():
        try:
            seconds[f"{other}, AutoCast"] = cast.result()
        except Exception as error:
            (out / f"{other}.failed").write_text(f"AutoCast: {type(error).__name__}: {error}"[:600])
    (out / "seconds.json").write_text(json.dumps(seconds))
    print(name, seconds, flush=True)


def run_detrt(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "detrt", *map(str, arguments)], capture_output=True, text=True, timeout=900, check=False
    )
    if done.returncode:
        raise SystemExit(f"detrt {' '.join(map(str, arguments))}: {done.stdout[-400:]}{done.stderr[-800:]}")


def build_plain(path, engine, batch, sm=0):
    """Compile an ONNX file as it is for a compute capability, 0: of this GPU. Returns facts."""
    import onnx
    import tensorrt_rtx_bindings as trt

    from detrt.backends.tensorrt.kernels import HEAD, count, parse

    lines = []

    class Log(trt.ILogger):
        def log(self, severity, message):
            if HEAD in message:
                lines.append(message)
            elif severity <= trt.ILogger.ERROR:
                print(path.name, message, flush=True)

    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(path)):
        raise RuntimeError("; ".join(str(parser.get_error(i)) for i in range(parser.num_errors))[:600])
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.num_compute_capabilities = 1
    config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}" if sm else "CURRENT"), 0)
    config.clear_flag(trt.BuilderFlag.TF32)
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        if tensor.shape[0] not in (-1, batch):
            raise RuntimeError(f"{path.name} has the batch size {tensor.shape[0]}, not {batch}; export it with --batch {batch}")
        shape = [batch if axis == 0 and side < 0 else side for axis, side in enumerate(tensor.shape)]
        profile.set_shape(tensor.name, shape, shape, shape)
    config.add_optimization_profile(profile)
    start = time.perf_counter()
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise RuntimeError("the builder gave no engine")
    engine.write_bytes(plan)
    kernels = count(parse(lines[-1])) if lines else {}
    return {"build_s": round(time.perf_counter() - start, 1), "kernels": kernels.get("all"), "fused attentions": kernels.get("fused attention"),
            "nodes": len(onnx.load(path, load_external_data=False).graph.node)}  # fmt: skip


def build_one(folder, exporter, batch, sm=0):
    """In a process of its own: one engine and its facts. sm: compute capability, 0: of this GPU."""
    engine = folder / f"{exporter}-b{batch}.engine"
    if exporter == "detrt":
        import onnx

        from detrt.backends.tensorrt import EngineConfig, build_engine
        from detrt.system import compute_capabilities_here

        graph = folder / "detrt" / "model.onnx"
        sms = (sm,) if sm else compute_capabilities_here()[:1]
        built = build_engine(graph, engine, EngineConfig(sms=sms, batch=(batch,) * 3, return_selections=False))
        facts = built.facts
        row = {
            "build_s": round(facts.build_seconds, 1),
            "kernels": facts.kernels.get("all"),
            "fused attentions": facts.kernels.get("fused attention"),
            "nodes": len(onnx.load(graph, load_external_data=False).graph.node),
        }
    else:
        row = build_plain(folder / f"{exporter}.fp16.onnx", engine, batch, sm)
    engine.with_suffix(".facts.json").write_text(json.dumps(row))
    print(json.dumps(row))


def decode(outputs, size, activation):
    """(scores, labels, boxes as cx, cy, w, h of the image) of the 300 best pairs of query and class."""
    height, width = size
    names = {name.lower(): value for name, value in outputs.items()}
    if "scores" in names and "labels" in names and names["labels"].ndim == 2:
        corners = names["boxes"][0] / np.array([width, height, width, height])
        boxes = np.concatenate([(corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]], 1)
        return names["scores"][0], names["labels"][0], boxes
    boxes = next(v for k, v in names.items() if k in ("dets", "boxes", "pred_boxes"))[0].astype(np.float64)
    logits = next(v for k, v in names.items() if k in ("logits", "pred_logits", "labels"))[0].astype(np.float64)
    if activation == "softmax":
        scores = np.exp(logits - logits.max(-1, keepdims=True))
        scores = (scores / scores.sum(-1, keepdims=True))[:, :-1]
    else:
        scores = 1 / (1 + np.exp(-logits))
    flat = np.argsort(-scores, axis=None, kind="stable")[:300]
    query, label = np.unravel_index(flat, scores.shape)
    return scores[query, label], label, boxes[query]


def found_share(want, got):
    """Share of the best detections of `want` with a twin in `got`: the same class, all four numbers of the box and the score near."""
    scores, labels, boxes = (part[:BEST] for part in want)
    near = np.abs(boxes[:, None] - got[2][None]).max(-1) < NEAR
    alike = np.abs(scores[:, None] - got[0][None]) < ALIKE
    return round(float((near & alike & (labels[:, None] == got[1][None])).any(1).mean()), 3)


def open_engine(engine, reference, size):
    """(what enqueues a run of an engine of TensorRT-RTX on the current stream, what gives the arrays of its last run)."""
    import tensorrt_rtx_bindings as trt
    import torch

    log = trt.Logger(trt.Logger.ERROR)
    runtime = trt.Runtime(log)
    opened = runtime.deserialize_cuda_engine(engine.read_bytes())
    context = opened.create_execution_context()
    kinds = {trt.DataType.FLOAT: torch.float32, trt.DataType.HALF: torch.float16, trt.DataType.INT64: torch.int64, trt.DataType.INT32: torch.int32,
             trt.DataType.UINT8: torch.uint8, trt.DataType.BOOL: torch.bool, trt.DataType.INT8: torch.int8}  # fmt: skip
    given = feeds_of(reference, size)
    held, outputs = {}, {}
    for index in range(opened.num_io_tensors):
        name = opened.get_tensor_name(index)
        if opened.get_tensor_mode(name) == trt.TensorIOMode.INPUT:
            shape = tuple(opened.get_tensor_profile_shape(name, 0)[1])
            as_bytes = opened.get_tensor_dtype(name) == trt.DataType.UINT8
            value = given["pixel_values:u8" if as_bytes else name if name in given else "pixel_values"]
            value = (
                torch.from_numpy(np.ascontiguousarray(np.broadcast_to(value, shape)))
                .to(kinds[opened.get_tensor_dtype(name)])
                .cuda()
            )
            context.set_input_shape(name, shape)
            held[name] = value
    for index in range(opened.num_io_tensors):
        name = opened.get_tensor_name(index)
        if name not in held:
            shape = tuple(context.get_tensor_shape(name))
            outputs[name] = held[name] = torch.empty(shape, dtype=kinds[opened.get_tensor_dtype(name)], device="cuda")
        context.set_tensor_address(name, held[name].data_ptr())

    def step(kept=(log, runtime, opened, held)):  # the engine knows the inputs by address alone
        assert context.execute_async_v3(torch.cuda.current_stream().cuda_stream)
        return list(outputs.values())

    def found():
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                step()
            torch.cuda.current_stream().synchronize()
        return {name: (v.float() if v.is_floating_point() else v).cpu().numpy() for name, v in outputs.items()}

    return step, found


def open_on_cuda(graph, reference, size, batch):
    """The same of ONNX Runtime's CUDA provider, whose kernels it enqueues on one stream of its own, with inputs on the GPU."""
    import onnxruntime as ort

    if "CUDAExecutionProvider" not in ort.get_available_providers():
        raise RuntimeError("no onnxruntime with CUDAExecutionProvider is installed")
    stream = torch_stream()
    session = ort.InferenceSession(
        str(graph), providers=[("CUDAExecutionProvider", {"user_compute_stream": str(stream.cuda_stream), "use_tf32": "0"})]
    )
    given, binding = feeds_of(reference, size), session.io_binding()
    kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64, "tensor(uint8)": np.uint8}
    for entry in session.get_inputs():
        value = given[
            "pixel_values:u8" if entry.type == "tensor(uint8)" else entry.name if entry.name in given else "pixel_values"
        ]
        value = np.ascontiguousarray(np.broadcast_to(value, (batch, *value.shape[1:])).astype(kinds[entry.type]))
        binding.bind_ortvalue_input(entry.name, ort.OrtValue.ortvalue_from_numpy(value, "cuda", 0))
    for entry in session.get_outputs():
        binding.bind_output(entry.name, "cuda", 0)

    def step():
        session.run_with_iobinding(binding)

    def found():
        step()
        return dict(zip([entry.name for entry in session.get_outputs()], binding.copy_outputs_to_cpu(), strict=True))

    return step, found


def torch_stream():
    """A stream of PyTorch's that stays the current one, so that its events time what is enqueued on it."""
    import torch

    stream = torch.cuda.Stream()
    torch.cuda.set_stream(stream)
    return stream


def finds(outputs, reference, size, activation):
    """Share of PyTorch's detections that outputs hold."""
    with np.load(reference) as stored:
        want = decode({"logits": stored["logits"], "pred_boxes": stored["boxes"]}, size, activation)
    return found_share(want, decode(outputs, size, activation))


def measure(engine, reference, size, activation):
    """Kernel time as a CUDA graph, and how many of PyTorch's detections it finds, of one engine."""
    from measured_job import gpu_ms, recorded

    start = time.perf_counter()
    step, found = open_engine(engine, reference, size)
    outputs = found()
    opening = time.perf_counter() - start
    replay = recorded(step)
    samples = [gpu_ms(replay) for _ in range(10 + RUNS)][10:]
    return {
        "ms": [round(value, 3) for value in statistics.quantiles(samples, n=4)],
        "finds": finds(outputs, reference, size, activation),
        "finite": all(bool(np.isfinite(value).all()) for value in outputs.values() if value.dtype.kind == "f"),
        "first_opening_s": round(opening, 1),
        "engine_MB": round(engine.stat().st_size / 1e6, 1),
    }


def feeds_of(reference, size):
    """Name of an input -> its value for one image; `pixel_values:u8` is the image as bytes."""
    height, width = size
    with np.load(reference) as stored:
        pixels, image = stored["pixels"], stored["image"]
    tokens = prompt_of(16)
    return {
        "pixel_values": pixels,
        "pixel_values:u8": image.transpose(2, 0, 1)[None],
        "pixel_mask": np.ones((1, height, width), np.int64),
        "orig_target_sizes": np.array([[width, height]], np.int64),
        **{name: value.numpy() for name, value in tokens.items()},
    }


def main():
    parser = make_parser(__doc__)
    parser.add_argument("step", choices=("export", "build", "time", "build-one"))
    parser.add_argument("out", type=Path)
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--authors", type=Path, default=Path("authors"))
    parser.add_argument("--batch", type=at_least(1), default=1)
    parser.add_argument("--sm", type=at_least(75), default=0, help="compute capability to build for; default: this GPU's")
    parser.add_argument("--only", nargs="+", default=("detrt", "authors", "transformers"), help="exporters to time")
    parser.add_argument("--missing", action="store_true", help="build only engines that are not there")
    parser.add_argument("--slots", type=at_least(1), default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    out = arguments.out
    if arguments.step in ("time", "build-one") and len(arguments.rest) != 1:
        parser.error(f"{arguments.step} needs OUT and {'ROWS.jsonl' if arguments.step == 'time' else 'an exporter'}")
    if arguments.step == "export":
        if not arguments.authors.is_dir():
            parser.error(f"--authors: there is no folder '{arguments.authors}'")
        if unknown := [name for name in arguments.rest if name not in MODELS]:
            parser.error(f"there is no model {', '.join(unknown)}; there are {', '.join(MODELS)}")
        if len(arguments.rest) == 1:
            with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
                export(arguments.rest[0], arguments.authors, out / arguments.rest[0], arguments.batch, pool)
            return
        more = ("--authors", str(arguments.authors), "--batch", str(arguments.batch))
        jobs = [("export", str(out), name, *more) for name in arguments.rest or MODELS]
    elif arguments.step == "build":
        if not any(out.glob("*/reference.npz")):
            stop(f"'{out}' has no exported model; run the step export first")
        jobs = [
            (
                "build-one",
                str(folder),
                exporter,
                "--batch",
                str(arguments.batch),
                *(("--sm", str(arguments.sm)) if arguments.sm else ()),
            )
            for folder in sorted(path for path in out.iterdir() if (path / "reference.npz").is_file())
            for exporter in ("detrt", "authors", "transformers")
            if not (arguments.missing and (folder / f"{exporter}-b{arguments.batch}.facts.json").is_file())
            if (folder / "detrt").is_dir() and (exporter == "detrt" or (folder / f"{exporter}.fp16.onnx").is_file())
        ]
    elif arguments.step == "build-one":
        build_one(out, arguments.rest[0], arguments.batch, arguments.sm)
        return
    else:
        engines = sorted(out.glob("*/*.engine"))
        if not engines:
            stop(f"'{out}' has no engine; run the step build first")
        with open(arguments.rest[0], "a") as rows:
            for engine in engines:
                folder = engine.parent
                if engine.stem.partition("-")[0] not in arguments.only:
                    continue
                about = {"model": folder.name, "exporter": engine.stem}
                try:
                    facts = json.loads(engine.with_suffix(".facts.json").read_text())
                    activation = json.loads((folder / "facts.json").read_text())["activation"]
                    row = about | facts | measure(engine, folder / "reference.npz", MODELS[folder.name].size, activation)
                except Exception as error:
                    row = about | {"failed": f"{type(error).__name__}: {error}"[:400]}
                print(json.dumps(row), flush=True)
                rows.write(json.dumps(row) + "\n")
        return

    def run(job):
        done = subprocess.run([sys.executable, __file__, *job], capture_output=True, text=True, check=False)
        (out / f"{'-'.join(part.replace('/', '_') for part in job[1:3])}.log").write_text(done.stdout + done.stderr)
        print(*job[:3], "rc", done.returncode, (done.stdout + done.stderr).strip().splitlines()[-1:], flush=True)

    out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(arguments.slots) as pool:
        list(pool.map(run, jobs))


if __name__ == "__main__":
    run(main)
