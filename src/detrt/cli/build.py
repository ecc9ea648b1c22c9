"""`detrt build` and `detrt export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .. import files
from ..errors import DetrtError, SourceError

Model = Annotated[
    str,
    typer.Argument(
        help="hf:org/name, a transformers folder, ckpt:FILE, embedded:shapes, random:FAMILY, or an .onnx file with its spec."
    ),
]
Checkpoint = Annotated[
    str, typer.Argument(help="hf:org/name, a transformers folder, ckpt:FILE, embedded:shapes or random:FAMILY.")
]
Opset = Annotated[int, typer.Option(help="ONNX opset, 17 to 20.")]
Msda = Annotated[str, typer.Option(help="Deformable attention as: auto, gather, gridsample, plugin, nvidia-plugin.")]
Size = Annotated[
    str | None, typer.Option(help="Fix the input size: 640, or HEIGHTxWIDTH; with --target inductor several with commas.")
]
Height = Annotated[str | None, typer.Option(help="Height: 640, or MIN,OPT,MAX for a range.")]
Width = Annotated[str | None, typer.Option(help="Width, likewise.")]
Decode = Annotated[str, typer.Option(help="raw: logits and pred_boxes; graph: finished boxes, scores, labels.")]
MaxDetections = Annotated[int | None, typer.Option(help="Boxes an image; default: the checkpoint's rule.")]
ScoreThreshold = Annotated[float, typer.Option(help="With --decode graph: num_detections counts scores from here up.")]
Normalize = Annotated[bool, typer.Option("--normalize/--no-normalize", help="Rescale and normalise inside the graph.")]
InputDtype = Annotated[str, typer.Option(help="Raw pixels as uint8 or float32.")]
Mask = Annotated[bool, typer.Option("--mask/--no-mask", help="Keep the padding mask input; --no-mask needs a fixed size.")]
Check = Annotated[bool, typer.Option("--check/--no-check", help="Compare with PyTorch at shapes that were not traced.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the checkpoint.")]
Labels = Annotated[Path | None, typer.Option(help="Class names: a text file, one a line, or JSON.")]
Family = Annotated[
    str | None, typer.Option(help="Family of ckpt:FILE, where its keys do not tell; deimv2-upstream for a DEIMv2 folder.")
]
Nms = Annotated[
    str, typer.Option(help="Boxes that overlap: checkpoint (its own rule), none, hard; in the graph: graph, graph-hard.")
]
Tokenizer = Annotated[
    Path | None, typer.Option(help="Of a model that takes a prompt: tokenizer.json, vocab.txt, or a folder with one.")
]
SingleGraph = Annotated[
    bool, typer.Option("--single-graph", help="Of a model that takes a prompt: one graph that takes token ids.")
]
Precision = Annotated[str, typer.Option(help="Types of the graph: fp32, tf32, fp16, bf16, int8, fp8, or auto (needs --budget).")]
Calibration = Annotated[
    Path | None, typer.Option(help="Folder of images or COCO file: ranges for fp16, scales for int8 and fp8.")
]
CalibrationImages = Annotated[int, typer.Option(help="Use at most so many of them.")]
CalibrationPrompt = Annotated[
    str | None, typer.Option("--prompt", help="With --calibration, for a model that takes a prompt: what to look for meanwhile.")
]
Method = Annotated[str, typer.Option("--calibration-method", help="auto, entropy, percentile, mse or minmax.")]
KeepFp32 = Annotated[
    list[str] | None, typer.Option("--keep-fp32", help="Module paths or patterns that stay FP32: decoder.layers.5,*bbox*.")
]
Budget = Annotated[str | None, typer.Option(help="With --precision auto: ap=POINTS of 100, or drift=NUMBER.")]
Low = Annotated[str, typer.Option(help="With --precision auto: the type that as much as possible gets.")]
MinShare = Annotated[float | None, typer.Option(help="Smallest share of MatMul and Conv in the low type, 0 to 1.")]
QuantizeShare = Annotated[
    float, typer.Option(help="With int8, fp8: smallest share of MatMul and Conv in 8 bits; beyond it noisy layers stay in 16.")
]
State = Annotated[Path | None, typer.Option(help="With --precision auto: file to go on from after a stop.")]
Json = Annotated[str | None, typer.Option("--json", help="Report as JSON to this file; - is stdout.")]


def build(
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the bundle.")],
    target: Annotated[
        str, typer.Option(help="tensorrt-rtx, tensorrt, inductor, onnxruntime (no engine); several with commas.")
    ] = "tensorrt-rtx",
    sm: Annotated[str | None, typer.Option(help="Compute capabilities for tensorrt-rtx: 86,89.")] = None,
    device: Annotated[str | None, typer.Option(help="With --target inductor: cpu, cuda, or both with a comma.")] = None,
    tune: Annotated[
        str | None,
        typer.Option(help="With --target inductor on a GPU: default, or max to try many kernels, which takes minutes."),
    ] = None,
    form: Annotated[
        str | None, typer.Option(help="With --target inductor: aoti (also for C++), artifact (Python, GPU only), or auto.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="With --target inductor, for a model that takes a prompt: its longest prompt, default 64.")
    ] = None,
    provider: Annotated[
        str | None, typer.Option(help="With --target onnxruntime: try the graph with this provider as well, such as cuda.")
    ] = None,
    batch: Annotated[str | None, typer.Option(help="Batch sizes MIN,OPT,MAX; default 1,1,8.")] = None,
    size: Size = None,
    height: Height = None,
    width: Width = None,
    opset: Opset = 17,
    msda: Msda = "auto",
    decode: Decode = "raw",
    max_detections: MaxDetections = None,
    score_threshold: ScoreThreshold = 0.0,
    normalize: Normalize = True,
    input_dtype: InputDtype = "uint8",
    mask: Mask = True,
    precision: Precision = "fp32",
    calibration: Calibration = None,
    calibration_images: CalibrationImages = 128,
    prompt: CalibrationPrompt = None,
    calibration_method: Method = "auto",
    keep_fp32: KeepFp32 = None,
    budget: Budget = None,
    low: Low = "fp16",
    min_share: MinShare = None,
    quantize_share: QuantizeShare = 0.7,
    state: State = None,
    optimization_level: Annotated[int, typer.Option(help="0 (fast build) to 5 (long search).")] = 3,
    workspace_mib: Annotated[int | None, typer.Option(help="Limit of the builder's scratch memory, MiB.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Stop an engine build after so many seconds.")] = None,
    timing_cache: Annotated[Path | None, typer.Option(help="File of measured tactics (tensorrt).")] = None,
    tf32: Annotated[bool, typer.Option("--tf32", help="Let FP32 products use TF32.")] = False,
    plugin: Annotated[list[Path] | None, typer.Option(help="Library of TensorRT plugins; may be repeated (tensorrt).")] = None,
    check: Check = True,
    trust_remote_code: Trust = False,
    labels: Labels = None,
    family: Family = None,
    nms: Nms = "checkpoint",
    tokenizer: Tokenizer = None,
    single_graph: SingleGraph = False,
    json_file: Json = None,
) -> None:
    """Build a bundle: checkpoint -> ONNX, checked against PyTorch -> TensorRT engine.

    Given an ONNX file with its spec (from detrt export), only the engine is built.
    """
    from ..pipeline import build as run
    from ..pipeline import report_to_dict
    from . import options as choices
    from . import show

    show.check_json(json_file)
    choices.check_provider(provider, target)
    several = choices.several_sizes(size, target)
    tall, wide = choices.sizes(None if several else size, height, width)
    engines = choices.engine_configs(
        target,
        sm,
        batch,
        tall,
        wide,
        optimization_level=optimization_level,
        workspace_mib=workspace_mib,
        timeout_seconds=timeout,
        timing_cache=timing_cache,
        tf32=tf32,
        plugins=plugin or (),
    )
    packages = choices.package_configs(
        target,
        device,
        batch,
        tall,
        wide,
        tune=tune,
        form=form,
        tokens=tokens,
        timeout_seconds=timeout,
        several=several,
    )
    export = choices.export_config(
        nms=nms,
        opset=opset,
        msda=msda,
        height=tall,
        width=wide,
        decode=decode,
        max_detections=max_detections,
        score_threshold=score_threshold,
        normalize=normalize,
        input_dtype=input_dtype,
        mask=mask,
        check=check,
        single_graph=single_graph,
    )
    types = choices.precision_config(
        precision=precision,
        calibration=calibration,
        calibration_images=calibration_images,
        prompt=prompt,
        method=calibration_method,
        keep_fp32=keep_fp32,
        budget=budget,
        low=low,
        min_share=min_share,
        quantize_share=quantize_share,
        state=state,
    )
    with show.progress() as step:
        report = run(
            model,
            output,
            export=export,
            engines=engines,
            packages=packages,
            precision=types,
            provider=provider,
            trust_remote_code=trust_remote_code,
            labels=labels,
            family=family,
            tokenizer=tokenizer,
            progress=step,
        )
    show.notes(report.notes)
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if json_file:
        show.write_json(report_to_dict(report), json_file)
    if json_file != "-":
        rows = [(s.name, f"{s.seconds:.1f} s", show.human_size(s.size), s.verdict) for s in report.stages]
        show.table(f"{output}", ("stage", "time", "size", "verdict"), rows, right=(1, 2))
        asked = " --prompt 'a cat. a dog.'" if report.bundle.spec.text is not None else ""
        print(f"detect with: detrt detect {output} IMAGE{asked}")


def export(
    model: Checkpoint,
    output: Annotated[Path, typer.Option("--output", "-o", help="The .onnx file, or a folder for model.onnx.")],
    size: Size = None,
    height: Height = None,
    width: Width = None,
    opset: Opset = 17,
    msda: Msda = "auto",
    decode: Decode = "raw",
    max_detections: MaxDetections = None,
    score_threshold: ScoreThreshold = 0.0,
    normalize: Normalize = True,
    input_dtype: InputDtype = "uint8",
    mask: Mask = True,
    precision: Precision = "fp32",
    calibration: Calibration = None,
    calibration_images: CalibrationImages = 128,
    prompt: CalibrationPrompt = None,
    calibration_method: Method = "auto",
    keep_fp32: KeepFp32 = None,
    budget: Budget = None,
    low: Low = "fp16",
    min_share: MinShare = None,
    quantize_share: QuantizeShare = 0.7,
    state: State = None,
    check: Check = True,
    trust_remote_code: Trust = False,
    labels: Labels = None,
    family: Family = None,
    nms: Nms = "checkpoint",
    tokenizer: Tokenizer = None,
    single_graph: SingleGraph = False,
    json_file: Json = None,
) -> None:
    """Export a checkpoint to one ONNX graph with its spec inside, checked against PyTorch."""
    from ..export import export_onnx
    from ..models.load import load_source
    from ..pipeline import check_prompt
    from ..precision.capability import check_before
    from . import options as choices
    from . import show

    show.check_json(json_file)
    if model.lower().endswith(".onnx"):
        raise SourceError(f"'{model}' is an ONNX file, exported already; build engines from it with: detrt build {model} -o OUT")
    tall, wide = choices.sizes(size, height, width)
    if (tall is not None and choices.fixed(tall) is None) or (wide is not None and choices.fixed(wide) is None):
        raise DetrtError("an ONNX graph has one size or a symbolic one: give one number, or leave --height and --width out")
    config = choices.export_config(
        nms=nms,
        opset=opset,
        msda=msda,
        height=tall,
        width=wide,
        decode=decode,
        max_detections=max_detections,
        score_threshold=score_threshold,
        normalize=normalize,
        input_dtype=input_dtype,
        mask=mask,
        check=check,
        single_graph=single_graph,
    )
    types = choices.precision_config(
        precision=precision,
        calibration=calibration,
        calibration_images=calibration_images,
        prompt=prompt,
        method=calibration_method,
        keep_fp32=keep_fp32,
        budget=budget,
        low=low,
        min_share=min_share,
        quantize_share=quantize_share,
        state=state,
    )
    warnings = check_before(types, ())
    path = output if output.suffix == ".onnx" else output / "model.onnx"
    files.check_place(path)
    with show.progress() as step:
        step("load", None, model)
        source = load_source(model, trust_remote_code=trust_remote_code, labels=labels, family=family, tokenizer=tokenizer)
        check_prompt(source.spec, types)
        report = export_onnx(source, path, config, progress=lambda text: step("export", None, text))
        typed = None
        if types.target != "fp32":
            from ..precision.stage import convert_file

            typed = convert_file(path, report.spec, types, lambda done, text: step("precision", done, text))
            warnings.extend(typed.warnings)
    show.notes(source.notes)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    data = {
        "path": str(report.path),
        "seconds": round(report.seconds, 3),
        "family": report.spec.family,
        "parameters": source.provenance.parameters,
        "graph": report.summary.to_dict(),
        "checks": list(report.errors),
        "notes": list(source.notes),
        "precision": typed.to_dict() if typed else None,
    }
    if json_file:
        show.write_json(data, json_file)
    if json_file != "-":
        verdict = f"equal to PyTorch: {report.worst:.1e} relative" if report.errors else "not checked"
        print(
            f"{path}: {source.family.title}, {report.summary.nodes} nodes, opset {report.summary.opset}, {report.seconds:.1f} s; {verdict}"
        )
        if typed:
            print(f"  precision {typed.precision}: {typed.verdict}")
        for kind, tensors in (("in", report.summary.inputs), ("out", report.summary.outputs)):
            for name, (dtype, shape) in tensors.items():
                print(f"  {kind:3} {name}: {dtype} {' x '.join(map(str, shape))}")
