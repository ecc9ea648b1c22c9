"""The choices for an engine, its profile, and the messages of a failed build. Needs no library."""

from __future__ import annotations

import json

import pytest
from engine_specs import EDGE, FIXED

from detrt.backends.tensorrt import EngineConfig, config
from detrt.backends.tensorrt import diagnose as explain
from detrt.backends.tensorrt.config import DEFAULT_RTX_SMS, parse_sms
from detrt.backends.tensorrt.profile import NetworkTensor, plan_profile
from detrt.backends.tensorrt.worker import precision_of
from detrt.errors import EngineError, SpecError
from detrt.spec import parse_triple

# ---- choices


def test_parse():
    assert parse_triple("1,4,8") == (1, 4, 8) and parse_triple(" 4 ") == (4, 4, 4)
    assert parse_sms("86,89") == parse_sms("sm_86, SM89") == parse_sms("8.6,8.9") == (86, 89)
    for text in ("", "1,2", "a", "1,,2", "-1", "1.5,2,3"):
        with pytest.raises(SpecError, match="`height` must be MIN,OPT,MAX"):
            parse_triple(text, "height")
    with pytest.raises(EngineError, match="such as 86,89, or current; got 'ada'"):
        parse_sms("ada")


def test_the_gpu_of_this_machine(monkeypatch):
    monkeypatch.setattr(config, "compute_capabilities_here", lambda: (90, 89))
    assert parse_sms("current") == (90,) and EngineConfig(sms=parse_sms(" Current ")).label == "tensorrt-rtx-sm90"
    monkeypatch.setattr(config, "compute_capabilities_here", lambda: ())
    with pytest.raises(EngineError, match="nvidia-smi finds none; name it, such as `sms=89`"):
        parse_sms("current")


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"target": "trt"}, ["tensorrt-rtx, tensorrt", "'trt'"]),
        ({"sms": (70,)}, ["70", "75, 80, 86, 89, 120, 121", "target tensorrt"]),
        ({"sms": (89, 90)}, ["90", "stands alone", "`sms=current`"]),
        ({"sms": "89"}, ["sequence"]),
        ({"sms": ("89",)}, ["'89'"]),
        ({"target": "tensorrt", "sms": (89,)}, ["not for the target 'tensorrt'", "(89,)", "build there"]),
        ({"keep_gathers": True}, ["not for the target 'tensorrt-rtx'", "always has gathers"]),
        ({"batch": (2, 1, 4)}, ["min <= opt <= max", "`batch=1,4,8`"]),
        ({"batch": (0, 1, 4)}, ["(0, 1, 4)"]),
        ({"batch": 4}, ["three integers"]),
        ({"height": (1, 2, 20000)}, ["16384"]),
        ({"optimization_level": 6}, ["0 to 5", "6"]),
        ({"optimization_level": True}, ["0 to 5"]),
        ({"workspace_mib": 0}, ["workspace_mib"]),
        ({"timeout_seconds": float("nan")}, ["timeout_seconds"]),
        ({"timeout_seconds": -1}, ["-1"]),
        ({"timing_cache": "a.cache"}, ["runtime_cache"]),
        ({"version_compatible": True}, ["lean runtime"]),
        ({"hardware_compatibility": "ampere_plus"}, ["`sms=86,89`"]),
        ({"target": "tensorrt", "hardware_compatibility": "all"}, ["ampere_plus"]),
    ],
)
def test_config_refuses(values, parts):
    with pytest.raises(EngineError) as caught:
        EngineConfig(**values)
    for part in parts:
        assert part in str(caught.value)


def test_config_round_trip_and_label():
    config = EngineConfig(sms=[89, 86, 89], batch=[1, 2, 4], timeout_seconds=3)
    assert config.sms == (86, 89) and config.label == "tensorrt-rtx-sm86-89"
    assert EngineConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert EngineConfig().sms == DEFAULT_RTX_SMS and 75 not in DEFAULT_RTX_SMS
    assert EngineConfig("tensorrt").label == "tensorrt"
    with pytest.raises(EngineError, match="fp16"):
        EngineConfig.from_dict({"fp16": True})


# ---- profiles

PIXELS = NetworkTensor("pixel_values", "UINT8", (-1, 3, -1, -1))
MASK = NetworkTensor("pixel_mask", "INT64", (-1, -1, -1))
SIZES = NetworkTensor("target_sizes", "INT64", (-1, 2))


def test_profile_of_shortest_edge_covers_portrait_and_landscape():
    profile = plan_profile([PIXELS, MASK, SIZES], EngineConfig(), EDGE)
    assert profile["pixel_values"] == {"min": [1, 3, 32, 32], "opt": [1, 3, 64, 96], "max": [8, 3, 128, 128]}
    assert profile["pixel_mask"] == {"min": [1, 32, 32], "opt": [1, 64, 96], "max": [8, 128, 128]}
    assert profile["target_sizes"] == {"min": [1, 2], "opt": [1, 2], "max": [8, 2]}


def test_profile_of_detr_800_1333():
    spec = EDGE.with_input(height=800, width=1066, shortest_edge=800, longest_edge=1333, multiple_of=1)
    pixels = plan_profile([PIXELS], EngineConfig(), spec)["pixel_values"]
    assert pixels == {"min": [1, 3, 200, 200], "opt": [1, 3, 800, 1066], "max": [8, 3, 1333, 1333]}


def test_profile_of_stretch_is_one_size_and_choices_win():
    dynamic = FIXED.with_input(dynamic=True)
    assert plan_profile([PIXELS], EngineConfig(), dynamic)["pixel_values"]["min"] == [1, 3, 64, 64]
    config = EngineConfig(batch=(2, 2, 2), height=(32, 64, 96))
    chosen = plan_profile([PIXELS], config, dynamic)["pixel_values"]
    assert chosen == {"min": [2, 3, 32, 64], "opt": [2, 3, 64, 64], "max": [2, 3, 96, 64]}


@pytest.mark.parametrize(
    ("inputs", "config", "spec", "parts"),
    [
        (
            [PIXELS, MASK],
            EngineConfig(height=(60, 64, 64)),
            EDGE,
            ["multiple of 16", "60,64,64", "the nearest is 64"],
        ),
        (
            [NetworkTensor("pixel_values", "UINT8", (1, 3, 64, 64))],
            EngineConfig(batch=(1, 2, 4)),
            FIXED,
            ["fixed batch of 1", "batch 1,2,4", "Leave that out"],
        ),
        (
            [NetworkTensor("pixel_values", "UINT8", (-1, 3, 64, 64))],
            EngineConfig(width=(96, 96, 96)),
            FIXED,
            ["fixed width of 64"],
        ),
        (
            [PIXELS, NetworkTensor("input_ids", "INT64", (-1, -1))],
            EngineConfig(),
            EDGE,
            ["'input_ids' axis 1"],
        ),
        (
            [NetworkTensor("pixel_values", "UINT8", (-1, -1, 64, 64))],
            EngineConfig(),
            FIXED,
            ["'pixel_values' axis 1"],
        ),
        (
            [
                NetworkTensor("pixel_values", "UINT8", (1, 3, 64, 64)),
                NetworkTensor("target_sizes", "INT64", (2, 2)),
            ],
            EngineConfig(),
            FIXED,
            ["disagree about the batch"],
        ),
    ],
)
def test_profile_refuses(inputs, config, spec, parts):
    with pytest.raises(EngineError) as caught:
        plan_profile(inputs, config, spec)
    for part in parts:
        assert part in str(caught.value)


def test_static_graph_takes_its_own_batch():
    static = [NetworkTensor("pixel_values", "UINT8", (1, 3, 64, 64))]
    assert plan_profile(static, EngineConfig(), FIXED)["pixel_values"]["max"] == [1, 3, 64, 64]


# ---- messages


def test_precision():
    assert precision_of({"FLOAT": 5, "INT64": 9}) == "fp32"
    assert precision_of({"FLOAT": 5, "HALF": 500}) == "fp16+fp32"
    assert precision_of({"FLOAT": 9, "INT8": 2, "BF16": 3}) == "fp32+bf16+int8"
    assert precision_of({"INT64": 1}) == "none"


@pytest.mark.parametrize(
    ("logged", "advice"),
    [
        ("Quantized constant (a_quantized) is only allowed before DQ or PLUGIN_V2", "Conv, Gemm and MatMul"),
        ("Called with invalid shape profile, expect min <= common <= max on input 3", "name of its own"),
        ("Could not find any implementation for node {ForeignNode[a...b]}", "`msda=gather`"),
        ("Cuda Runtime (cudaError 35: CUDA driver version is insufficient)", "no CUDA device"),
        ("OutOfMemory: requested size was 123", "Lower the max"),
        ("Error Code 2: OutOfMemory (Requested size was 10402748 bytes.)", "more where that limit is what was reached"),
        ("OutOfMemory (no further information) blockChooser.cpp::getRegionBlockSize::601", "Give one image size"),
        ("", "the builder gave no reason"),
    ],
)
def test_build_failure_gives_a_next_step(logged, advice):
    assert advice in explain.build_failure("m.onnx", [logged] if logged else [], "1.0")


def test_ended():
    assert "SIGSEGV" in explain.ended(-11, "") and "memory" in explain.ended(-9, "")
    assert "exit code 3" in explain.ended(3, "last words") and "last words" in explain.ended(3, "last words")


def test_remarks_that_differ_in_the_node_only_are_shown_once():
    remarks = [f"/backbone/stages.{i}/Reshape_{i}: dimension at position {i} might be zero" for i in range(4)]
    assert explain.alike_once([*remarks, "another"]) == [f"{remarks[0]} (and 3 alike)", "another"]
    assert len(explain.alike_once(["x" * 5000])[0]) < 600
