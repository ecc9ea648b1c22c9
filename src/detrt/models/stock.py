"""How transformers runs a model that takes a prompt, which ours is compared with. Each family has its own, see `Family.stock`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .published import PublishedOutputs, PublishedPrompt


class Stock(ABC):
    """The functions of the library under detrt's tensor names, and its processor of images and text.

    `both` is that processor, `prompt` a `PublishedPrompt`. one_size: it takes images of one size only.
    """

    one_size = False

    @abstractmethod
    def forward(self, model: Any, pixels: Tensor, mask: Tensor | None, feeds: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Raw outputs of the detector, padding `PADDED_LOGIT`, and with masks their logits; a graph without masks leaves these out.

        feeds: token ids and their mask of a model that takes them itself, else the text inputs of the detector's graph.
        """

    @abstractmethod
    def feeds(self, both: Any, images: Sequence[Any], prompt: PublishedPrompt) -> Any:
        """What the library's model takes for images, all with one prompt."""

    def runs(self, both: Any, image: Any, prompt: PublishedPrompt) -> list[Any]:
        """The same of one image, a run after the other."""
        return [self.feeds(both, [image], prompt)]

    @abstractmethod
    def usual(self, both: Any, outputs: Any, feeds: Any, prompt: PublishedPrompt, sizes: Any, masks: bool) -> Any:
        """Detections as the documentation of the library reads them from the outputs of `feeds`, of images of `sizes` (height, width).

        masks: with masks."""

    @abstractmethod
    def found(self, both: Any, outputs: PublishedOutputs, prompt: PublishedPrompt, most: int) -> dict[str, Tensor]:
        """All scores, boxes and labels (class ids) of the outputs of `runs`; most: detections of an image."""


class EncoderStock(Stock):
    """Of a model that has a text encoder by itself."""

    @abstractmethod
    def encode(self, model: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """Outputs of the text encoder, in the order of `PromptKind.encoder_outputs`."""


class TokenStock(Stock):
    """Of a model with a logit for each token."""

    @abstractmethod
    def by_tokens(self, both: Any, outputs: PublishedOutputs, text_threshold: float) -> Any:
        """Detections of the library's post-processing as it labels them, by the tokens above a threshold."""


class NameStock(EncoderStock):
    """Of a model with a logit for each name."""

    def feeds(self, both: Any, images: Sequence[Any], prompt: PublishedPrompt) -> Any:
        texts = [list(prompt.names.values())] * len(images)
        return both(images=list(images), text=texts, return_tensors="pt", **self.task(prompt, len(images)))

    def task(self, prompt: PublishedPrompt, count: int) -> dict[str, list[str]]:
        """More arguments of the processor."""
        return {}

    def usual(self, both: Any, outputs: Any, feeds: Any, prompt: PublishedPrompt, sizes: Any, masks: bool) -> Any:
        return self.read(both, outputs, prompt, sizes, 0.3)

    def read(self, both: Any, outputs: Any, prompt: PublishedPrompt, sizes: Any, threshold: float) -> Any:
        """Detections of the library's post-processing, with labels by the number of a name."""
        names = [list(prompt.names.values())] * len(sizes)
        return both.post_process_grounded_object_detection(outputs, text_labels=names, threshold=threshold, target_sizes=sizes)

    def found(self, both: Any, outputs: PublishedOutputs, prompt: PublishedPrompt, most: int) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.read(both, outputs.tensors[0], prompt, [outputs.size_hw], 0.0)[0]
        found["labels"] = torch.tensor(list(prompt.names))[found["labels"]]
        return found
