"""Builders and contexts of TensorRT 8: types are flags and constraints of the builder, and read back from the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ....errors import EngineError
from ....spec import ModelSpec
from ..bindings import Messages, Trt
from ..config import EngineConfig
from ..dialect import Dialect
from ..rewrite import Rewritten
from ..rows import Version
from . import weak
from .rewrite import notes_on, rewrite_weak

_SINCE_8_6 = (("version_compatible", False), ("hardware_compatibility", "none"), ("optimization_level", 3))


class WeakDialect(Dialect):
    """TensorRT 8.5 and 8.6."""

    network_flag = "EXPLICIT_BATCH"
    names_nodes = False
    many_contexts = False

    def check_config(self, trt: Trt, config: EngineConfig) -> None:
        if trt.row.since >= (8, 6):
            return
        for name, usual in _SINCE_8_6:
            if getattr(config, name) != usual:
                raise EngineError(
                    f"TensorRT {trt.version} has no {name}, which came with 8.6; leave it out, or use a newer TensorRT"
                )

    def plugins(self, trt: Trt, config: EngineConfig) -> frozenset[str]:
        """detrt's deformable attention where its library was named, and NVIDIA's LayerNorm."""
        from ....graph.operators import MSDA, MSDA_DOMAIN
        from .write_out import LAYER_NORM

        # `get_plugin_creator` logs an error where there is none.
        loaded = {(one.name, one.plugin_namespace) for one in trt.module.get_plugin_registry().plugin_creator_list}
        namespaces = {LAYER_NORM: "", **({MSDA: MSDA_DOMAIN} if config.plugins else {})}
        return frozenset(name for name, namespace in namespaces.items() if (name, namespace) in loaded)

    def rewrite(
        self, onnx: Path, row: Version, config: EngineConfig, spec: ModelSpec, folder: Path, plugins: frozenset[str]
    ) -> Rewritten:
        return rewrite_weak(onnx, row, config, spec, folder, plugins)  # type: ignore[arg-type]  # rows name their dialect

    def notes(self, source: Rewritten, own_plugin: bool) -> list[str]:
        return notes_on(source, own_plugin)

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
        if trt.row.since >= (8, 6):
            builder_config.builder_optimization_level = config.optimization_level
        weak.configure(trt, builder_config, network, source, symbolic)

    def serialize(
        self, trt: Trt, builder: Any, network: Any, builder_config: Any, messages: Messages, *, symbolic: bool
    ) -> tuple[Any, list[str]]:
        return weak.serialize(trt, builder, network, builder_config, messages, symbolic=symbolic)

    def layer_types(self, trt: Trt, engine: Path, network: dict[str, int]) -> dict[str, int]:
        inspected = weak.inspect(trt, engine.read_bytes())
        if wrong := weak.plugins_in_fp16(inspected):
            raise EngineError(
                f"TensorRT {trt.version} runs the plugin of '{wrong[0]}' in FP16 though it was told FP32, which moves the samples of "
                "deformable attention; build with `keep_gathers`, or give detrt's plugin with `plugins`. A graph that was exported with "
                "`msda=nvidia-plugin` must be exported with `msda=gather` for that"
            )
        return weak.count_types(inspected)

    def create_context(self, trt: Trt, engine: Any) -> Any:
        return engine.create_execution_context_without_device_memory()

    def scratch_bytes(self, engine: Any) -> int:
        return int(engine.device_memory_size)

    def set_scratch(self, context: Any, address: int, nbytes: int) -> None:
        context.device_memory = address


WEAK = WeakDialect()
