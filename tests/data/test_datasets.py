"""Data sets in other forms than COCO's: the same objects, the same average precision, and what is wrong by name."""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest
from PIL import Image

from detrt.data.coco import CocoDataset, load_coco
from detrt.data.datasets import is_dataset, load_dataset, size_of
from detrt.data.images import load_image
from detrt.errors import ImageError

pytest.importorskip("yaml", reason="needs the 'eval' extra")
NAMES = ["cat", "dog", "bird"]
BOXES = {"a": [(0, 4, 2, 14, 12), (2, 0, 0, 40, 30)], "b": [(1, 10.5, 7.25, 20, 29)], "c": []}  # class, corners in pixels
SIZE = (40, 30)


def write_images(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in BOXES:
        Image.new("RGB", SIZE).save(folder / f"{name}.png")


@pytest.fixture
def yolo(tmp_path):
    write_images(tmp_path / "images/val")
    (tmp_path / "labels/val").mkdir(parents=True)
    for name, boxes in BOXES.items():
        rows = [(k, (x0 + x1) / 2 / 40, (y0 + y1) / 2 / 30, (x1 - x0) / 40, (y1 - y0) / 30) for k, x0, y0, x1, y1 in boxes]
        if rows:
            (tmp_path / f"labels/val/{name}.txt").write_text("\n".join(" ".join(map(repr, row)) for row in rows))
    (tmp_path / "data.yaml").write_text("path: .\nval: images/val\nnames:\n  0: cat\n  1: dog\n  2: bird\n")
    return tmp_path


@pytest.fixture
def voc(tmp_path):
    write_images(tmp_path / "JPEGImages")
    (tmp_path / "Annotations").mkdir()
    (tmp_path / "ImageSets/Main").mkdir(parents=True)
    (tmp_path / "ImageSets/Main/test.txt").write_text("b 1\n")
    for name, boxes in BOXES.items():
        root = xml.Element("annotation")
        xml.SubElement(root, "filename").text = f"{name}.jpg"  # the file is a PNG
        for k, *corners in boxes:
            one = xml.SubElement(root, "object")
            xml.SubElement(one, "name").text = NAMES[k]
            box = xml.SubElement(one, "bndbox")
            for key, value in zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True):
                xml.SubElement(box, key).text = str(value)
        xml.ElementTree(root).write(tmp_path / "Annotations" / f"{name}.xml")
    return tmp_path


def objects(dataset: CocoDataset) -> dict[str, list[tuple]]:
    """Image -> (class name, corners) of its objects."""
    names = {entry["id"]: entry["name"] for entry in dataset.categories}
    images = {entry["id"]: Path(entry["file_name"]).stem for entry in dataset.images}
    found: dict[str, list[tuple]] = {stem: [] for stem in images.values()}
    for entry in dataset.annotations:
        x, y, w, h = entry["bbox"]
        assert entry["area"] == pytest.approx(w * h)
        found[images[entry["image_id"]]].append((names[entry["category_id"]], *(round(v, 9) for v in (x, y, x + w, y + h))))
    return found


EXPECTED = {stem: [(NAMES[k], *corners) for k, *corners in boxes] for stem, boxes in BOXES.items()}


@pytest.mark.parametrize("name", ["data.yaml", "", ":val"])
def test_yolo(yolo, name):
    dataset = load_dataset(f"{yolo}{name}" if name.startswith(":") else yolo / name)
    assert objects(dataset) == EXPECTED and [entry["name"] for entry in dataset.categories] == NAMES
    assert [path.name for path in dataset.files(dataset.folder)] == ["a.png", "b.png", "c.png"]
    assert dataset.image_id(yolo / "images/val/b.png") == 2 and is_dataset(yolo)


def test_polygons_of_yolo(yolo):
    (yolo / "labels/val/a.txt").write_text("1 0.1 0.1 0.5 0.1 0.5 0.5 0.1 0.5\n")
    entry = next(entry for entry in load_dataset(yolo).annotations if entry["image_id"] == 1)
    assert entry["bbox"] == pytest.approx([4, 3, 16, 12]) and entry["area"] == pytest.approx(16 * 12)
    assert entry["segmentation"] == [pytest.approx([4, 3, 20, 3, 20, 15, 4, 15])]


def test_voc(voc):
    dataset = load_dataset(voc)
    assert objects(dataset) == EXPECTED and [entry["name"] for entry in dataset.categories] == sorted(NAMES)
    assert [path.name for path in dataset.files(dataset.folder)] == ["a.png", "b.png", "c.png"]
    assert objects(load_dataset(f"{voc}:test")) == {"b": EXPECTED["b"]}
    file = voc / "Annotations/b.xml"
    file.write_text(file.read_text().replace("<bndbox>", "<difficult>1</difficult><bndbox>"))
    assert [entry["iscrowd"] for entry in load_dataset(voc).annotations] == [0, 0, 1]


def test_coco_in_a_folder(tmp_path):
    write_images(tmp_path / "train")
    images = [{"id": 1, "file_name": "a.png"}]
    boxes = [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4]}]
    file = tmp_path / "train/_annotations.coco.json"
    file.write_text(json.dumps({"images": images, "categories": [{"id": 1, "name": "cat"}], "annotations": boxes}))
    dataset = load_dataset(tmp_path / "train")
    assert dataset.annotations == load_coco(file).annotations and dataset.folder == tmp_path / "train"


def coco_text(prefix: str = "") -> str:
    """The objects in COCO's form; tools write folders of their own before the names of files, and null for what they do not know."""
    images = [{"id": i, "file_name": f"{prefix}{name}.png", "width": 40, "height": 30} for i, name in enumerate(BOXES)]
    boxes = [(i, *box) for i, boxes in enumerate(BOXES.values()) for box in boxes]
    rows = [
        {"id": n, "image_id": i, "category_id": k, "bbox": [x0, y0, x1 - x0, y1 - y0], "area": None, "iscrowd": None}
        for n, (i, k, x0, y0, x1, y1) in enumerate(boxes)
    ]
    categories = [{"id": i, "name": name} for i, name in enumerate(NAMES)]
    return json.dumps({"images": images, "categories": categories, "annotations": rows})


@pytest.mark.parametrize(
    ("images", "file", "prefix", "given"),
    [
        ("valid", "valid/_annotations.coco.json", "", ""),  # Roboflow
        ("test", "test/_annotations.coco.json", "", ":test"),
        ("images/default", "annotations/instances_default.json", "", ""),  # CVAT
        ("val2017", "annotations/instances_val2017.json", "", ""),  # COCO
        ("images", "result.json", "images/", ""),  # Label Studio
        ("images", "result.json", "images\\", ""),
        ("images", "result.json", "/data/upload/1/", ""),
        ("images", "result.json", "/data/local-files/?d=photos/images/", ""),
    ],
)
def test_folders_of_coco_as_tools_write_them(images, file, prefix, given, tmp_path):
    write_images(tmp_path / images)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(coco_text(prefix))
    if "2017" in file:
        (tmp_path / "annotations/instances_train2017.json").write_text(coco_text("other/"))
    dataset = load_dataset(f"{tmp_path}{given}")
    assert sorted(path.name for path in dataset.files(dataset.folder)) == ["a.png", "b.png", "c.png"]
    assert is_dataset(Path(f"{tmp_path}{given}")) and not is_dataset(tmp_path / images)
    assert [entry["bbox"] for entry in dataset.annotations] == [
        [x0, y0, x1 - x0, y1 - y0] for boxes in BOXES.values() for _, x0, y0, x1, y1 in boxes
    ]
    assert all((entry["area"], entry["iscrowd"]) == (math.prod(entry["bbox"][2:]), 0) for entry in dataset.annotations)


def test_missing_images_of_a_coco_file_are_named(tmp_path):
    write_images(tmp_path / "images")
    (tmp_path / "result.json").write_text(coco_text())
    (tmp_path / "images/b.png").unlink()
    with pytest.raises(
        ImageError, match=r"1 of the 3 images of .* are not in '.*images', where the others are, e\.g\. b\.png; put"
    ):
        load_dataset(tmp_path)
    shutil.rmtree(tmp_path / "images")
    with pytest.raises(ImageError, match="the 3 images of .* are in none of"):
        load_dataset(tmp_path)


def test_one_file_is_not_that_of_two_images(tmp_path):
    """Nor is a file taken that lies outside of the folder."""
    write_images(tmp_path / "photos")
    data = json.loads(coco_text())
    data["images"][0]["file_name"], data["images"][1]["file_name"] = "morning/a.png", "evening/a.png"
    (tmp_path / "result.json").write_text(json.dumps(data))
    with pytest.raises(ImageError, match="2 of 3 annotated images are not in"):
        load_coco(tmp_path / "result.json").files(tmp_path / "photos")
    Image.new("RGB", SIZE).save(tmp_path / "secret.png")
    data["images"][0]["file_name"], data["images"][1]["file_name"] = "b.png", "x/../../secret.png"
    (tmp_path / "result.json").write_text(json.dumps(data))
    with pytest.raises(ImageError, match="1 of 3 annotated images are not in"):
        load_coco(tmp_path / "result.json").files(tmp_path / "photos")


def test_yolo_as_tools_write_it(yolo):
    known = objects(load_dataset(yolo))
    label = yolo / "labels/val/a.txt"
    label.write_text(
        "".join(f"{float(line.split()[0])} {line.split(maxsplit=1)[1]}\r\n" for line in label.read_text().splitlines())
    )
    (yolo / "data.yaml").rename(yolo / "data.yml")
    (yolo / "data.yml").write_text(
        "val: val.txt\nnames: {'0': cat, '1': dog, '2': bird}\n"
    )  # CVAT: the folder's own name comes first
    (yolo / "val.txt").write_text("".join(f"data/images/val/{name}.png\n" for name in [*BOXES, "a"]))
    assert objects(load_dataset(yolo)) == known and is_dataset(yolo)
    (yolo / "data.yml").unlink()
    (yolo / "classes.txt").write_text("cat\ndog\nbird\n")  # Label Studio
    assert objects(load_dataset(yolo)) == known and is_dataset(yolo)
    label.write_text("0.5 0.5 0.5 0.1 0.1\n")
    with pytest.raises(ImageError, match=r"a class is an integer; got '0.5'"):
        load_dataset(yolo)


def test_darknet_as_cvat_writes_it(yolo):
    """YOLO 1.1: labels beside the images, and paths that begin with a folder which is not there."""
    known = objects(load_dataset(yolo))
    (yolo / "images/val").rename(yolo / "obj_train_data")
    for label in (yolo / "labels/val").iterdir():
        label.rename(yolo / "obj_train_data" / label.name)
    shutil.rmtree(yolo / "labels")
    (yolo / "data.yaml").unlink()
    (yolo / "obj.names").write_text("cat\ndog\nbird\n")
    (yolo / "train.txt").write_text("".join(f"data/obj_train_data/{name}.png\n" for name in BOXES))
    (yolo / "obj.data").write_text("classes = 3\ntrain = data/train.txt\nnames = data/obj.names\nbackup = backup/\n")
    for path in (yolo, yolo / "obj.data"):
        assert objects(load_dataset(path)) == known and is_dataset(path)
    assert objects(load_dataset(f"{yolo}:train")) == known
    with pytest.raises(ImageError, match="names no images as val"):
        load_dataset(f"{yolo}:val")
    (yolo / "obj.data").write_text("train = train.txt\n")
    with pytest.raises(ImageError, match="no `names`"):
        load_dataset(yolo)


@pytest.mark.parametrize("shape", ["[2, 2]", "[2, 3]"])
def test_points_of_poses_are_no_polygon(yolo, shape):
    known = objects(load_dataset(yolo))
    point = " 0.9 0.9" + " 2" * (shape == "[2, 3]")
    for label in (yolo / "labels/val").iterdir():
        label.write_text("".join(f"{line}{point * 2}\n" for line in label.read_text().splitlines()))
    with (yolo / "data.yaml").open("a") as file:
        file.write(f"kpt_shape: {shape}\n")
    assert objects(load_dataset(yolo)) == known


def test_labels_beside_images_below_a_folder_of_that_name(yolo):
    known = objects(load_dataset(yolo))
    for label in (yolo / "labels/val").iterdir():
        label.rename(yolo / "images/val" / label.name)
    assert objects(load_dataset(yolo)) == known


def test_files_that_a_mac_leaves_are_no_images(yolo, voc):
    known = objects(load_dataset(yolo / "data.yaml"))
    (yolo / "images/val/._a.png").write_bytes(b"\0\5\x16\7")
    (voc / "Annotations/._a.xml").write_bytes(b"\0\5\x16\7")
    assert objects(load_dataset(yolo / "data.yaml")) == known
    (yolo / "data.yaml").unlink()
    assert objects(load_dataset(voc)) == known


def test_a_data_set_without_objects_is_refused(yolo, voc):
    """It would be an average precision of nothing; images alone are taken where labels are not needed."""
    shutil.rmtree(yolo / "labels")
    with pytest.raises(ImageError, match=r"have no object; that of '.*images/val/a.png' would be '.*labels/val/a.txt'"):
        load_dataset(yolo / "data.yaml")
    assert len(load_dataset(yolo / "data.yaml", annotations=False).images) == 3
    (yolo / "data.yaml").unlink()
    for file in (voc / "Annotations").iterdir():
        file.write_text(f"<annotation><filename>{file.stem}.png</filename></annotation>")
    with pytest.raises(ImageError, match="none of the 3 XML files"):
        load_dataset(voc)


def test_voc_in_parts_as_roboflow_writes_it(voc):
    known = objects(load_dataset(voc))
    for part, name in (("valid", "a"), ("test", "b"), ("train", "c")):
        (voc / part).mkdir()
        (voc / f"Annotations/{name}.xml").rename(voc / part / f"{name}.xml")
        (voc / f"JPEGImages/{name}.png").rename(voc / part / f"{name}.png")
    (voc / "Annotations").rmdir()
    for part, name in (("", "a"), (":val", "a"), (":test", "b")):
        dataset = load_dataset(f"{voc}{part}")
        assert objects(dataset) == {name: known[name]} and dataset.files(dataset.folder)
    assert is_dataset(voc)


def test_lists_of_voc(voc):
    known = objects(load_dataset(voc))
    (voc / "Annotations/b.xml").rename(voc / "Annotations/my b.xml")
    (voc / "JPEGImages/b.png").rename(voc / "JPEGImages/my b.png")
    file = voc / "Annotations/a.xml"
    file.write_text(file.read_text().replace("</filename>", "</filename><size><width>40.0</width><height>30.0</height></size>"))
    (voc / "ImageSets/Main/test.txt").write_text("a  1\nmy b\na -1\n")
    assert objects(load_dataset(f"{voc}:test")) == {"a": known["a"], "my b": known["b"]}


def test_voc_in_folders_of_folders(voc):
    known = objects(load_dataset(voc))
    for folder, suffix in (("Annotations", "xml"), ("JPEGImages", "png")):
        (voc / folder / "day").mkdir()
        (voc / folder / f"b.{suffix}").rename(voc / folder / "day" / f"b.{suffix}")
    path = voc / "Annotations/day/b.xml"
    path.write_text(path.read_text().replace("<filename>b.jpg", "<filename>day/b.png"))
    found = objects(load_dataset(voc))
    assert {Path(name).name: boxes for name, boxes in found.items()} == {Path(name).name: boxes for name, boxes in known.items()}


def test_a_turned_image_has_the_size_that_is_shown(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", SIZE).save(tmp_path / "a.jpg", exif=exif)
    assert size_of(tmp_path / "a.jpg") == (40, 30)
    Image.new("RGB", SIZE).save(tmp_path / "a.jpg", exif=b"Exif\0\0II*\0\xff\xff\xff\xff broken")
    assert size_of(tmp_path / "a.jpg") == load_image(tmp_path / "a.jpg").shape[:2] == (30, 40)


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("data.yaml", "val: images/val\n", "no `names`"),
        ("data.yaml", "names: [cat]\n", "names no images"),
        ("data.yaml", "val: images/val\nnames: []\n", "no `names`"),
        ("data.yaml", "names: [cat]\nval: nowhere\ntest: images/val\n", "choose another part: '.*data.yaml:test'"),
        (
            "data.yaml",
            "a: &a [x,x,x,x,x,x,x,x,x]\n"
            + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in itertools.pairwise("abcdefghi"))
            + "val: images/val\nnames: *i\n",
            "has a million values or more",
        ),
        ("data.yaml", "names: [cat]\nval: nowhere\n", "there is no .*nowhere"),
        ("data.yaml", "names: [cat\n", "not YAML"),
        ("data.yaml", "- 1\n", "no settings"),
        ("labels/val/a.txt", "0 0.5 0.5\n", r"a.txt', line 1: a label is"),
        ("labels/val/a.txt", "\n7 0.5 0.5 0.1 0.1\n", "line 2: class 7 has no name"),
        ("labels/val/a.txt", "cat 0.5 0.5 0.1 0.1\n", "no number"),
        ("labels/val/a.txt", "0 nan 0.5 0.1 0.1\n", "a label is"),
        ("labels/val/a.txt", "0 40 30 10 10\n", "line 1: '0 40 30 10 10' is outside of the image"),
        ("labels/val/a.txt", "0 0.5 0.5 -0.1 0.1\n", "outside of the image"),
        ("labels/val/a.txt", "0 0.1 0.1 0.5 0.1 0.5 1.2\n", "outside of the image"),
        ("labels/val/a.txt", "0 -0.2 0.5 0.1 0.1\n", "outside of the image"),
        ("data.yaml", "val: images/val\nnames: [cat, null]\n", "the name of class 1 is None"),
        ("data.yaml", "val: images/val\nnames: [[cat], dog]\n", "the name of class 0 is"),
        ("data.yaml", "val: images/val\nnames: [cat]\nnames: [dog]\n", "not YAML: it has the key 'names' twice"),
        ("images/val/a.png", "x", "cannot be read as an image"),
    ],
)
def test_what_is_wrong_in_yolo_is_named(yolo, file, text, words):
    (yolo / file).write_text(text)
    with pytest.raises(ImageError, match=words):
        load_dataset(yolo / "data.yaml")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "<a",
        "<annotation><filename>a.jpg</filename><object><name>x</name></object></annotation>",
        "<annotation/>",
        '<?xml version="1.0" encoding="nothing"?><annotation/>',
        "<annotation><filename>a.jpg</filename><size><width>1e400</width><height>9</height></size></annotation>",
    ],
)
def test_what_is_wrong_in_voc_is_named(voc, text):
    (voc / "Annotations/a.xml").write_text(text)
    with pytest.raises(ImageError, match=r"a.xml' is not an annotation file"):
        load_dataset(voc)


def test_labels_of_yolo_in_another_encoding(yolo):
    plain = load_dataset(yolo / "data.yaml").annotations
    label = yolo / "labels/val/a.txt"
    label.write_bytes(label.read_text().encode("utf-16"))
    assert load_dataset(yolo / "data.yaml").annotations == plain
    label.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ImageError, match=r"a.txt' is not UTF"):
        load_dataset(yolo / "data.yaml")


def test_boxes_of_yolo_may_stand_out_by_a_rounding_and_scores_are_no_sides(yolo):
    (yolo / "labels/val/a.txt").write_text("0 0.5 0.5 1.004 1.0 0.9\n")
    assert load_dataset(yolo / "data.yaml").annotations[0]["bbox"][2] == pytest.approx(1.004 * 40)


@pytest.mark.parametrize(("text", "crowd"), [("1", 1), ("true", 1), (" 0 ", 0), ("Unspecified", 0), ("yes", None)])
def test_what_is_difficult_in_voc(voc, text, crowd):
    file = next((voc / "Annotations").glob("*.xml"))
    file.write_text(file.read_text().replace("<bndbox>", f"<difficult>{text}</difficult><bndbox>"))
    if crowd is None:
        with pytest.raises(ImageError, match="<difficult> is 'yes', not 0 or 1"):
            load_dataset(voc)
    else:
        assert crowd in {row["iscrowd"] for row in load_dataset(voc).annotations}


def test_what_is_no_data_set(tmp_path):
    with pytest.raises(ImageError, match="no data set that is known"):
        load_dataset(tmp_path)
    with pytest.raises(ImageError, match="no annotation file"):
        load_dataset(tmp_path / "x.yaml")
    with pytest.raises(ImageError, match="leave :val out"):
        (tmp_path / "Annotations").mkdir()
        load_dataset(f"{tmp_path}:val")


@pytest.fixture(scope="module")
def bccd():
    folder = Path(__file__).resolve().parents[3] / "shared/data/images/bccd"
    if not folder.is_dir():
        pytest.skip(f"the images are not on this machine ('{folder}')")
    return folder


@pytest.mark.parametrize("form", ["yolo", "voc"])
def test_average_precision_of_all_forms_is_equal(bccd, form, tmp_path):
    """Of detections near the objects of BCCD, so that many IoUs lie about the thresholds."""
    pytest.importorskip("pycocotools", reason="needs the 'eval' extra")
    from detrt.evaluation.coco import score_rows

    coco = load_coco(bccd / "coco_annotations/instances_test.json")
    if form == "voc":
        other = load_dataset(f"{bccd / 'BCCD'}:test")
    else:
        (tmp_path / "images").symlink_to(bccd / "BCCD/JPEGImages")
        (tmp_path / "labels").mkdir()
        for image in coco.images:
            lines = []
            for entry in coco.annotations:
                if entry["image_id"] == image["id"]:
                    x, y, w, h = entry["bbox"]
                    width, height = image["width"], image["height"]
                    row = (entry["category_id"], (x + w / 2) / width, (y + h / 2) / height, w / width, h / height)
                    lines.append(" ".join(map(repr, row)))
            (tmp_path / "labels" / image["file_name"]).with_suffix(".txt").write_text("\n".join(lines))
        (tmp_path / "list.txt").write_text("\n".join(f"images/{image['file_name']}" for image in coco.images))
        names = "".join(f"  {entry['id']}: {entry['name']}\n" for entry in coco.categories)
        (tmp_path / "data.yaml").write_text(f"test: list.txt\nnames:\n{names}")
        other = load_dataset(tmp_path)
    assert len(other.images) == len(coco.images) and len(other.annotations) == len(coco.annotations)
    rng = random.Random(1)
    theirs = {entry["name"]: entry["id"] for entry in other.categories}
    names = {entry["id"]: entry["name"] for entry in coco.categories}
    image_ids = {entry["id"]: other.image_id(entry["file_name"]) for entry in coco.images}
    rows, same = [], []
    for entry in coco.annotations:
        for _ in range(2):
            bbox = [v + rng.uniform(-12, 12) for v in entry["bbox"]]
            row = {"image_id": entry["image_id"], "category_id": entry["category_id"], "bbox": bbox, "score": rng.random()}
            rows.append(row)
            same.append({**row, "image_id": image_ids[row["image_id"]], "category_id": theirs[names[row["category_id"]]]})
    (metrics, per_class), (metrics2, per_class2) = score_rows(coco, rows), score_rows(other, same)
    assert 0.1 < metrics["AP"] < 0.9
    assert metrics2 == pytest.approx(metrics, abs=1e-9) and per_class2 == pytest.approx(per_class, abs=1e-9)
