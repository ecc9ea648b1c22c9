"""The two sides of a comparison: opened models, the facts they claim, and the graphs behind them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import files
from ..backends.base import Session, no_prompt
from ..backends.open import kind_of, open_session
from ..backends.prompted import detector_of, model_spec
from ..bundle import MANIFEST, Bundle
from ..data.matching import GATES
from ..errors import DetrtError, PromptError, SessionError
from ..models import trust
from ..models.contract import OPSETS, ExportConfig
from ..models.load_options import LoadOptions
from ..spec import DecodeSpec, ModelSpec
from ..system import CPU
from ..text.prompts import Prompt
from ..text.tokenizer import same_tokens

if TYPE_CHECKING:
    from ..graph.view import GraphView
    from ..models.source import Source

# Fields of the spec that an export changes by choice; all others are facts of the checkpoint.
_DECODE_CHOICES = ("in_graph", "max_detections", "nms", "nms_in_graph", "score_threshold")
_CHOICES = (
    *("resize", "height", "width", "shortest_edge", "longest_edge", "max_height", "max_width", "pad"),
    *("dynamic", "mask", "dtype", "normalize_in_graph"),
)


@dataclass(slots=True)
class Side:
    """One of the two models. graph: its ONNX file; an engine's is the one that it was built from.

    source: the checkpoint, where it is one. options: the caller's choices when it was exported.
    """

    session: Session
    name: str
    source: Source | None = None
    graph: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    owned: bool = False

    @property
    def origin(self) -> str:
        """Its name, with the SHA-256 of a checkpoint's weights."""
        digest = "" if self.source is None else self.source.provenance.checkpoint_sha256
        return f"{self.name}, weights SHA-256 {digest}" if digest else self.name

    def close(self) -> None:
        if self.owned:
            self.session.close()


def default_reference(candidate: str | Path) -> str:
    """The checkpoint that a bundle was made from.

    Raises:
        DetrtError: not a bundle, or its checkpoint is not on this machine.
    """
    if kind_of(candidate) != "bundle":
        raise DetrtError(f"'{candidate}' does not say what it was made from; give the reference with `against=CHECKPOINT`")
    origin = Bundle.open(candidate).provenance
    source = origin.source
    file = Path(source.removeprefix("ckpt:")).expanduser()
    here = file.is_file() if source.startswith("ckpt:") else (file / "config.json").is_file()
    if here or source.startswith(("embedded:", "random:")):
        return source
    if source.endswith(".onnx"):
        if "layout" in origin.options and file.is_file():  # of another exporter: the file is the reference
            return source
        raise DetrtError(
            f"'{candidate}' was made from the ONNX file '{source}', which is not on this machine or does not say where it comes "
            "from; give the reference with `against=CHECKPOINT`"
        )
    raise DetrtError(
        f"'{candidate}' was made from '{source}', which is not on this machine or would have to be downloaded; "
        f"give the reference with `against=CHECKPOINT`, e.g. `against='{source}'`"
    )


def is_foreign(model: str | Path) -> bool:
    """Whether a model is an ONNX file without a spec of detrt's."""
    if kind_of(model) != "onnx" or not Path(model).is_file():
        return False
    from .. import graph

    return graph.find_spec(model) is None


def open_side(
    model: Any,
    load: LoadOptions | None = None,
    *,
    like: ModelSpec | None = None,
    opening: Mapping[str, Any] | None = None,
) -> Side:
    """Open a reference, a Source or a session.

    load: how a checkpoint, or an ONNX file of another exporter, is read. opening: how `open_session` opens anything else: backend,
    device. like: the contract of inputs and outputs that a checkpoint is to have; without it, its own default.
    """
    if isinstance(model, Session):
        return Side(model, str(model.info.path or model.info.name), graph=_graph_of(model))
    if isinstance(model, (str, Path)) and kind_of(model) != "checkpoint":
        reading = load if is_foreign(model) else None
        with trust.allowing(load is not None and load.trust_remote_code):
            session = open_session(model, eager_kernels=True, emulate_low_precision=True, load=reading, **(opening or {}))
        options = Bundle.open(model).provenance.options if kind_of(model) == "bundle" else {}
        return Side(session, str(model), graph=_graph_of(session), options=options, owned=True)
    from ..backends.torch.session import open_torch
    from ..models.load import load_source

    chosen = dict(opening or {})
    if chosen.get("backend", "auto") not in ("auto", "torch"):
        raise SessionError(
            f"`backend` chooses how a bundle or a file runs, and '{model}' is a checkpoint, which PyTorch runs; leave it out"
        )
    source = model
    if isinstance(model, (str, Path)):
        source = load_source(str(model), load)
    contract = same_contract(source.spec, like) if like else None
    session = open_torch(source, spec=contract, device=chosen.get("device") or "cpu")
    return Side(session, source.provenance.source, source=source, owned=True)


def bound(session: Session, name: str, prompt: str | Sequence[str] | Prompt | None, task: str = "") -> Session:
    """A model of fixed classes: the model itself, or one that takes a prompt with this one. name: of the model.

    Raises:
        PromptError: a model that takes a prompt and none, the reverse, or a bad prompt.
    """
    if session.info.text is not None:
        if prompt is None:
            raise PromptError(f"'{name}' takes a prompt; say what to look for, e.g. `prompt='a cat. a remote control.'`")
        return session.bind(prompt, task=task)
    if (prompt is not None or task) and not session.prompts:
        raise no_prompt(f"'{name}'", "leave `prompt` out")
    return session


def is_onnx_on_cpu(session: Session) -> bool:
    """Whether ONNX Runtime runs a model on the CPU, where it may compute 16-bit values in FP32."""
    return session.info.runs_graph and session.info.device == CPU


def run_view(side: Side) -> GraphView:
    """The graph of a side as it is run: with its roundings spelled out where the runtime leaves them out."""
    from ..graph.emulate_low_precision import emulate, has_16_bit
    from ..graph.view import GraphView

    assert side.graph is not None
    view = view_of(side.graph)
    if is_onnx_on_cpu(side.session) and has_16_bit(view.types):
        return GraphView(emulate(view.model, view.types))
    return view


def same_contract(facts: ModelSpec, like: ModelSpec) -> ModelSpec:
    """A checkpoint's own facts (mean, std, labels, decode rule) with the tensors that the candidate takes.

    Facts are not copied from the candidate, so that a bundle with a wrong mean or label is found out.
    """
    spec = facts.with_input(**{name: getattr(like.input, name) for name in _CHOICES})
    return spec.with_decode(**{name: getattr(like.decode, name) for name in _DECODE_CHOICES})


def spec_differences(reference: ModelSpec, candidate: ModelSpec) -> list[str]:
    """Facts in which two specs differ, as text; choices of an export are not among them.

    Raises:
        SessionError: another task, or heads of different sizes: not the same detector.
    """
    if reference.task != candidate.task:
        raise SessionError(
            f"the reference is a model for {reference.task}, the candidate one for {candidate.task}; compare models of one task "
            "(`no_masks` reads a checkpoint with masks as a detector)"
        )
    if reference.decode.num_classes != candidate.decode.num_classes:
        raise SessionError(
            f"the two models have different classes ({reference.decode.num_classes} and "
            f"{candidate.decode.num_classes}); they cannot be the same detector"
        )
    found = []
    # What a graph does not depend on, and what cannot be inferred from the file of another exporter.
    idle = ("multiple_of",) if not candidate.input.dynamic else ()
    decoded = ("num_queries",) if candidate.decode.in_graph else ()
    for part, skip in (("input", _CHOICES + idle), ("decode", _DECODE_CHOICES + decoded)):
        a, b = getattr(reference, part), getattr(candidate, part)
        for entry in fields(a):
            mine, theirs = getattr(a, entry.name), getattr(b, entry.name)
            if entry.name not in skip and mine != theirs:
                found.append(f"spec.{part}.{entry.name} is {theirs}, the reference has {mine}")
    # A graph that keeps a normalisation of its own is compared by its tensors, a host that normalises by this.
    wrong = [i for i in sorted({*reference.labels, *candidate.labels}) if reference.labels.get(i) != candidate.labels.get(i)]
    if wrong:
        shown = ", ".join(f"{i} is {candidate.label(i)!r}, the reference has {reference.label(i)!r}" for i in wrong[:3])
        found.append(f"spec.labels: {len(wrong)} of {len(reference.labels)} differ: class {shown}")
    return found


def text_differences(reference: Session, candidate: Session) -> list[str]:
    """What two models that take a prompt read differently, as text."""
    a, b = model_spec(reference).text, model_spec(candidate).text
    if a is None or b is None:
        return []
    found = [
        f"spec.text.{name} is {getattr(b, name)}, the reference has {getattr(a, name)}"
        for name in ("kind", "max_tokens", "pad_id", "separators")
        if getattr(a, name) != getattr(b, name)
    ]
    if a.kind == b.kind and not same_tokens(reference.prompts, candidate.prompts):
        found.append("the tokenizers differ: they give other tokens for this prompt")
    return found


def precision_of(side: Side) -> str:
    """The lowest type that a model was made for: what its bundle or engine records, else what its graph shows."""
    facts = side.session.info.facts
    if facts is not None:
        return facts.lowest_precision
    recorded = side.options.get("precision")
    name = recorded.get("precision", recorded.get("name")) if isinstance(recorded, Mapping) else recorded
    if isinstance(name, str) and name in GATES:
        return name
    if side.graph is None or side.source is not None:
        return "fp32"
    from ..graph.view import graph_precision

    return graph_precision(view_of(side.graph))


def view_of(path: Path) -> GraphView:
    from .. import graph
    from ..graph.view import GraphView

    return GraphView(graph.load(path))


def reference_view(side: Side, candidate: Side, say: Callable[[str], None]) -> tuple[GraphView, str]:
    """The reference as a graph: its own file, or an FP32 export of the checkpoint made for this.

    Raises:
        DetrtError: neither exists, or the checkpoint does not export.
    """
    if side.source is None:
        if side.graph is None:
            raise SessionError(f"the reference '{side.name}' has no graph; give a checkpoint with `against`")
        return view_of(side.graph), "the reference's graph"
    from ..export import export_onnx

    say("exporting the reference")
    config = config_like(candidate)
    with files.scratch() as folder:
        report = export_onnx(side.source, folder / "reference.onnx", config)
        return view_of(report.path), "an FP32 export of the reference"


def config_like(candidate: Side) -> ExportConfig:
    """Choices that give a graph with the candidate's contract."""
    recorded = candidate.options.get("export")
    known = {entry.name for entry in fields(ExportConfig)}
    if isinstance(recorded, Mapping) and set(recorded) <= known:
        return ExportConfig(**{**recorded, "check": False})
    spec = candidate.session.spec
    opset, sampled = OPSETS[0], False
    if candidate.graph is not None:
        from ..graph.nodes import default_opset

        view = view_of(candidate.graph)
        version = default_opset(view.model) or opset
        opset = version if version in OPSETS else opset
        sampled = any(node.op_type == "GridSample" for node in view.model.graph.node)
    return ExportConfig(
        opset=opset,
        msda="gridsample" if sampled else "gather",
        height=None if spec.input.dynamic else spec.input.height,
        width=None if spec.input.dynamic else spec.input.width,
        decode="graph" if spec.decode.in_graph else "raw",
        max_detections=spec.decode.max_detections,
        score_threshold=spec.decode.score_threshold,
        nms=_nms_like(spec.decode),
        normalize=spec.input.normalize_in_graph,
        input_dtype=spec.input.dtype,
        mask=spec.input.mask or spec.input.dynamic,
        check=False,
    )


def _nms_like(decode: DecodeSpec) -> str:
    """The choice of ExportConfig that gives this rule."""
    if decode.nms_in_graph:
        return "graph-hard"
    return {"none": "none", "nms": "hard"}.get(decode.nms, "checkpoint")


def _graph_of(session: Session) -> Path | None:
    info = detector_of(session).info
    path, facts = info.path, info.facts
    if path is None:
        return None
    if info.runs_graph:
        return path
    if facts is None or not (path.parent / MANIFEST).is_file():
        return None
    # The graph beside an engine is of use only if the engine was built from it.
    for model in sorted(path.parent.glob("*.onnx")):
        if files.sha256_of(model) == facts.onnx_sha256:
            return model
    return None
