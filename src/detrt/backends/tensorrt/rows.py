"""What detrt knows of a TensorRT version, and of a fault of some: plain data."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...models.families import having
from ..target import named

if TYPE_CHECKING:
    from .dialect import Dialect

# Integers in brackets are sizes of versions: (10, 12) is 10.12 and any build of it.
Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Version:
    """A range of TensorRT versions that read and compute the same.

    Attributes:
        target: "tensorrt" or "tensorrt-rtx".
        since: first version of the range; it ends before the next row of the target.
        opset: newest ONNX opset that the parser reads.
        scatter_reduction: whether it takes the attribute 'reduction' of ScatterND, also where that says "none".
        cumsum: whether CumSum is an operator of its own, and no loop, which a CUDA graph does not record.
        grid_sample_linear: whether GridSample takes the mode "linear", as opset 20 calls it; else that means the nearest pixel.
        types: what layers compute in beside FP32.
        plugins: interface of plugin layers, "" where there are none.
        msda_plugin: newest version of NVIDIA's MultiscaleDeformableAttnPlugin_TRT, "" where there is none.
        by_level_for: which families' deformable attention gathers level by level, because it was measured to be faster.
        blocks: whether convolutions of three channels read blocks of pixels (`graph.blocks`), because kernels for few channels are slow.
        dialect: module and name of its `Dialect`, such as "detrt.backends.tensorrt.dialect:TYPED".
        state: what is known about detrt with it.
    """

    target: str
    since: Numbers
    opset: int
    types: tuple[str, ...]
    scatter_reduction: bool = True
    cumsum: bool = True
    grid_sample_linear: bool = False
    plugins: str = "IPluginV3"
    msda_plugin: str = ""
    by_level_for: str = ""
    blocks: bool = False
    dialect: str = "detrt.backends.tensorrt.dialect:TYPED"
    state: str = ""

    typed = "strongly"
    integers = "yes"

    def written_out(self) -> list[str]:
        """What its graphs are written without, in words."""
        words = [] if self.scatter_reduction else ["'reduction' of ScatterND"]
        if not self.cumsum:
            words.append("CumSum of floats")
        return words if self.grid_sample_linear else [*words, "'linear' of GridSample"]

    def faster_forms(self) -> list[str]:
        """What its graphs have in another form because it was measured to be faster, in words."""
        words = [f"gathers by level for {', '.join(having(self.by_level_for))}"] if self.by_level_for else []
        return [*words, "first convolutions over blocks"] if self.blocks else words

    def plugin_words(self) -> str:
        """NVIDIA's plugins that its graphs may hold, in words."""
        return f"MSDA version {self.msda_plugin}" if self.msda_plugin else "none"

    def spoken(self) -> Dialect:
        """Its `Dialect`; imports the module that has it."""
        return named(self.dialect)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Fault:
    """Results that are wrong without an error, or a builder that does not return, in a range of versions.

    Attributes:
        what: the fault in a few words.
        since, before: versions that have it; no `before`: none is known without it. target: which library.
        sms: compute capabilities it was seen on; empty: several, or any.
        precisions: types of the graph that bring it out; empty: any.
        layers: kinds of layers, as TensorRT names them, one of which a network must hold.
        families: which families have it, as `Family.engines` calls them; "": any with such layers.
        batch: whether it needs more than one image a run.
        action: "avoided" by how detrt writes graphs, "warn", or "refuse".
        instead: what to do.
        source: where it is documented.
    """

    what: str
    since: Numbers
    before: Numbers | None
    action: str
    instead: str
    source: str
    target: str = "tensorrt"
    sms: tuple[int, ...] = ()
    precisions: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    families: str = ""
    batch: bool = False

    def hits(
        self, version: Numbers, sm: int, precisions: Collection[str], layers: Collection[str], family: str, largest_batch: int
    ) -> bool:
        """Whether an engine may have this fault."""
        return (
            self.since <= version[: len(self.since)]
            and (self.before is None or version[: len(self.before)] < self.before)
            and (not self.sms or sm in self.sms)
            and (not self.precisions or bool(set(self.precisions) & set(precisions)))
            and (not self.layers or bool(set(self.layers) & set(layers)))
            and (not self.families or family in having(self.families))
            and (not self.batch or largest_batch > 1)
        )
