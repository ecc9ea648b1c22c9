"""hustvl/YOLOS: tiny, small, small (dWr) and base."""

from __future__ import annotations

from typing import Any

from ...errors import SourceError
from ..checkpoints.assumed import Assumed
from ..checkpoints.key_map import LoadReport
from ..checkpoints.shapes import Shapes
from .base import EDGES, SOFTMAX, Family, Format, Processor, RandomModel

_OLD, _NEW = "backbone.blocks.#", "vit.encoder.layer.#"
TABLE = (
    ("backbone.cls_token", "vit.embeddings.cls_token"),
    ("backbone.det_token", "vit.embeddings.detection_tokens"),
    ("backbone.pos_embed", "vit.embeddings.position_embeddings"),
    ("backbone.mid_pos_embed", "vit.encoder.interpolation.mid_position_embeddings"),
    ("backbone.patch_embed.proj.@", "vit.embeddings.patch_embeddings.projection.@"),
    (f"{_OLD}.norm1.@", f"{_NEW}.layernorm_before.@"),
    (f"{_OLD}.norm2.@", f"{_NEW}.layernorm_after.@"),
    (f"{_OLD}.attn.qkv.@", f"{_NEW}.attention.attention.{{query,key,value}}.@"),
    (f"{_OLD}.attn.proj.@", f"{_NEW}.attention.output.dense.@"),
    (f"{_OLD}.mlp.fc1.@", f"{_NEW}.intermediate.dense.@"),
    (f"{_OLD}.mlp.fc2.@", f"{_NEW}.output.dense.@"),
    ("backbone.norm.@", "vit.layernorm.@"),
    ("class_embed.layers.#.@", "class_labels_classifier.layers.#.@"),
    ("bbox_embed.layers.#.@", "bbox_predictor.layers.#.@"),
)
# Cells of the position table -> its height and width in pixels, of the published models; width -> heads, shortest edge.
_TABLES = {50 * 83: (800, 1333), 32 * 54: (512, 864), 50 * 84: (800, 1344)}
_HEADS = {192: 3, 384: 6, 330: 6, 768: 12}
_EDGES = {192: 512}


def recognise(keys: set[str]) -> str | None:
    return "yolos" if {"backbone.det_token", "backbone.pos_embed", "class_embed.layers.0.weight"} <= keys else None


def settings(shapes: Shapes, assumed: Assumed, variant: str, report: LoadReport) -> dict[str, Any]:
    width, tokens = shapes.size("backbone.pos_embed", 2), shapes.size("backbone.det_token", 1)
    patch = shapes.size("backbone.patch_embed.proj.weight", 2)
    cells = shapes.size("backbone.pos_embed", 1) - 1 - tokens
    table = assumed.numbers("position_table", _TABLES.get(cells, ()), "init_pe_size")
    middle = "backbone.mid_pos_embed" in shapes
    if len(table) != 2 or (table[0] // patch) * (table[1] // patch) != cells:
        raise SourceError(
            f"'{shapes.ref}': its position table has {cells} cells of {patch} pixels; state the size that it was made for "
            f"(init_pe_size of its training), e.g. `assume=position_table=800+1344`; got {'x'.join(map(str, table)) or 'nothing'}"
        )
    if middle and shapes.size("backbone.mid_pos_embed", 2) != cells + 1 + tokens:
        raise SourceError(
            f"'{shapes.ref}': the position tables between its layers are for another size than the first one (mid_pe_size and "
            "init_pe_size), which detrt does not run"
        )
    assumed.need("YOLOS", mid_pe_size=assumed.args.get("init_pe_size") if middle else None)
    edge = assumed.number("eval_size", _EDGES.get(width, 800), "eval_size")
    return {
        "hidden_size": width,
        "num_hidden_layers": shapes.count("backbone.blocks.#."),
        "num_attention_heads": assumed.number("heads", _HEADS.get(width, max(1, width // 64)), divides=width),
        "intermediate_size": shapes.size("backbone.blocks.0.mlp.fc1.weight"),
        "layer_norm_eps": 1e-6,
        "image_size": table,
        "patch_size": patch,
        "num_channels": shapes.size("backbone.patch_embed.proj.weight", 1),
        "num_detection_tokens": tokens,
        "use_mid_position_embeddings": middle,
        "num_labels": shapes.size("class_embed.layers.2.weight") - 1,
        "family": {"edges": (edge, edge * 1333 // 800)},
    }


def facts(settings: dict[str, Any]) -> dict[str, object]:
    height, width = settings["image_size"]
    return {
        "classes": settings["num_labels"],
        "queries": settings["num_detection_tokens"],
        "width": settings["hidden_size"],
        "layers": settings["num_hidden_layers"],
        "position table": f"{height}x{width}",
    }


FAMILIES = (
    Family(
        name="yolos",
        model_type="yolos",
        title="YOLOS",
        example="hustvl/yolos-tiny",
        no_mask="has no padding mask, and padded images are not done for it",
        multiple_of="patch",
        shortest_edge=True,
        queries=("num_detection_tokens",),
        processor=Processor("Yolos", EDGES, rounds_down=16),
        licence="MIT",
        **SOFTMAX,
        random=(
            RandomModel(
                "yolos",
                {
                    "hidden_size": 192,
                    "num_attention_heads": 3,
                    "intermediate_size": 768,
                    "image_size": [800, 1344],
                    "use_mid_position_embeddings": False,
                },
                {
                    "hidden_size": 32,
                    "num_attention_heads": 4,
                    "intermediate_size": 48,
                    "num_hidden_layers": 2,
                    "image_size": [64, 96],
                    "num_detection_tokens": 12,
                },
            ),
        ),
        formats=(Format("yolos", ("hustvl YOLOS",), recognise, settings, TABLE, facts=facts),),
    ),
)
