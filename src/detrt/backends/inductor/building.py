"""Compiled packages as a part of `build`: the checkpoint compiled by PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ... import files
from ...models.load import check_unchanged
from ...models.load_options import RECORDED
from ...spec import Precision, Triple
from ..building import MODEL, Builder, BuildPlan, Stage, Work
from ..shared import SharedOptions
from .build import PackageSource, build_packages, check_packages
from .config import DEVICES, InductorConfig


class PackageBuilder(Builder):
    """Builds packages."""

    def configs_for(self, asked: SharedOptions, make: Callable[..., InductorConfig]) -> list[InductorConfig]:
        """One for each device and size."""
        sides: list[tuple[Triple | None, Triple | None]] = [((height,) * 3, (width,) * 3) for height, width in asked.sizes]
        shared = {"batch": asked.batch, "timeout_seconds": asked.timeout_seconds}
        return [
            make(device=device, height=height, width=width, **shared)
            for device in asked.devices or DEVICES[:1]
            for height, width in sides or [(asked.height, asked.width)]
        ]

    def has_tf32(self, configs: Sequence[InductorConfig]) -> bool:
        return any(config.device != DEVICES[0] for config in configs)

    def check(self, configs: Sequence[InductorConfig], plan: BuildPlan) -> None:
        check_packages(configs, plan.source, plan.export, plan.precision.precision)

    def build(self, configs: Sequence[InductorConfig], plan: BuildPlan, work: Work) -> None:
        loading = {**plan.load.to_dict(), **{key: value for key, value in work.provenance.options.items() if key in RECORDED}}
        if work.graphs != work.folder:
            check_unchanged(plan.source, work.provenance.checkpoint_sha256)
        precision = str(work.graph_precision or Precision.FP32)
        if work.precision.precision == Precision.TF32:
            precision = str(Precision.TF32)
        sha256 = files.sha256_of(work.graphs / MODEL)
        source = PackageSource(plan.source, loading, work.folder, work.spec, precision, sha256)
        for one in build_packages(source, configs, work.say):
            work.stages.append(Stage(one.name, one.seconds, one.built.size, one.verdict))
            work.add(one.built.path.name, "inductor", one.built.facts)


BUILDER = PackageBuilder()
