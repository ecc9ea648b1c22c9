"""detrt eval: the file of thresholds that detect reads, the page, and the comparison of saved results."""

from __future__ import annotations

import json
import re
import shutil

import pytest

pytest.importorskip("onnx", reason="onnx is not installed: the models are made with onnx.helper")
pytest.importorskip("pycocotools", reason="needs the 'eval' extra")
from cli_support import cli, place  # noqa: F401 - fixtures
from PIL import Image

from detrt.detector import Detector
from detrt.evaluation import coco

EVAL = ("eval", "bundle", "--images", ".", "--ground-truth", "gt.json")


@pytest.fixture
def truth(cli, place):
    """Ground truth: what the model finds above 0.7; and all that it finds as saved results."""
    rows = cli("detect", "bundle", "in", "--json", "-", "-q", "--threshold", "0.7").lines
    images = [
        {"id": i, "file_name": row["image"], "height": row["height"], "width": row["width"]} for i, row in enumerate(rows, 1)
    ]
    found = [(i, one) for i, row in enumerate(rows, 1) for one in row["detections"]]
    names = sorted({one["label"] for _, one in found})
    boxes = []
    for number, (image, one) in enumerate(found, 1):
        x0, y0, x1, y1 = one["box_xyxy"]
        boxes.append(
            {"id": number, "image_id": image, "category_id": names.index(one["label"]), "bbox": [x0, y0, x1 - x0, y1 - y0]}
        )
    categories = [{"id": i, "name": name} for i, name in enumerate(names)]
    (place / "gt.json").write_text(json.dumps({"images": images, "categories": categories, "annotations": boxes}))
    return names


def test_thresholds_go_from_eval_to_detect(cli, place, truth):
    done = cli(
        *EVAL,
        "--thresholds",
        "best.json",
        "--report",
        "page.html",
        "--save",
        "all.json",
        "--iou-type",
        "bbox",
    )
    assert done.code == 0, done
    best = json.loads((place / "best.json").read_text())
    assert sorted(best) == truth and all(0 < value < 1 for value in best.values())
    once = cli(
        "detect", "bundle", "in", "--json", "-", "-q", "--class-thresholds", "best.json", "--classes", ",".join(best)
    ).lines
    again = cli(
        "detect",
        "bundle",
        "in",
        "--json",
        "-",
        "-q",
        "--class-thresholds",
        ",".join(f"{k}={v}" for k, v in best.items()),
        "--classes",
        ",".join(best),
    ).lines
    assert once == again and any(row["detections"] for row in once)
    page = (place / "page.html").read_text("utf-8")
    assert page.count('src="data:image/jpeg;base64,') in (0, 2, 4) and "Images with most errors" in page
    assert "<polyline" in page and "Confusions" in page and not re.search(r"(src|href)=\"http", page)
    said = cli(
        "eval",
        "--results",
        "all.json",
        "--ground-truth",
        "gt.json",
        "--against",
        "all.json",
        "--iou-type",
        "bbox",
        "--report",
        "two.html",
    )
    assert said.code == 0 and "AP +0.0000 against all.json; 95 % interval +0.0000 to +0.0000" in " ".join(said.out.split())
    assert "no more than chance" in (place / "two.html").read_text("utf-8")


def test_two_models_in_one_run(cli, place, truth):
    """A model beside itself loses nothing; one that misses what the other finds loses on that image, which is shown."""
    pytest.importorskip("matplotlib", reason="needs the 'bench' extra")
    common = (*EVAL, "--iou-type", "bbox")
    same = cli(*common, "--against", "bundle", "--plot", "same.svg", "--save", "all.json")
    assert "AP +0.0000 against bundle; 95 % interval +0.0000 to +0.0000" in " ".join(same.out.split())
    assert (place / "same.svg").read_text("utf-8").count("<svg") == 1
    known, found = json.loads((place / "gt.json").read_text()), json.loads((place / "all.json").read_text())
    image = known["annotations"][0]["image_id"]
    more = {"image_id": image, "category_id": known["annotations"][0]["category_id"], "bbox": [0, 0, 3, 3]}
    known["annotations"].append({"id": 99, **more})
    (place / "gt.json").write_text(json.dumps(known))
    (place / "better.json").write_text(json.dumps([*found, {**more, "score": 1.0}]))
    done = cli(*common, "--against", "better.json", "--plot", "two.png", "--report", "two.html")
    difference = float(re.search(r"AP (-[\d.]+) against better.json", " ".join(done.out.split()))[1])
    name = next(one["file_name"] for one in known["images"] if one["id"] == image).rpartition("/")[2]
    page = (place / "two.html").read_text("utf-8")
    lost = page.split("Images that lost most")[1].split("</section>")[0]
    assert difference < 0 and lost.count("data:image/jpeg") == 3 and f"{name}: AP -" in lost
    with Image.open(place / "two.png") as picture:
        assert picture.format == "PNG" and picture.width > 1500


def test_annotations_of_crowds_alone_have_no_ap_to_compare(cli, place, truth):
    known = json.loads((place / "gt.json").read_text())
    for row in known["annotations"]:
        row["iscrowd"] = 1
    (place / "gt.json").write_text(json.dumps(known))
    done = cli(
        *EVAL,
        "--against",
        "bundle",
        "--report",
        "page.html",
        "--json",
        "m.json",
    )
    said = " ".join(done.out.split())
    assert done.code == 0 and "no AP to compare with bundle" in said and "nan" not in said and not done.err
    assert json.loads((place / "m.json").read_text())["AP"] is None and "nan" not in (place / "page.html").read_text("utf-8")


def test_both_models_resume(cli, place, truth, tmp_path_factory):
    states = tmp_path_factory.mktemp("states")
    common = (*EVAL, "--against", "bundle", "--batch", "1")
    whole = cli(*common, "--resume", states / "state.jsonl")
    assert "resumed" not in whole.out
    paths = [states / "state.jsonl", states / "state.against.jsonl"]
    texts = [path.read_text() for path in paths]
    assert all(len(text.splitlines()) > 2 for text in texts)
    paths[1].write_text("".join(texts[1].splitlines(keepends=True)[:2]))  # as after an end in the second model
    again = cli(*common, "--resume", states / "state.jsonl")
    assert "resumed" in again.out and [path.read_text() for path in paths] == texts
    assert again.out.splitlines()[1:] == whole.out.splitlines()[1:]


def test_what_is_refused(cli, place, truth):
    cli.refused(*EVAL, "--thresholds", "x.json", "--at-precision", "1.5", names="--at-precision", advice="at most 1")
    cli.refused(
        *EVAL,
        "--thresholds",
        "x.json",
        "--at-precision",
        "0.5",
        "--at-recall",
        "0.5",
        names="--at-recall",
        advice="one of them",
    )
    cli.refused(*EVAL, "--against", "bundel", names="bundel", advice="give a bundle folder")
    (place / "cat9.json").write_text('[{"image_id": 1, "category_id": 99, "bbox": [1, 1, 2, 2], "score": 0.5}]')
    with pytest.MonkeyPatch.context() as patch:  # both are said before the model runs
        patch.setattr(coco, "evaluate_coco", None)
        cli.refused(*EVAL, "--against", "none.json", names="none.json", advice="make one with")
        cli.refused(*EVAL, "--against", "cat9.json", names="cat9.json", advice="those of the annotations")
    cli.refused(*EVAL, "--plot", "x.pdf", names="x.pdf", advice=r"ends? in .svg or .png")
    (place / "all.json").write_text("[]")
    saved = ("eval", "--results", "all.json", "--ground-truth", "gt.json", "--against", "bundle")
    cli.refused(*saved, names="'bundle' is one", advice="--against FILE.json")
    (place / "bad.json").write_text('{"blue": 3}')
    cli.refused("detect", "bundle", "in", "--class-thresholds", "bad.json", names="bad.json", advice="from 0 to 1")
    cli.refused("detect", "bundle", "in", "--class-thresholds", "none.json", names="none.json", advice="no file|cannot be read")
    (place / "twice.json").write_text('{"blue": 0.1, "blue": 0.9}')
    cli.refused("detect", "bundle", "in", "--class-thresholds", "twice.json", names="twice.json", advice="blue")
    (place / "deep.json").write_text("[" * 100_000)
    cli.refused("detect", "bundle", "in", "--class-thresholds", "deep.json", names="deep.json", advice="nested too deeply")
    (place / "utf16.json").write_bytes('{"blue": 0.9}'.encode("utf-16"))  # as editors on Windows save it
    assert cli("detect", "bundle", "in", "-q", "--class-thresholds", "utf16.json", "--json", "-").code == 0


def test_saved_results_are_read_once_before_the_model_runs(cli, place, truth, monkeypatch):
    done = cli(*EVAL, "--iou-type", "bbox", "--save", "all.json")
    assert done.code == 0, done
    read, reader = [], coco.read_results
    monkeypatch.setattr(coco, "read_results", lambda path: read.append(path.name) or reader(path))
    monkeypatch.setattr(coco, "Detector", lambda *given, **more: read.append("model") or Detector(*given, **more))
    done = cli(*EVAL, "--iou-type", "bbox", "--against", "all.json")
    assert done.code == 0 and read == ["all.json", "model"], (done, read)


def test_saved_results_of_annotations_without_ids_are_noted(cli, place, truth):
    """Ids that another data set has as well give an AP of nothing in particular, which must not pass for one."""
    pytest.importorskip("yaml", reason="needs the 'eval' extra")
    known = json.loads((place / "gt.json").read_text())
    (place / "yolo/labels").mkdir(parents=True)
    shutil.copytree(place / "in", place / "yolo/images")
    (place / "yolo/data.yaml").write_text(f"val: images\nnames: {json.dumps(truth)}\n")
    for image in known["images"]:
        name = image["file_name"].rpartition("/")[2].rpartition(".")[0]
        (place / f"yolo/labels/{name}.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    common = ("--ground-truth", "yolo", "--iou-type", "bbox")
    made = cli("eval", "bundle", *common, "--save", "all.json")
    assert made.code == 0 and "ids" not in made.err, made
    again = cli("eval", "--results", "all.json", *common)
    assert again.code == 0 and "'yolo' has no ids of images, and results" in again.err and "eval --save" in again.err, again
