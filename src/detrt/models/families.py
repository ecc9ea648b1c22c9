"""The family table: one row of facts per DETR family. Adding a family is a row, and a rewrite only if
tracing needs one.

Facts that differ between checkpoints of one family (sizes, mean, labels, queries) are read from the
checkpoint; a row holds what its code fixes, and the defaults for a folder without a preprocessor file.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PUBLISHED_DEIMV2 = "deimv2-upstream"  # as `--family`: a DEIMv2 folder in detrt's class with the authors' decoder
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True)
class Family:
    """Facts about one family.

    name: detrt's name. model_type: the `model_type` of its transformers config.
    activation, select: see `DecodeSpec`. max_detections: what the authors' post-processing keeps,
    None for the number of queries.
    mask: the model takes a padding mask, so images of different sizes share a batch.
    dynamic: height and width can be symbolic; otherwise `fixed_reason` says why not.
    multiple_of: a fixed number, or the name of the rule in `preprocessor.multiple_of` that reads it from the config.
    shortest_edge: default resize keeps the aspect ratio (800, at most 1333), else stretches to `size` (height, width); None is the
        size of the position table, or the `image_size` of the config.
    queries: config attributes that may hold the number of queries, first present and positive wins.
    rewrites: names of the rewrites in `detrt.models.rewrites` that tracing needs.
    reducible: its authors evaluate it with fewer queries and decoder layers than it was trained with, see `detrt.models.reduce`.
    licence: of the published code and weights, as their authors state it; sizes that differ are named.
    processor: image processor of transformers for its checkpoints, without the suffix, see `preprocessor.PROCESSORS`.
    text: "" for fixed classes, else the kind of prompt, see `TextSpec`. nms, nms_iou: the authors' suppression of
    overlapping boxes, see `DecodeSpec`. reading_order, quads: see `DecodeSpec`. masks_at: stride of the masks that every checkpoint
    of the family has; 0 where the class of the checkpoint tells.
    """

    name: str
    model_type: str
    title: str
    activation: str
    select: str
    max_detections: int | None
    example: str
    mask: bool = False
    dynamic: bool = True
    fixed_reason: str = ""
    multiple_of: int | str = 1
    shortest_edge: bool = False
    size: tuple[int, int] | None = (640, 640)
    normalize: bool = True
    queries: tuple[str, ...] = ("num_queries",)
    deformable: bool = False
    rewrites: tuple[str, ...] = field(default_factory=tuple)
    text: str = ""
    nms: str = "none"
    nms_iou: float = 0.8
    processor: str = "Detr"
    reducible: bool = False
    licence: str = ""
    reading_order: str = "none"
    quads: bool = False
    masks_at: int = 0


def _resnet_detr(name: str, model_type: str, title: str, example: str, **facts: object) -> Family:
    base = {
        "mask": True,
        "shortest_edge": True,
        "activation": "sigmoid",
        "select": "topk",
        "max_detections": 100,
        "licence": "Apache-2.0",
    }
    return Family(name=name, model_type=model_type, title=title, example=example, **{**base, **facts})  # type: ignore[arg-type]


def _hybrid(name: str, model_type: str, title: str, example: str, **facts: object) -> Family:
    base = {
        "licence": "Apache-2.0",
        "activation": "sigmoid",
        "select": "topk",
        "max_detections": None,
        "multiple_of": 32,
        "normalize": False,
        "processor": "RTDetr",
        "deformable": True,
        "rewrites": ("msda",),
        "reducible": True,
    }
    return Family(name=name, model_type=model_type, title=title, example=example, **{**base, **facts})  # type: ignore[arg-type]


def _document(version: int, reading_order: str, rewrites: tuple[str, ...] = (), **facts: object) -> Family:
    name = f"pp_doclayout_v{version}"
    example = f"PaddlePaddle/PP-DocLayoutV{version}_safetensors"
    base = {"size": (800, 800), "reducible": False, "rewrites": ("msda", *rewrites), "processor": f"PPDocLayoutV{version}"}
    return _hybrid(name, name, f"PP-DocLayoutV{version}", example, reading_order=reading_order, **{**base, **facts})


def _eomt(name: str, title: str, example: str, licence: str) -> Family:
    return Family(
        name=name,
        model_type=name,
        title=title,
        example=example,
        activation="sigmoid",
        select="query",
        max_detections=None,
        mask=True,
        dynamic=False,
        fixed_reason="its masks lie on one grid of patches",
        multiple_of="patch",
        processor="Eomt",
        licence=licence,
    )


def _grounding(name: str, model_type: str, title: str, example: str) -> Family:
    return Family(
        name=name,
        model_type=model_type,
        title=title,
        example=example,
        activation="sigmoid",
        select="query",
        max_detections=None,
        mask=True,
        shortest_edge=True,
        deformable=True,
        rewrites=("msda", "tensors_only"),
        text="tokens",
        processor="GroundingDino",
        licence="Apache-2.0",
    )


def _owl(name: str, title: str, example: str, processor: str) -> Family:
    return Family(
        name=name,
        model_type=name,
        title=title,
        activation="sigmoid",
        select="query",
        max_detections=None,
        licence="Apache-2.0",
        example=example,
        dynamic=False,
        fixed_reason="each place of its grid of patches has its weights",
        multiple_of="image",
        size=None,
        rewrites=("tensors_only",),
        text="names",
        processor=processor,
    )


_SOFTMAX = {"activation": "softmax", "select": "query", "max_detections": None}

FAMILIES: tuple[Family, ...] = (
    _resnet_detr("detr", "detr", "DETR", "facebook/detr-resnet-50", **_SOFTMAX),
    _resnet_detr(
        "table-transformer",
        "table-transformer",
        "Table Transformer",
        "microsoft/table-transformer-detection",
        licence="MIT",
        **_SOFTMAX,
    ),
    _resnet_detr(
        "conditional_detr",
        "conditional_detr",
        "Conditional DETR",
        "microsoft/conditional-detr-resnet-50",
        processor="ConditionalDetr",
    ),
    _resnet_detr("dab_detr", "dab-detr", "DAB-DETR", "IDEA-Research/dab-detr-resnet-50", processor="ConditionalDetr"),
    _resnet_detr(
        "deformable_detr",
        "deformable_detr",
        "Deformable DETR",
        "SenseTime/deformable-detr",
        processor="DeformableDetr",
        queries=("two_stage_num_proposals", "num_queries"),
        deformable=True,
        rewrites=("msda", "symbolic_shapes"),
    ),
    _hybrid("rt_detr", "rt_detr", "RT-DETR", "PekingU/rtdetr_r50vd"),
    _hybrid("rt_detr_v2", "rt_detr_v2", "RT-DETRv2", "PekingU/rtdetr_v2_r18vd"),
    _hybrid("d_fine", "d_fine", "D-FINE", "ustc-community/dfine-large-coco"),
    # Its small models have 100 and 150 queries, and its authors still keep the 300 best (query, class) pairs;
    # as many as queries costs Atto 0.002 AP and Femto 0.004 on COCO images.
    _hybrid(
        "deimv2",
        "deimv2",
        "DEIMv2",
        "Intellindust/DEIMv2_HGNetv2_N_COCO",
        max_detections=300,
        licence="Apache-2.0; backbones of S to X: DINOv3 License",
    ),
    _document(2, "votes", ("document_order",)),
    _document(3, "votes", ("document_masks",), masks_at=4),
    _document(4, "successors", quads=True),
    Family(
        name="lw_detr",
        model_type="lw_detr",
        title="LW-DETR",
        activation="sigmoid",
        select="topk",
        max_detections=100,
        example="AnnaZhang/lwdetr_small_60e_coco",
        licence="Apache-2.0",
        processor="DeformableDetr",
        multiple_of="windows",
        deformable=True,
        rewrites=("msda", "symbolic_shapes"),
    ),
    Family(
        name="rf_detr",
        model_type="rf_detr",
        title="RF-DETR",
        activation="sigmoid",
        select="topk",
        max_detections=None,
        example="Roboflow/rf-detr-medium",
        dynamic=False,
        fixed_reason=(
            "its backbone resizes the position table with an antialiased bicubic filter, which no TensorRT version "
            "has; detrt computes that table for one size before the export"
        ),
        multiple_of="windows",
        size=None,
        processor="RfDetr",
        reducible=True,
        licence="Apache-2.0; XL and 2XL: Roboflow Platform Model License 1.0 (PML-1.0)",
        deformable=True,
        rewrites=("msda", "symbolic_shapes", "frozen_positions"),
    ),
    Family(
        name="yolos",
        model_type="yolos",
        title="YOLOS",
        example="hustvl/yolos-tiny",
        multiple_of="patch",
        shortest_edge=True,
        queries=("num_detection_tokens",),
        processor="Yolos",
        licence="MIT",
        **_SOFTMAX,  # type: ignore[arg-type]
    ),
    _eomt("eomt", "EoMT", "tue-mps/coco_instance_eomt_large_640", "MIT"),
    _eomt(
        "eomt_dinov3",
        "EoMT with DINOv3",
        "tue-mps/coco_instance_eomt_large_640_dinov3",
        "MIT; backbones: DINOv3 License",
    ),
    _grounding("grounding_dino", "grounding-dino", "Grounding DINO", "IDEA-Research/grounding-dino-tiny"),
    _grounding(
        "mm_grounding_dino",
        "mm-grounding-dino",
        "MM-Grounding-DINO, LLMDet",
        "openmmlab-community/mm_grounding_dino_tiny_o365v1_goldg_v3det",
    ),
    Family(
        name="omdet_turbo",
        model_type="omdet-turbo",
        title="OmDet-Turbo",
        activation="sigmoid",
        select="topk",
        max_detections=None,
        licence="Apache-2.0",
        example="omlab/omdet-turbo-swin-tiny-hf",
        multiple_of=32,
        deformable=True,
        rewrites=("msda", "tensors_only"),
        text="classes",
        nms="nms",
        nms_iou=0.5,
    ),
    Family(
        name="sam3",
        model_type="sam3",
        title="SAM 3",
        activation="sigmoid",
        select="topk",
        max_detections=None,
        licence="SAM License",
        example="facebook/sam3",
        multiple_of="patch",
        size=None,
        rewrites=("tensors_only",),
        text="phrases",
        processor="Sam3",
    ),
    _owl("owlvit", "OWL-ViT", "google/owlvit-base-patch32", "OwlViT"),
    _owl("owlv2", "OWLv2", "google/owlv2-base-patch16-ensemble", "Owlv2"),
)

# Detectors that transformers does not have (`detrt.models.arch`): original checkpoint files only. A model_type is that of the modules
# of transformers that the detector is composed of.
_DINO_FACTS = {
    "mask": True,
    "shortest_edge": True,
    "activation": "sigmoid",
    "select": "topk",
    "max_detections": 300,
    "deformable": True,
}
OWN_FAMILIES: tuple[Family, ...] = (
    Family(name="dino", model_type="", title="DINO", example="", licence="Apache-2.0", **_DINO_FACTS),  # type: ignore[arg-type]
    Family(name="co_dino", model_type="", title="Co-DINO", example="", nms="soft_nms", licence="MIT", **_DINO_FACTS),  # type: ignore[arg-type]
    _hybrid("ecdet", "deimv2", "ECDet", "", normalize=True),
)

# model_type of SAM 3 with its tracker of videos, as facebook/sam3 is published -> the family of the detector inside.
DETECTOR_INSIDE = {"sam3_video": "sam3"}

# model_type of detectors of transformers that detrt does not export -> why.
NOT_EXPORTED = {
    **dict.fromkeys(
        ("sam3_tracker", "sam3_tracker_video"),
        "it follows objects that points, boxes or masks show, and detrt exports the detector of SAM 3, which a text prompts "
        "(model_type sam3, or sam3_video, of which the detector is read)",
    ),
    "sam3_lite_text": "its text encoder is MobileCLIP, and detrt exports SAM 3 with CLIP's",
}
BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES}
BY_NAME = {family.name: family for family in FAMILIES + OWN_FAMILIES}
