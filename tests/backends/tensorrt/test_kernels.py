"""The list of kernels that TensorRT-RTX prints, and how many a small model takes: the quality of a graph on a machine without a GPU."""

from __future__ import annotations

import pytest

from detrt.backends.tensorrt.kernels import ATTENTION, HEAD, WIDENING, Kernel, count, parse

LINE = "Name: {}, LayerType: {}, Inputs: [ {{ Name: a, Dimensions: [1,3], Datatype: {}, Format: x }}], Constants: [ {{ Name: c, Datatype: Int64 }}], Outputs: [ {{ Name: b, Datatype: {}, Format: y }}], TacticName: t, StreamId: 0, Metadata: "
MESSAGE = (
    HEAD
    + "\n"
    + "\n".join(
        LINE.format(*row)
        for row in (
            ("__myl_Cast", "kgen", "UInt8", "Half"),
            ("conv_1", "correlation", "Int8", "Float"),
            ("conv_2", "correlation", "FP8", "Half"),
            ("_gemm_mha_v2_myl0_3", "kgen", "Half", "Half"),
            ("__mye_signal", "signal", "Half", "Half"),
            ("__mye_wait", "wait", "Half", "Half"),
        )
    )
    + "\nBindings:\npixel_values\n"
)


def test_a_list_is_read():
    kernels = parse(MESSAGE)
    assert kernels[0] == Kernel("__myl_Cast", "kgen", ("UInt8",), ("Half",))
    assert count(kernels) == {"all": 4, ATTENTION: 1, WIDENING: 1, "kgen": 2, "correlation": 2}
    assert count(parse("")) == count(parse("no list")) == {}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory, exported):
    """Family, precision -> the counts of an engine for compute capability 8.9, batch size 1."""
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs the 'rtx' extra")
    from detrt.backends.tensorrt import EngineConfig, build_engine
    from detrt.graph import io
    from detrt.precision import PrecisionConfig
    from detrt.precision.apply import apply_precision

    def of(name, precision):
        report = exported(name)
        path = tmp_path_factory.mktemp("kernels") / "model.onnx"
        typed, _ = apply_precision(io.load(report.path), report.spec, PrecisionConfig(precision, min_fraction=0.0))
        io.save(io.with_spec(typed, report.spec), path)
        height, width = report.spec.input.size_hw
        config = EngineConfig(sms=(89,), batch=(1, 1, 1), height=(height,) * 3, width=(width,) * 3)
        return build_engine(path, path.with_suffix(".engine"), config).facts.kernels

    return of


# Measured with TensorRT-RTX 1.7.1.116, and three in a hundred more for other versions: a lost fusion costs more. Heads of tiny models are
# too small for fused attention.
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("rt_detr_v2", 158),
        pytest.param("d_fine", 218, marks=pytest.mark.slow),
        ("detr", 104),
        ("yolos", 46),
        pytest.param("deformable_detr", 161, marks=pytest.mark.slow),
    ],
)
def test_a_graph_takes_no_more_kernels(name, most, kernels):
    found = kernels(name, "fp16")
    assert 0 < found["all"] <= most and found[WIDENING] == 0, found
