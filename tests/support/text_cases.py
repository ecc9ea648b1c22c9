"""A small model that takes a prompt, as functions on arrays: a tokenizer, a text encoder and a detector.

A query of the detector sees one colour, the mean of a third of the image, and is as sure of a token as the token's
feature is like the feature of that colour's name. So what is found follows from the image and the prompt alone.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from detrt.backends.base import FakeSession
from detrt.backends.prompted import PromptedSession
from detrt.spec import DecodeSpec, InputSpec, ModelSpec, TensorInfo, TextSpec
from detrt.text.tokenizer import PromptTokenizer

SEPARATORS = (101, 102, 1012, 1029)
_WORDS = "a cat dog remote control red green blue square circle striped star of the 3 inch disk , - 猫 ##s"
WORDS = _WORDS.split()
WIDTH = 16
COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1)}


def tokenizer_json(extra: list[str] = ()) -> bytes:
    """WordPiece with the ids that BERT has for what frames and separates."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    names = {0: "[PAD]", 100: "[UNK]", 101: "[CLS]", 102: "[SEP]", 103: "[MASK]", 1012: ".", 1029: "?"}
    names |= {2000 + i: word for i, word in enumerate([*WORDS, *extra])}
    vocabulary = {names.get(i, f"[unused{i}]"): i for i in range(max(names) + 1)}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 101), ("[SEP]", 102)])
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    return made.to_str().encode()


def word_id(word: str) -> int:
    return 2000 + WORDS.index(word)


def text_spec(kind: str = "tokens", **changes) -> TextSpec:
    given = {"max_tokens": 256, "features": WIDTH, "separators": SEPARATORS, **changes}
    return TextSpec(kind, **given)


def model_spec(kind: str = "tokens", *, decode=None, text=None, **changes) -> ModelSpec:
    given = {"resize": "stretch", "height": 8, "width": 12, **changes}
    select = "query" if kind == "tokens" else "topk"
    rule = {"activation": "sigmoid", "select": select, "num_queries": 3, "num_classes": 256, "max_detections": 3}
    return ModelSpec("test-text", InputSpec(**given), DecodeSpec(**{**rule, **(decode or {})}), {}, text=text or text_spec(kind))


def embedding(ids: np.ndarray) -> np.ndarray:
    """(..., ) token ids -> (..., WIDTH) unit vectors, the same for equal ids; colours are like nothing else."""
    flat = [np.random.default_rng(int(i)).standard_normal(WIDTH) for i in np.ravel(ids)]
    rows = np.array(flat).reshape(-1, WIDTH)
    rows[:, : len(COLOURS)] = 0
    for axis, name in enumerate(COLOURS):
        rows[np.ravel(ids) == word_id(name)] = np.eye(WIDTH)[axis]
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).reshape(*np.shape(ids), WIDTH).astype(np.float32)


def run_text_encoder(feeds) -> dict[str, np.ndarray]:
    """Features of the tokens; masks of sub-sentences by the loop of the published code."""
    ids, mask = feeds["input_ids"], feeds["attention_mask"]
    features = embedding(ids)
    n, length = ids.shape
    self_mask = np.tile(np.eye(length, dtype=np.int64), (n, 1, 1))
    positions = np.zeros((n, length), np.int64)
    for row in range(n):
        before = 0
        for column in np.flatnonzero(np.isin(ids[row], SEPARATORS)):
            if 0 < column < length - 1:
                self_mask[row, before + 1 : column + 1, before + 1 : column + 1] = 1
                positions[row, before + 1 : column + 1] = np.arange(column - before)
            before = column
    words = mask * ~np.isin(ids, SEPARATORS)
    pooled = (features * words[..., None]).sum(1) / np.maximum(words.sum(1), 1)[:, None]
    return {
        "text_features": features,
        "text_self_mask": self_mask,
        "text_position_ids": positions,
        "class_features": pooled.astype(np.float32),
    }


def seen(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n, 3, h, w) -> features (n, 3 queries, WIDTH) of the colours of the thirds, and boxes (n, 3, 4) cxcywh."""
    n, _, _, width = pixels.shape
    features = np.zeros((n, 3, WIDTH), np.float32)
    for q in range(3):
        third = pixels[:, :, :, q * width // 3 : (q + 1) * width // 3].astype(np.float32).mean((2, 3)) / 255
        features[:, q] = third @ embedding(np.array([word_id(name) for name in COLOURS]))
    boxes = np.array([[(q + 0.5) / 3, 0.5, 1 / 3, 1.0] for q in range(3)], np.float32)
    return features, np.tile(boxes, (n, 1, 1))


def token_logits(features: np.ndarray, text: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Similarity 1 is a score of 0.98, none at all 0.12; padding -1e4."""
    logits = features @ text.transpose(0, 2, 1) * 6 - 2
    return np.where(mask[:, None] > 0, logits, -1e4).astype(np.float32)


def run_detector(feeds) -> dict[str, np.ndarray]:
    features, boxes = seen(feeds["pixel_values"])
    text = feeds["text_features"] if "text_features" in feeds else embedding(feeds["input_ids"])
    return {"logits": token_logits(features, text, feeds["attention_mask"]), "pred_boxes": boxes}


def run_decoding_detector(feeds) -> dict[str, np.ndarray]:
    """`run_detector` with the decoding of `decode.in_graph`: each query its best phrase."""
    raw = run_detector(feeds)
    member = feeds["phrase_mask"].astype(bool)
    scores = 1 / (1 + np.exp(-np.maximum(raw["logits"].astype(np.float64), -700)))
    by_phrase = np.where(member[:, None], scores[:, :, None], 0).max(-1)
    best = by_phrase.max(-1)
    order = np.argsort(-best, kind="stable")
    cx, cy, w, h = (np.take_along_axis(raw["pred_boxes"][..., k], order, 1) for k in range(4))
    height, width = feeds["target_sizes"][:, :1], feeds["target_sizes"][:, 1:]
    corners = np.stack([(cx - w / 2) * width, (cy - h / 2) * height, (cx + w / 2) * width, (cy + h / 2) * height], -1)
    return {
        "boxes": corners.astype(np.float32),
        "scores": np.take_along_axis(best, order, 1).astype(np.float32),
        "labels": np.take_along_axis(by_phrase.argmax(-1), order, 1),
        "num_detections": np.full(len(order), 3, np.int64),
    }


def run_class_detector(feeds) -> dict[str, np.ndarray]:
    features, boxes = seen(feeds["pixel_values"])
    return {"logits": token_logits(features, feeds["class_features"], feeds["class_mask"]), "pred_boxes": boxes}


TEXT_TENSORS = {
    "text_features": ("float32", ("batch", "tokens", WIDTH)),
    "attention_mask": ("int64", ("batch", "tokens")),
    "text_self_mask": ("int64", ("batch", "tokens", "tokens")),
    "text_position_ids": ("int64", ("batch", "tokens")),
    "input_ids": ("int64", ("batch", "tokens")),
    "phrase_mask": ("int64", ("batch", "phrases", "tokens")),
    "class_features": ("float32", ("batch", "classes", WIDTH)),
    "class_mask": ("int64", ("batch", "classes")),
    "task_features": ("float32", ("batch", "tokens", WIDTH)),
    "task_mask": ("int64", ("batch", "tokens")),
}


def tensors(*names: str) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(name, *TEXT_TENSORS[name]) for name in names)


def detector_tensors(spec: ModelSpec, batch: int | str = "batch") -> tuple[tuple[TensorInfo, ...], tuple[TensorInfo, ...]]:
    from detrt.spec import text_inputs

    sides = ("height", "width") if spec.input.dynamic else spec.input.size_hw
    inputs = [TensorInfo("pixel_values", "uint8", (batch, 3, *sides))]
    if spec.input.mask:
        inputs.append(TensorInfo("pixel_mask", "int64", (batch, *sides)))
    if spec.decode.in_graph:
        inputs.append(TensorInfo("target_sizes", "int64", (batch, 2)))
    columns = "tokens" if spec.text.kind == "tokens" else "classes"
    outputs = (
        TensorInfo("logits", "float32", (batch, 3, columns)),
        TensorInfo("pred_boxes", "float32", (batch, 3, 4)),
    )
    if spec.decode.in_graph:
        k = spec.decode.max_detections
        outputs = (
            TensorInfo("boxes", "float32", (batch, k, 4)),
            TensorInfo("scores", "float32", (batch, k)),
            TensorInfo("labels", "int64", (batch, k)),
            TensorInfo("num_detections", "int64", (batch,)),
        )
    texts = tensors(*text_inputs(spec))
    return (*inputs, *(TensorInfo(t.name, t.dtype, (batch, *t.shape[1:])) for t in texts)), outputs


def text_encoder_outputs(kind: str) -> tuple[TensorInfo, ...]:
    names = ("text_features", "text_self_mask", "text_position_ids")
    if kind == "tokens":
        return tensors(*names)
    return (*tensors("text_features"), TensorInfo("class_features", "float32", ("batch", WIDTH)))


def make_prompted(
    kind: str = "tokens", *, spec: ModelSpec | None = None, batch: int | str = "batch", log: Counter | None = None, **options
) -> PromptedSession:
    """The model as a PromptedSession; log: counts "text_encoder" and "detector" runs and keeps the last "feeds"."""
    spec = spec or model_spec(kind)
    counts = Counter() if log is None else log

    def counting(name, function):
        def run(feeds):
            counts[name] += 1
            counts.setdefault("shapes", [])
            counts["shapes"].append((name, {key: array.shape for key, array in feeds.items()}))
            return function(feeds)

        return run

    function = run_class_detector if kind == "classes" else run_decoding_detector if spec.decode.in_graph else run_detector
    detector = FakeSession(spec, *detector_tensors(spec, batch), counting("detector", function))
    text_encoder = None
    if spec.text.encoder:
        outs = text_encoder_outputs(kind)
        named = [info.name for info in outs]
        text_encoder = FakeSession(
            spec,
            tensors("input_ids", "attention_mask"),
            outs,
            counting(
                "text_encoder", lambda feeds: {name: array for name, array in run_text_encoder(feeds).items() if name in named}
            ),
        )
    return PromptedSession(detector, PromptTokenizer(tokenizer_json(), spec.text), text_encoder, **options)


def colour_image(*colours: str, height: int = 9, width: int = 15) -> np.ndarray:
    """Three thirds of these colours; "black" for none."""
    image = np.zeros((height, width, 3), np.uint8)
    for q, name in enumerate(colours):
        image[:, q * width // 3 : (q + 1) * width // 3] = np.array(COLOURS.get(name, (0, 0, 0))) * 255
    return image
