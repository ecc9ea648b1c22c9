"""`detrt triton-repo`: its configuration, read with Triton's own schema, and its refusals. tests/serve/test_triton.py runs it."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
model_config = pytest.importorskip("tritonclient.grpc.model_config_pb2", reason="tritonclient[grpc] is not installed")
from cli_support import cli, place, snapshot  # noqa: F401 - fixtures
from google.protobuf import text_format

from detrt.bundle import Bundle
from detrt.errors import OutputError, SpecError
from detrt.serve.triton import write_triton_repo
from detrt.serve.triton_config import TritonConfig
from detrt.spec import TextSpec


def read(path):
    return text_format.Parse(Path(path).read_text("utf-8"), model_config.ModelConfig())


def rows_of(tensors):
    return {one.name: (model_config.DataType.Name(one.data_type), list(one.dims)) for one in tensors}


def test_the_configuration(cli, place):
    done = cli("triton-repo", "bundle", "-o", "repo", "--json", "-")
    assert done.json["model"] == "bundle" and done.json["command"] == "tritonserver --model-repository=repo"
    found = read("repo/bundle/config.pbtxt")
    assert (found.name, found.backend, found.max_batch_size) == ("bundle", "python", 8)
    assert all(one.optional for one in found.input)
    assert rows_of(found.input) == {
        "IMAGE": ("TYPE_STRING", [1]),
        "PIXELS": ("TYPE_UINT8", [-1, -1, 3]),
        "CLASSES": ("TYPE_STRING", [-1]),
        "THRESHOLD": ("TYPE_FP32", [1]),
        "MAX_DETECTIONS": ("TYPE_INT64", [1]),
    }
    assert [one.name for one in found.input if one.allow_ragged_batch] == ["PIXELS", "CLASSES"]
    assert rows_of(found.output) == {
        "BOXES": ("TYPE_FP32", [-1, 4]),
        "SCORES": ("TYPE_FP32", [-1]),
        "CLASS_IDS": ("TYPE_INT64", [-1]),
        "LABELS": ("TYPE_STRING", [-1]),
        "COUNT": ("TYPE_INT64", [1]),
        "SIZE": ("TYPE_INT64", [2]),
    }
    assert found.instance_group[0].kind == model_config.ModelInstanceGroup.KIND_CPU
    assert {name: value.string_value for name, value in found.parameters.items()} == {
        "backend": "auto",
        "device": "cpu",
        "precision": "",
        "threshold": "0.5",
        "image_decoder": "cpu",
    }


def test_choices(cli, place):
    options = (
        "--name street --max-batch 16 --max-delay-ms 3.5 --preferred-batch 4,8 --queue 100 --device 0,1 --instances 2 --rows 50"
    )
    cli(
        "triton-repo",
        "bundle",
        "-o",
        "repo",
        *options.split(),
        "--size",
        "8x12",
        "--environment",
        "/opt/a b",
        "--precision",
        "fp16",
    )
    found = read("repo/street/config.pbtxt")
    assert found.max_batch_size == 16 and rows_of(found.output)["BOXES"] == ("TYPE_FP32", [50, 4])
    batching = found.dynamic_batching
    assert list(batching.preferred_batch_size) == [4, 8] and batching.max_queue_delay_microseconds == 3500
    assert batching.default_queue_policy.max_queue_size == 100
    (group,) = found.instance_group
    assert (group.kind, group.count, list(group.gpus)) == (model_config.ModelInstanceGroup.KIND_GPU, 2, [0, 1])
    parameters = {name: value.string_value for name, value in found.parameters.items()}
    assert (parameters["device"], parameters["size"], parameters["precision"]) == ("cuda", "8x12", "fp16")
    assert parameters["EXECUTION_ENV_PATH"] == "/opt/a b"
    cli("triton-repo", "bundle", "-o", "repo", "--name", "intel", "--device", "xpu:1", "--backend", "openvino")
    assert read("repo/intel/config.pbtxt").parameters["device"].string_value == "xpu:1"


def test_what_models_take_and_give(place):
    bundle = Bundle.open("bundle")
    decode = replace(bundle.spec.decode, mask_stride=4)
    masked = replace(bundle, spec=replace(bundle.spec, task="instance-segmentation", decode=decode))
    masked.save()
    write_triton_repo("bundle", "repo", TritonConfig(name="masks"))
    assert rows_of(read("repo/masks/config.pbtxt").output)["MASKS"] == ("TYPE_STRING", [-1])
    for kind, inputs in (("tokens", {"PROMPT"}), ("classes", {"PROMPT", "TASK"})):
        replace(bundle, spec=replace(bundle.spec, text=TextSpec(kind, 256, 256), labels={})).save()
        write_triton_repo("bundle", "repo", TritonConfig(name=kind))
        found = read(f"repo/{kind}/config.pbtxt")
        assert set(rows_of(found.input)) == {"IMAGE", "PIXELS", "THRESHOLD", "MAX_DETECTIONS", *inputs}
        assert "PHRASE_SPANS" in rows_of(found.output)


def test_versions(cli, place):
    cli("triton-repo", "bundle", "-o", "repo", "--name", "m")
    before = snapshot(place / "repo")
    cli.refused("triton-repo", "bundle", "-o", "repo", "--name", "m", names="repo/m/1", advice="--version")
    cli.refused(
        "triton-repo",
        "bundle",
        "-o",
        "repo",
        "--name",
        "m",
        "--version",
        2,
        "--max-batch",
        4,
        names="config.pbtxt",
        advice="the same options",
    )
    assert snapshot(place / "repo") == before
    cli("triton-repo", "bundle", "-o", "repo", "--name", "m", "--version", 2)
    after = snapshot(place / "repo")
    assert {name: after[name] for name in before} == before and {"m/1", "m/2"} <= {
        "/".join(name.split("/")[:2]) for name in after
    }
    assert Bundle.open("repo/m/2/bundle").digest == Bundle.open("bundle").digest


def test_a_threshold_keeps_its_digits(place):
    write_triton_repo("bundle", "repo", TritonConfig(threshold=0.123456789))
    assert float(read("repo/bundle/config.pbtxt").parameters["threshold"].string_value) == 0.123456789


def test_a_killed_writer_leaves_no_folder_that_triton_takes_for_a_model(place, monkeypatch):
    """Triton does not start where a folder of the repository is no model. Versions are numbers; it passes over other folders of a model."""
    write_triton_repo("bundle", "repo", TritonConfig(name="first"))
    seen = []

    def copied(source, target):
        seen.append(
            (sorted(one.name for one in Path("repo").iterdir()), sorted(one.name for one in Path("repo/first").iterdir()))
        )
        shutil.copyfile(source, target)

    monkeypatch.setattr("detrt.serve.triton.shutil", SimpleNamespace(copyfile=copied))
    write_triton_repo("bundle", "repo", TritonConfig(name="second"))
    write_triton_repo("bundle", "repo", TritonConfig(name="first", version=2))
    Path("repo/first/config.pbtxt").write_bytes(b"# \xff")
    with pytest.raises(OutputError, match="with other choices"):
        write_triton_repo("bundle", "repo", TritonConfig(name="first", version=3))
    assert len(seen) >= 2 and seen[0] == (["first"], ["1", "config.pbtxt"])
    assert seen[-1][0] == ["first", "second"] and not any(name.isdigit() and name != "1" for name in seen[-1][1])
    assert sorted(one.name for one in Path("repo/first").iterdir()) == ["1", "2", "config.pbtxt"]
    assert not [one for one in place.iterdir() if one.name.startswith(".")]


def test_places_that_are_no_repository(cli, place):
    """A model is written into no bundle, no other model, and not among other files."""
    cli("triton-repo", "bundle", "-o", "repo")
    Path("other/bundle").mkdir(parents=True)
    Path("other/bundle/notes.txt").write_text("mine")
    before = snapshot(place)
    for output, names in (
        (".", "'bundle' is there and is no model"),
        ("other", "'other/bundle' is there and is no model"),
        ("bundle", "is a bundle"),
        ("bundle/deep/er", "is a bundle"),
        ("repo/bundle", "is a model of a repository"),
        ("repo/bundle/1", "is a model of a repository"),
    ):
        cli.refused("triton-repo", "bundle", "-o", output, names=names, advice="--output")
    assert snapshot(place) == before
    Path("empty/bundle").mkdir(parents=True)
    cli("triton-repo", "bundle", "-o", "empty")
    assert Path("empty/bundle/1/model.py").is_file()


def test_a_path_that_triton_cannot_start_models_in(cli, place):
    for output in ("my models", "modèles", "it's", "a$b"):
        done = cli("triton-repo", "bundle", "-o", output, "--json", "-")
        assert shlex.split(done.json["command"]) == ["tritonserver", f"--model-repository={output}"]
        assert any(str(place / output) in note and "move the repository" in note for note in done.json["notes"])
    assert not any(
        "move the repository" in note for note in cli("triton-repo", "bundle", "-o", "models", "--json", "-").json["notes"]
    )


def test_an_edited_configuration_is_kept(cli, place):
    cli("triton-repo", "bundle", "-o", "repo")
    path = Path("repo/bundle/config.pbtxt")
    path.write_text(path.read_text().replace('"0.5"', '"0.25"'))
    before = snapshot(place)
    cli.refused("triton-repo", "bundle", "-o", "repo", "--version", 2, names='"0.25"', advice="move the version")
    assert snapshot(place) == before
    cli("triton-repo", "bundle", "-o", "repo", "--version", 2, "--threshold", 0.25)


def test_refusals(cli, place):
    before = snapshot(place)
    for options, names, advice in (
        (["--backend", "tensorflow"], "'tensorflow'", "onnxruntime"),
        (["--name", "a/b"], "'a/b'", "letters"),
        (["--version", 0], "0", "1 to"),
        (["--max-batch", 0], "0", "1 to 1024"),
        (["--max-delay-ms", -1], "-1", "0 to 10000"),
        (["--preferred-batch", "4,x"], "'4,x'", "4,8"),
        (["--preferred-batch", "32"], "32", "--max-batch"),
        (["--device", "0,cpu"], "'cuda:0,cpu'", "one other device"),
        (["--device", "xpu:0,xpu:1"], "'xpu:0,xpu:1'", "one other device"),
        (["--precision", "fp17"], "'fp17'", "fp16"),
        (["--threshold", 2], "2", "0 to 1"),
        (["--instances", 0], "0", "1 to 256"),
        (["--rows", 0], "0", "1 to 100000"),
        (["--image-decoder", "tpu"], "'tpu'", "cpu or gpu"),
    ):
        cli.refused("triton-repo", "bundle", "-o", "repo", *options, names=names, advice=advice)
    cli.refused("triton-repo", "in", "-o", "repo", names="'in'", advice="detrt build")
    cli.refused("triton-repo", "bundle", "-o", "model.onnx", names="model.onnx", advice="the name of a folder")
    assert snapshot(place) == before
    cli.refused("triton-repo", "bundle", "-o", "repo", "--size", "333", names="333", advice="8|multiple|size")
    assert snapshot(place) == before
    cli("triton-repo", "bundle", "-o", "repo")
    cli.refused("triton-repo", "bundle", "-o", "repo/bundle", names="repo/bundle", advice="the folder above it")
    Path("bundle/model.onnx").write_bytes(b"changed")
    cli.refused("triton-repo", "bundle", "-o", "new", names="model.onnx", advice="build it again")
    with pytest.raises(SpecError):
        write_triton_repo("bundle", "new")


def test_a_place_that_cannot_be_written(place):
    Path("repo").mkdir()
    Path("repo/bundle").write_text("a file")
    with pytest.raises(OutputError):
        write_triton_repo("bundle", "repo")
    assert Path("repo/bundle").read_text() == "a file" and list(Path("repo").iterdir()) == [Path("repo/bundle")]
