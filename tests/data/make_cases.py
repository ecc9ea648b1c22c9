"""Write decode_cases.json, preprocess_cases.json and prompt_cases.json from the reference implementation.

    python tests/data/make_cases.py

A runtime in another language reads these files; run this again only when a rule changes on purpose.
Minus infinity in logits is written as null. `atol` is what another resize may differ by: Pillow
resizes uint8 with fixed-point weights, so one level is allowed there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from detrt.data.postprocess import decode
from detrt.data.preprocess import preprocess
from detrt.spec import DETECTION, INSTANCE_SEGMENTATION, DecodeSpec, InputSpec, ModelSpec

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "support"))
LABELS = {0: "cat", 1: "dog", 2: "bird"}
PLAIN = DecodeSpec("sigmoid", "topk", 4, 3, 4)


def main() -> None:
    write("decode_cases.json", decode_cases())
    write("preprocess_cases.json", preprocess_cases())
    write("prompt_cases.json", prompt_cases())


def write(name: str, cases: list[dict]) -> None:
    text = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    (HERE / name).write_text(f'{{"schema": 1, "cases": [\n{text}\n]}}\n', "utf-8")


def decode_cases() -> list[dict]:
    rng = np.random.default_rng(7)
    stretch = InputSpec("stretch", 32, 32)
    cases = []
    for activation in ("sigmoid", "softmax"):
        for select in ("topk", "query"):
            rule = DecodeSpec(activation, select, 6, 3, 5)
            columns = 3 + (activation == "softmax")
            logits = rng.normal(0, 2, (2, 6, columns)).astype(np.float32)
            logits[1, 3] = logits[1, 1]  # ties
            logits[1, 0] = -np.inf
            boxes = rng.uniform(0, 1, (2, 6, 4)).astype(np.float32)
            for extra in ({"threshold": 0.3}, {"threshold": 0.0, "class_ids": [2, 0], "max_detections": 3}):
                outputs = {"logits": logits, "pred_boxes": boxes}
                cases.append(decode_case(f"{activation}-{select}", rule, stretch, outputs, extra))
    rule = DecodeSpec("sigmoid", "topk", 6, 3, 5, in_graph=True)
    scores = np.array([[0.9, 0.8, 0.5, 0.2, 0.1], [0.7, 0.6, 0, 0, 0]], np.float32)
    outputs = {
        "boxes": rng.uniform(-5, 60, (2, 5, 4)).astype(np.float32),
        "scores": scores,
        "labels": rng.integers(0, 3, (2, 5)),
        "num_detections": np.array([5, 1]),
    }
    cases.append(decode_case("in-graph", rule, stretch, outputs, {"threshold": 0.15}))
    return cases + suppress_cases() + mask_cases()


def mask_cases() -> list[dict]:
    """Maps smaller and larger than the images, one empty and one full."""
    rng = np.random.default_rng(13)
    cases = []
    for name, stride, in_graph in (("masks", 4, False), ("masks-in-graph", 4, True), ("masks-shrunk", 1, False)):
        rule = DecodeSpec("sigmoid", "topk", 6, 3, 5, in_graph=in_graph, mask_stride=stride)
        count, side = 5 if in_graph else 6, 32 // stride
        maps = rng.normal(0, 1, (2, count, side, side)).round(3).astype(np.float32)  # as they are stored
        maps[0, 1], maps[0, 2] = -1, 1
        outputs = {
            "logits": rng.normal(0, 2, (2, 6, 3)).astype(np.float32),
            "pred_boxes": rng.uniform(0, 1, (2, 6, 4)).astype(np.float32),
        }
        if in_graph:
            outputs = {
                "boxes": rng.uniform(0, 30, (2, 5, 4)).astype(np.float32),
                "scores": np.sort(rng.uniform(0.2, 1, (2, 5)).astype(np.float32))[:, ::-1],
                "labels": rng.integers(0, 3, (2, 5)),
                "num_detections": np.array([5, 3]),
            }
        cases.append(decode_case(name, rule, InputSpec("stretch", 32, 32), {**outputs, "mask_logits": maps}, {"threshold": 0.1}))
    return cases


def suppress_cases() -> list[dict]:
    """Boxes of two classes in two heaps, so that some suppress others and a few have equal scores."""
    rng = np.random.default_rng(11)
    cases = []
    for nms, limit in (("nms", 0.5), ("soft_nms", 0.3)):
        rule = DecodeSpec("sigmoid", "topk", 24, 3, 12, nms=nms, nms_iou=limit, nms_min_score=0.05)
        logits = rng.normal(-1, 2, (2, 24, 3)).astype(np.float32)
        logits[:, 5] = logits[:, 4]
        boxes = np.empty((2, 24, 4), np.float32)
        boxes[..., :2] = rng.choice([0.3, 0.7], (2, 24, 1)) + rng.uniform(-0.06, 0.06, (2, 24, 2))
        boxes[..., 2:] = rng.uniform(0.3, 0.5, (2, 24, 2))
        boxes[:, 7] = boxes[:, 6]
        outputs = {"logits": logits, "pred_boxes": boxes}
        for extra in ({"threshold": 0.1}, {"threshold": 0.0, "class_ids": [1], "max_detections": 4}):
            cases.append(decode_case(nms, rule, InputSpec("stretch", 32, 32), outputs, extra))
    return cases


def decode_case(name: str, rule: DecodeSpec, given: InputSpec, outputs: dict, options: dict) -> dict:
    spec = ModelSpec("test", given, rule, LABELS, task=INSTANCE_SEGMENTATION if rule.mask_stride else DETECTION)
    sizes = [(48, 64), (31, 17)]
    found = decode(outputs, spec, sizes, **options)
    return {
        "name": f"{name}-{options['threshold']}",
        "spec": spec.to_dict(),
        "original_sizes_hw": sizes,
        "threshold": options["threshold"],
        "class_ids": options.get("class_ids"),
        "max_detections": options.get("max_detections"),
        "outputs": {key: tensor(value) for key, value in outputs.items()},
        "detections": [
            {
                "boxes_xyxy": [[round(float(v), 4) for v in box] for box in d.boxes_xyxy],
                "scores": [round(float(s), 6) for s in d.scores],
                "class_ids": d.class_ids.tolist(),
                "labels": list(d.labels),
                **({} if d.masks is None else {"masks": [mask["counts"] for mask in d.masks.to_coco()]}),
            }
            for d in found
        ],
    }


def preprocess_cases() -> list[dict]:
    edge = {"shortest_edge": 8, "longest_edge": 13, "dynamic": True}
    own = {
        "dtype": "float32",
        "normalize_in_graph": False,
        "mean": (0.485, 0.456, 0.406),
        "std": (0.229, 0.224, 0.225),
    }
    masked = InputSpec("shortest_edge", 8, 12, mask=True, multiple_of=4, **edge)
    return [
        preprocess_case("stretch", InputSpec("stretch", 4, 6), [(9, 7)]),
        preprocess_case("stretch-bicubic", InputSpec("stretch", 4, 6, resample="bicubic"), [(9, 7)]),
        preprocess_case("stretch-same-size", InputSpec("stretch", 4, 6), [(4, 6)]),
        preprocess_case("stretch-larger", InputSpec("stretch", 7, 8), [(3, 3)]),
        preprocess_case("stretch-normalised", InputSpec("stretch", 4, 6, **own), [(9, 7)]),
        preprocess_case("shortest-edge-mask", masked, [(6, 9), (10, 5)]),
        preprocess_case(
            "shortest-edge-normalised",
            InputSpec("shortest_edge", 8, 12, mask=True, **edge, **own),
            [(6, 9), (10, 5)],
        ),
        preprocess_case("shortest-edge-no-mask", InputSpec("shortest_edge", 8, 12, multiple_of=4, **edge), [(6, 9)]),
        preprocess_case("shortest-edge-thin", masked, [(1, 40)]),
        preprocess_case("shortest-edge-other-size", masked, [(6, 9)], size_hw=(8, 8)),
        preprocess_case("fit", InputSpec("fit", 6, 6, mask=True), [(9, 7), (3, 8)]),
        preprocess_case(
            "max-size-mask", InputSpec("max_size", 8, 12, max_height=8, max_width=11, mask=True, dynamic=True), [(9, 7), (3, 8)]
        ),
        preprocess_case("max-size-padded", InputSpec("max_size", 12, 12, max_height=8, max_width=11, pad=True), [(9, 7), (3, 8)]),
        preprocess_case(
            "shortest-edge-padded", InputSpec("shortest_edge", 16, 16, mask=True, pad=True, **edge), [(6, 9), (10, 5)]
        ),
        # Images of a usual size ratio, from a formula: what a resize does to slopes, steps and overshoot.
        *(
            preprocess_case(f"gradient-{name}", InputSpec("stretch", *size, resample=name), [(97, 131)], gradient=(5, 3, 80))
            for name, size in (
                ("bilinear", (23, 31)),
                ("bicubic", (23, 31)),
                ("lanczos", (31, 23)),
                ("box", (19, 29)),
                ("hamming", (19, 29)),
                ("nearest", (41, 37)),
            )
        ),
        preprocess_case("gradient-larger", InputSpec("stretch", 40, 61, resample="bicubic"), [(17, 23)], gradient=(90, 7, 40)),
        preprocess_case("gradient-one-side", InputSpec("stretch", 20, 131), [(97, 131)], gradient=(1, 200, 3)),
        preprocess_case("gradient-other-side", InputSpec("stretch", 97, 9), [(97, 131)], gradient=(1, 2, 3)),
    ]


def preprocess_case(
    name: str,
    given: InputSpec,
    sizes: list,
    size_hw: tuple[int, int] | None = None,
    gradient: tuple[int, int, int] | None = None,
) -> dict:
    rng = np.random.default_rng(len(name))
    spec = ModelSpec("test", given, PLAIN, LABELS)
    if gradient is None:
        images = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
        stored = [{"shape": list(i.shape), "pixels": i.reshape(-1).tolist()} for i in images]
    else:
        stored = [{"shape": [*size, 3], "gradient": list(gradient)} for size in sizes]
        from case_images import image_of

        images = [image_of(row) for row in stored]
    batch = preprocess(images, spec, size_hw=size_hw)
    feeds = {}
    for key, value in batch.feeds.items():
        pixels = key == "pixel_values"
        level = 1 if given.normalize_in_graph else given.rescale / min(given.std)
        feeds[key] = {
            "dtype": value.dtype.name,
            **tensor(value),
            "atol": round(level * 1.01, 6) if pixels else 0,
        }
    return {
        "name": name,
        "spec": spec.to_dict(),
        "size_hw": size_hw,
        "images": stored,
        "resized_sizes_hw": batch.resized_sizes_hw,
        "feeds": feeds,
    }


def prompt_cases() -> list[dict]:
    """Prompts as `detrt encode-prompt` writes them, with outputs of a model and what becomes of them."""
    listed = ["red", "green square", "blue", "striped star"]
    return [
        prompt_case("prompt", "tokens", "a red circle. the blue disk."),
        prompt_case("prompt-of-one-graph", "tokens", "red. green. blue", text={"encoder": ""}),
        prompt_case("list-in-parts", "tokens", listed, text={"max_tokens": 6}),
        prompt_case("prompt-in-graph", "tokens", "a red circle. the blue disk.", decode={"in_graph": True}),
        prompt_case("list-in-graph-in-parts", "tokens", listed, text={"max_tokens": 6}, decode={"in_graph": True}),
        prompt_case("classes", "classes", ["red", "", "blue"]),
    ]


def prompt_case(name: str, kind: str, prompt: str | list[str], *, text: dict | None = None, decode: dict | None = None) -> dict:
    import text_cases

    from detrt.backends.prompt_file import to_json
    from detrt.bundle import Bundle, BundleFile, Provenance
    from detrt.detector import Detector

    spec = text_cases.model_spec(kind, decode=decode, text=text_cases.text_spec(kind, **(text or {})))
    files = [BundleFile("tokenizer", "tokenizer.json", "12" * 32, 1), BundleFile("text", "text.onnx", "34" * 32, 1)]
    files = files if spec.text.encoder else files[:1]
    rng = np.random.default_rng(len(name))
    images = [rng.integers(0, 256, (10, 12, 3), dtype=np.uint8), rng.integers(0, 256, (16, 9, 3), dtype=np.uint8)]
    images[0][:, :4, 1:] //= 8  # reddish on the left
    images[1][:, 6:, :2] //= 8  # bluish on the right
    session = text_cases.make_prompted(kind, spec=spec)
    asked = session.encode(prompt)
    runs: list[dict] = []
    original = session.detector.run

    def recording(feeds: dict, force: dict | None = None) -> dict:
        runs.append(original(feeds, force))
        return runs[-1]

    session.detector.run = recording  # type: ignore[method-assign]
    with Detector(session, threshold=0.3, batch_size=2, prompt=prompt) as detector:
        found = detector(images)
    return {
        "name": name,
        "spec": spec.to_dict(),
        "files": [{"kind": f.kind, "path": f.path, "sha256": f.sha256, "size": f.size} for f in files],
        "prompt": to_json(session, asked, Bundle(HERE, spec, Provenance("test"), tuple(files))),
        "outputs": [{key: tensor(value) for key, value in run.items()} for run in runs],
        "original_sizes_hw": [list(image.shape[:2]) for image in images],
        "threshold": 0.3,
        "named": found[0].prompt,
        "detections": [d.to_list() for d in found],
    }


def tensor(value: np.ndarray) -> dict:
    flat = value.reshape(-1).tolist()
    if value.dtype.kind == "f":
        flat = [None if v == -np.inf else round(v, 6) for v in flat]
    return {"shape": list(value.shape), "values": flat}


if __name__ == "__main__":
    main()
