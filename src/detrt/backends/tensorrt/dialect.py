"""What differs between generations of TensorRT beyond the rows of `versions`: how graphs are written, engines built and contexts made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...spec import ModelSpec
from .config import EngineConfig
from .rewrite import Rewritten, rewrite_typed
from .rows import Version

if TYPE_CHECKING:
    from .bindings import Messages, Trt


class Dialect:
    """TensorRT 10 and newer and TensorRT-RTX: the types of the graph decide.

    Attributes:
        network_flag: of the networks, as `NetworkDefinitionCreationFlag` calls it.
        names_nodes: whether errors of the parser name the node.
        many_contexts: whether an engine has contexts for several combinations of shapes.
    """

    network_flag = "STRONGLY_TYPED"
    names_nodes = True
    many_contexts = True

    def check_config(self, trt: Trt, config: EngineConfig) -> None:
        """Raises EngineError for a choice that the version does not have."""
        return

    def plugins(self, trt: Trt, config: EngineConfig) -> frozenset[str]:
        """Operators of loaded plugins that `rewrite` may give a graph. Where the graph's types decide, nodes are a matter of the export."""
        return frozenset()

    def rewrite(
        self, onnx: Path, row: Version, config: EngineConfig, spec: ModelSpec, folder: Path, plugins: frozenset[str]
    ) -> Rewritten:
        """`rewrite.rewrite`."""
        return rewrite_typed(onnx, row, config, spec, folder)

    def notes(self, source: Rewritten, own_plugin: bool) -> list[str]:
        """How the graph was changed in a way that a user may want to know of. own_plugin: whether detrt's was given for a detector."""
        return []

    def configure(
        self,
        trt: Trt,
        builder_config: Any,
        network: Any,
        source: Rewritten,
        config: EngineConfig,
        *,
        symbolic: bool,
        report: Callable[[float, str], None],
    ) -> None:
        """Tell the builder what depends on the version. symbolic: an axis has a range. report: called with (fraction 0..1, phase).

        Raises:
            EngineError: what the version would compute wrongly.
        """
        builder_config.builder_optimization_level = config.optimization_level
        builder_config.progress_monitor = trt.make_progress_monitor(report)

    def serialize(
        self, trt: Trt, builder: Any, network: Any, builder_config: Any, messages: Messages, *, symbolic: bool
    ) -> tuple[Any, list[str]]:
        """(engine, or None where the builder failed; warnings)."""
        return builder.build_serialized_network(network, builder_config), []

    def layer_types(self, trt: Trt, engine: Path, network: dict[str, int]) -> dict[str, int]:
        """TensorRT type -> number of layer outputs of a built engine. network: of the network that it was built from.

        Raises:
            EngineError: a layer computes in a type that makes its results wrong.
        """
        return network

    def create_context(self, trt: Trt, engine: Any) -> Any:
        """An execution context whose scratch memory the caller gives, or None."""
        return engine.create_execution_context(trt.module.ExecutionContextAllocationStrategy.USER_MANAGED)

    def scratch_bytes(self, engine: Any) -> int:
        """Size of the scratch memory that a context needs."""
        return int(engine.device_memory_size_v2)

    def set_scratch(self, context: Any, address: int, nbytes: int) -> None:
        """Give a context its scratch memory."""
        context.set_device_memory(address, nbytes)


TYPED = Dialect()
