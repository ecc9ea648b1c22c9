"""Random requests: JSON, KServe, forms and images of all formats, from nearly right to noise, up to a size."""

from __future__ import annotations

import gzip
import io
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from PIL import Image
from serve_support import in_base64

FORMATS = (
    "PNG",
    "JPEG",
    "WEBP",
    "TIFF",
    "GIF",
    "BMP",
    "AVIF",
    "JPEG2000",
    "PPM",
    "TGA",
    "ICO",
    "DDS",
    "PCX",
    "QOI",
    "SGI",
    "IM",
    "MSP",
    "PDF",
)
MODES = ("RGB", "L", "RGBA", "P", "1", "CMYK", "I;16", "F", "LA")
SCALARS = (
    None,
    True,
    False,
    0,
    1,
    -1,
    0.5,
    1e308,
    -1e-308,
    2**63,
    10**30,
    "",
    "a",
    "toy",
    "prompted",
    "\x00",
    "\ud800",
    "é" * 50,
    [],
    {},
    [[]],
)


_IMAGES = 200  # encoders take longer than the server


@dataclass(frozen=True)
class RandomRequest:
    """kind: which generator made it."""

    kind: str
    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


class RandomBodies:
    """Requests for a server with the models `toy`, of fixed classes, and `prompted`.

    seed: equal ones give equal requests. largest: bytes of a body.
    """

    def __init__(self, seed: int, largest: int) -> None:
        self.rng, self.largest = random.Random(seed), largest
        self._images = [self._made_image() for _ in range(_IMAGES)]

    def request(self) -> RandomRequest:
        rng = self.rng
        makers: dict[str, Callable[[], tuple[str, bytes, dict[str, str]]]] = {
            "image": self._image_body,
            "json": self._json,
            "infer": self._infer,
            "binary": self._binary,
            "form": self._form,
            "noise": self._noise,
        }
        kind = rng.choice([*makers])
        path, body, headers = makers[kind]()
        if rng.random() < 0.15:
            body = self._damaged(body)
        if rng.random() < 0.02:
            body = self._inflated(body)
        if rng.random() < 0.05:
            body, headers = gzip.compress(body, 1), {**headers, "Content-Encoding": rng.choice(["gzip", "gzip", "deflate", "br"])}
        if path.startswith("/v1") and "?" not in path and rng.random() < 0.5:
            path += "?" + self._query()
        return RandomRequest(kind, path, body[: self.largest], headers)

    def _image(self) -> bytes:
        return self.rng.choice(self._images)

    def _made_image(self) -> bytes:
        rng = self.rng
        size = rng.choice([(1, 1), (12, 8), (64, 48), (333, 7), (7, 333), (640, 480)])
        mode = rng.choice(MODES)
        image = Image.frombytes("L", size, rng.randbytes(size[0] * size[1])).convert("RGB")
        file = io.BytesIO()
        try:
            (image if rng.random() < 0.5 else image.convert(mode)).save(file, rng.choice(FORMATS))
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ):  # a mode that the format has not, or a format that Pillow was built without
            file = io.BytesIO()
            image.save(file, "PNG", compress_level=1)
        return file.getvalue()

    def _image_body(self) -> tuple[str, bytes, dict[str, str]]:
        kind = self.rng.choice(["image/png", "image/jpeg", "application/octet-stream", "image/*", "", "text/plain"])
        path = self.rng.choice(["/v1/detect?model=toy"] * 3 + ["/v1/detect?model=prompted&prompt=red.", "/v1/detect"])
        return path, self._image(), {"Content-Type": kind} if kind else {}

    def _json(self) -> tuple[str, bytes, dict[str, str]]:
        rng = self.rng
        images: Any = [self._image_value() for _ in range(rng.choice([1, 1, 2, 5, 40]))]
        data: dict[str, Any] = {"images": images, "model": rng.choice(["toy", "prompted"])}
        if data["model"] == "prompted":
            data["prompt"] = rng.choice(
                ["red. blue.", ["red", "green"], "x" * 3000, [f"name {i}" for i in range(rng.choice([3, 400]))]]
            )
        for name in ("threshold", "classes", "max_detections", "prompt", "task", "timeout_ms", "query_images", "unknown"):
            if rng.random() < 0.1:
                data[name] = self._value(3)
        return "/v1/detect", self._text(self._changed(data)), {"Content-Type": "application/json"}

    def _image_value(self) -> Any:
        text = in_base64(self._image())
        return self.rng.choice(
            [text, f"data:image/png;base64,{text}", {"name": "a.png", "data": text}, text[:-1], self._value(2)]
        )

    def _infer(self) -> tuple[str, bytes, dict[str, str]]:
        rng = self.rng
        rows = rng.choice([1, 1, 2, 9, 0])
        shape = [rows, 3, 8, 12]
        data: Any = [rng.randrange(256) for _ in range(rows * 288)]
        tensor = {
            "name": "pixel_values",
            "shape": shape,
            "datatype": rng.choice(["UINT8", "UINT8", "FP32", "BYTES"]),
            "data": data,
        }
        asked: dict[str, Any] = {"inputs": [tensor] * rng.choice([1, 1, 1, 2])}
        if rng.random() < 0.2:
            asked["parameters"] = self._value(3)
        if rng.random() < 0.2:
            asked["outputs"] = rng.choice([[{"name": "logits"}], self._value(3)])
        return self._model_path(), self._text(self._changed(asked)), {"Content-Type": "application/json"}

    def _binary(self) -> tuple[str, bytes, dict[str, str]]:
        rng = self.rng
        size = rng.choice([288, 288, 287, 0, 2**40, -1, "288"])
        tensor = {"name": "pixel_values", "shape": [1, 3, 8, 12], "datatype": "UINT8", "parameters": {"binary_data_size": size}}
        head = self._text(self._changed({"inputs": [tensor]}) if rng.random() < 0.3 else {"inputs": [tensor]})
        length = rng.choice([str(len(head)), str(len(head)), str(len(head) - 1), "0", "-1", "9" * 30, "x"])
        return self._model_path(), head + rng.randbytes(288), {"Inference-Header-Content-Length": length}

    def _model_path(self) -> str:
        model = self.rng.choice(["toy:graph", "toy:graph", "toy", "prompted:graph", "other", "%00"])
        return f"/v2/models/{model}/infer"

    def _form(self) -> tuple[str, bytes, dict[str, str]]:
        rng = self.rng
        parts = []
        for _ in range(rng.choice([0, 1, 2, 6, 60])):
            if rng.random() < 0.6:
                parts.append(b'Content-Disposition: form-data; name="images"; filename="a.png"\r\n\r\n' + self._image())
            else:
                name = rng.choice(
                    ["model", "threshold", "classes", "prompt", "timeout_ms", "unknown", "images", "query_images", ""]
                )
                value = str(rng.choice(["toy", "prompted", "0.5", "red", "nan", "-1", "1e9", "", "x" * 5000])).encode()
                parts.append(f'Content-Disposition: form-data; name="{name}"\r\n\r\n'.encode() + value)
        body = b"".join(b"--bound\r\n" + part + b"\r\n" for part in parts) + b"--bound--\r\n"
        kind = rng.choice(
            ["multipart/form-data; boundary=bound"] * 6 + ["multipart/form-data", "multipart/form-data; boundary=" + "b" * 300]
        )
        return "/v1/detect", body, {"Content-Type": kind}

    def _noise(self) -> tuple[str, bytes, dict[str, str]]:
        rng = self.rng
        kind = rng.choice(
            ["application/json", "multipart/form-data; boundary=b", "image/png", "application/x-www-form-urlencoded", "\t"]
        )
        path = rng.choice(
            ["/v1/detect", "/v2/models/toy/infer", "/v2/repository/index", "/v1/models", "/v2/models/toy", "/nothing"]
        )
        return path, rng.randbytes(rng.choice([0, 1, 100, 5000])), {"Content-Type": kind}

    def _query(self) -> str:
        rng = self.rng
        names = ("model", "threshold", "classes", "max_detections", "prompt", "timeout_ms", "unknown", "%ff")
        values = ("toy", "prompted", "0.5", "-1", "nan", "1e400", "red,blue", "%00", "1", "20", "x" * 1000, "%ff%fe")
        return "&".join(f"{rng.choice(names)}={rng.choice(values)}" for _ in range(rng.choice([1, 1, 2, 30])))

    def _value(self, depth: int) -> Any:
        rng = self.rng
        if depth == 0 or rng.random() < 0.5:
            return rng.choice(SCALARS)
        if rng.random() < 0.5:
            return [self._value(depth - 1) for _ in range(rng.choice([0, 1, 3, 20]))]
        return {rng.choice(["name", "data", "shape", "x", ""]): self._value(depth - 1) for _ in range(rng.choice([1, 3]))}

    def _changed(self, data: dict[str, Any]) -> dict[str, Any]:
        """With a value somewhere in it replaced or left out, at times."""
        rng = self.rng
        if not data or rng.random() < 0.5:
            return data
        key = rng.choice([*data])
        inner = data[key]
        if isinstance(inner, list) and inner and isinstance(inner[0], dict) and rng.random() < 0.7:
            return {**data, key: [self._changed(inner[0]), *inner[1:]]}
        return {k: v for k, v in data.items() if k != key} if rng.random() < 0.2 else {**data, key: self._value(3)}

    @staticmethod
    def _text(data: Any) -> bytes:
        return json.dumps(data).encode("utf-8", "backslashreplace")

    def _damaged(self, body: bytes) -> bytes:
        """With bytes flipped, cut out, repeated or exchanged."""
        rng = self.rng
        if not body:
            return body
        found = bytearray(body)
        for _ in range(rng.choice([1, 1, 3, 50])):
            at = rng.randrange(len(found) or 1)
            way = rng.randrange(4)
            if way == 0 and found:
                found[at] ^= 1 << rng.randrange(8)
            elif way == 1:
                del found[at : at + rng.choice([1, 10, 10_000])]
            elif way == 2:
                found[at:at] = found[at : at + rng.choice([1, 10, 1000])]
            else:
                found[at : at + 1] = rng.choice([b"[", b"{", b'"', b"\\", b"\r\n--", b"\x00", b"9" * 100, b"\xff\xd8\xff"])
        return bytes(found)

    def _inflated(self, body: bytes) -> bytes:
        """A piece of it again and again, up to a size between a tenth of the largest and all of it."""
        rng = self.rng
        size = int(self.largest * 10 ** -rng.random())
        start = rng.randrange(len(body) or 1)
        piece = body[start : start + rng.choice([1, 2, 30, 3000])] or b"["
        middle = piece * (size // len(piece))
        return body[:start] + middle[: max(0, size - len(body))] + body[start:]
