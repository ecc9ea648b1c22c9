"""The public API as users call it, for the type checker: `make lint` reads this file, and nothing runs it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from detrt import (
    Bundle,
    Detections,
    Detector,
    EngineConfig,
    ExportConfig,
    Gate,
    VerifyReport,
    build,
    export_onnx,
    load_source,
    open_session,
    verify,
)
from detrt.detections import Detection


def detect(frames: list[np.ndarray]) -> list[Detections]:
    with Detector("bundle/", threshold=0.4, classes=["cat", 3], color="bgr", device="cuda:0", trust_remote_code=True) as detector:
        one: Detections = detector("street.jpg")
        two: Detections = detector(frames[0], threshold=0.3, classes=["dog"])
        many: list[Detections] = [*detector(frames, prompt="a cat. a dog.", class_thresholds={"cat": 0.2}, max_detections=5)]
        boxes = [(one.box, one.score, one.label, one.mask) for one in detector("street.jpg")]
        detector(open("street.jpg", "rb")).save("out.jpg")
        first: Detection = two[0]
        print(boxes, first.track_id, two[:1].to_yolo(), detector.names[0], detector("https://host/street.jpg").plot().size)
        for found in detector.stream("drive.mp4", every=2, track=True):
            print(found.frame, found.time_s, found.path, found[found.scores > 0.5].crop())
        names: tuple[str, ...] = (*one.labels, *two.labels)
        print(names, one.boxes_xyxy.shape, repr(detector))
        detector("street.jpg", treshold=0.3)  # type: ignore[call-overload]
        return [*many, *detector.stream(iter(frames), prompts=["cat", "dog"])]


def opened() -> Detector:
    Detector.open("bundle/", treshold=0.4)  # type: ignore[call-arg]
    return Detector.open(Path("bundle"), threshold=0.4, batch_size=8, family="d_fine")


def made() -> VerifyReport:
    bundle: Bundle = build("embedded:shapes", "bundle", targets=(EngineConfig(sms=(89,)),), export=ExportConfig(opset=18)).bundle
    build("folder", "bundle", labels="names.txt", queries="100")  # type: ignore[arg-type]
    build("folder", "bundle", engine=())  # type: ignore[call-arg]
    source = load_source("embedded:shapes", preprocess="family-default")
    load_source("ckpt:a.pth", famly="deim")  # type: ignore[call-arg]
    print(export_onnx(source, "model.onnx").worst, bundle.spec.labels[0])
    with open_session("bundle", device="cpu") as session:
        print(session.info.name, session.spec.decode.num_queries)
    open_session("bundle", devices="cpu")  # type: ignore[call-arg]
    verify("folder", "bundle", ["street.jpg"], trust_remote_code="yes")  # type: ignore[arg-type]
    return verify(source, "model.onnx", ["street.jpg"], gate=Gate(box_px=1.0), labels=Path("names.txt"))
