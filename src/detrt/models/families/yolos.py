"""YOLOS."""

from __future__ import annotations

from .base import AS_FOLDER, EDGES, SOFTMAX, Family, Processor, RandomModel

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
        processor=Processor("Yolos", EDGES, rounds_down=True),
        licence="MIT",
        relatives=(("backbone.det_token", f"a YOLOS {AS_FOLDER}hustvl/yolos-tiny"),),
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
    ),
)
