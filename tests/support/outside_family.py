"""A family of one's own, as a user of detrt has it: one file, which registers itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from detrt.models.families import register
from detrt.models.families.base import Family, Format, RandomModel


class Glance(nn.Module):
    """Queries that look once at a map of stride 8."""

    def __init__(self, num_labels: int, num_queries: int, width: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_labels=num_labels, num_queries=num_queries, id2label=None)
        self.stem = nn.Sequential(nn.Conv2d(3, width, 8, 8), nn.ReLU())
        self.queries = nn.Parameter(torch.randn(num_queries, width))
        self.keys, self.values = nn.Linear(width, width), nn.Linear(width, width)
        self.classes, self.boxes = nn.Linear(width, num_labels), nn.Linear(width, 4)

    def forward(self, pixel_values: Tensor, return_dict: bool = True) -> SimpleNamespace:
        tokens = self.stem(pixel_values).flatten(2).transpose(1, 2)
        queries = self.queries.unsqueeze(0).expand(pixel_values.shape[0], -1, -1)
        seen = queries + (queries @ self.keys(tokens).transpose(1, 2)).softmax(-1) @ self.values(tokens)
        return SimpleNamespace(logits=self.classes(seen), pred_boxes=self.boxes(seen).sigmoid())


def recognise(keys: set[str]) -> str | None:
    return "glance" if {"keys.weight", "queries"} <= keys else None


def settings(shapes: Any, args: dict[str, Any], variant: str, report: Any) -> dict[str, Any]:
    queries, width = shapes.size("queries"), shapes.size("queries", 1)
    return {"num_labels": shapes.size("classes.weight"), "num_queries": queries, "width": width}


def random(settings: Any) -> nn.Module:
    torch.manual_seed(7)
    return Glance(**settings).eval().requires_grad_(False)


register(
    Family(
        name="glance",
        model_type="",
        title="Glance",
        activation="sigmoid",
        select="query",
        max_detections=None,
        example="",
        own=True,
        size=(64, 96),
        multiple_of=8,
        licence="MIT",
        random=(RandomModel("glance", {"num_labels": 80, "num_queries": 100, "width": 256}, {"num_queries": 9, "width": 16}),),
        build_random=random,
        formats=(
            Format(
                "glance",
                ("the authors of Glance",),
                recognise,
                settings,
                (("**", "**"),),
                build=lambda settings, variant: Glance(**settings),
                facts=dict,
            ),
        ),
    )
)
