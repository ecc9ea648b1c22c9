"""TensorRT 8.5 and 8.6, of JetPack 5: their rows and faults, and what only they need: graphs in older operators, and types as builder flags.

Nothing outside names this folder but `versions.GENERATIONS`: detrt works without it and that line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ....models.families import having
from ....models.families.base import LAYER_NORM_PLUGIN_IS_FASTER, ONE_PHRASE, PLUGIN_IS_FASTER, SIGMOID_IN_FP16, SYMBOLIC_PLUGIN
from ..rows import Fault, Version


@dataclass(frozen=True, slots=True)
class OldVersion(Version):
    """A range of versions without strong typing and INT64, whose parsers obey no 'start' and 'end' of Shape.

    Attributes:
        lacks: operators that graphs of detrt may hold and the parser does not import.
        plugin_for: which families' graphs get nodes of that plugin in place of gathers, because it was measured to be faster; as
            `Family.engines` calls them, "" for none.
        layer_norm_for: which families' FP16 graphs get NVIDIA's LayerNorm plugin where the library has it, as it was measured to be faster.
        sigmoid_for: in which families' FP16 graphs a Sigmoid that must compute in FP32 is written out. Myelin lowers it with a one in
            FP16, finds two types in a sum and gives up the FP16 form of the whole node around it.
        one_phrase: whether phrases with queries of their own (SAM 3) run one at a time: with several the builder did not end.
    """

    lacks: frozenset[str] = frozenset()
    plugin_for: str = ""
    layer_norm_for: str = ""
    sigmoid_for: str = ""
    one_phrase: bool = False

    typed = "weakly"
    integers = "as INT32"

    def written_out(self) -> list[str]:
        words = [
            *sorted(self.lacks),
            "'start' and 'end' of Shape",
            "'reduction' of ScatterND",
            "CumSum of floats, of known length",
        ]
        words.append("the scale of an FP32 MatMul of an FP16 graph, before it")
        return [*words, f"FP32 Sigmoid in FP16 graphs of {', '.join(having(self.sigmoid_for))}"] if self.sigmoid_for else words

    def plugin_words(self) -> str:
        used = f", used for {', '.join(having(self.plugin_for))}" if self.plugin_for else ""
        norm = f"; LayerNorm, used in FP16 for {', '.join(having(self.layer_norm_for))}" if self.layer_norm_for else ""
        return f"MSDA version {self.msda_plugin}{used}{norm}"


_SHARED: dict[str, Any] = {
    "scatter_reduction": False,
    "cumsum": False,
    "plugins": "IPluginV2DynamicExt",
    "dialect": f"{__name__}.dialect:WEAK",
}
VERSIONS: tuple[Version, ...] = (
    OldVersion(
        "tensorrt", (8, 5), 17, ("fp16",),
        # The parser has InstanceNormalization, as a plugin that fails in a build without cuDNN ("pluginV2Runner::allocateResources").
        lacks=frozenset(("LayerNormalization", "GroupNormalization", "InstanceNormalization", "Mod", "Mish", "Gelu", "IsInf", "CastLike", "ArgMax of integers")),
        **_SHARED,
        msda_plugin="1", plugin_for=PLUGIN_IS_FASTER, layer_norm_for=LAYER_NORM_PLUGIN_IS_FASTER,
        sigmoid_for=SIGMOID_IN_FP16, one_phrase=True,
        state="run on H100s and H200s in FP32 and FP16; JetPack 5 has 8.5.2",
    ),
    OldVersion(
        "tensorrt", (8, 6), 17, ("fp16",), lacks=frozenset(("Mish", "Gelu", "CastLike")),
        **_SHARED,
        msda_plugin="1", state="not tried",
    ),
)  # fmt: skip
FAULTS: tuple[Fault, ...] = (
    Fault(
        "engines of symbolic shapes are wrong at other sizes or prompt lengths than the usual one", (8, 5), (8, 6), "avoided",
        "the preview feature FASTER_DYNAMIC_SHAPES_0805", "docs/results/tensorrt.md#symbolic-shapes",
    ),
    Fault(
        "NVIDIA's plugin for deformable attention runs in FP16 although its layers are constrained to FP32", (8, 5), (8, 6), "avoided",
        "an output type of FP32 without a constraint of precision", "docs/results/tensorrt.md#nvidias-plugin-in-fp16", precisions=("fp16",), layers=("PLUGIN_V2",),
    ),
    Fault(
        "a MatMul that is constrained to FP32 because it overflows FP16 is stored in FP16", (8, 5), (8, 6), "avoided",
        "the scale of attention moved in front of its product, which fits then", "docs/results/tensorrt.md#an-fp32-product-in-fp16", precisions=("fp16",),
    ),
    Fault(
        "Deformable DETR of symbolic size with a plugin loses a fifth of its detections", (8, 5), (8, 6), "avoided",
        "gathers, which such graphs keep", "docs/results/tensorrt.md#symbolic-shapes", families=SYMBOLIC_PLUGIN, layers=("PLUGIN_V2",),
    ),
    Fault(
        "the builder does not end within 20 minutes for several phrases, or for prompts of several lengths", (8, 5), (8, 6), "avoided",
        "one phrase a run, padded as published; add `batch=1`, the only batch size that was compared", "docs/results/tensorrt.md#sam-3", families=ONE_PHRASE,
    ),
)  # fmt: skip
