"""COCO AP of the prompted demo detector on freshly drawn scenes, in three ways of asking.

    PYTHONPATH=src python training/evaluate_phrases.py src/detrt/models/embedded/phrases

shapes: every scene gets the twelve shapes at once, as a class list. colors: every scene is
asked for the colours and shapes that it holds and for as many again, or more, that it does not hold,
twenty in all. held_out: every scene gets the eighteen pairs that no training caption named
together. The score of a query for a phrase is the highest among the phrase's tokens; the 100 best
(query, phrase) pairs of a prompt are kept. Loads the folder with ``from_pretrained`` in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import transformers
from evaluation import TOP_K, coco_scores, coco_truth, evaluate_folder, result_row
from phrases_captions import numbers, write
from phrases_data import normalize, resize, stack
from torch import Tensor, nn

from detrt.data.scenes.phrases import COLOR_PHRASES, HELD_OUT_COLORS, HELD_OUT_FILLS, MAX_PHRASES, SHAPE_PHRASES, Phrase
from detrt.data.scenes.scene import Scene, SceneObject

Forward = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def color_prompts(scenes: Sequence[Scene], seed: int = 0) -> list[list[Phrase]]:
    """For each scene its phrases of colour and shape and others that it does not hold, twenty in all.

    Half of the others differ from one of the scene's in one word; where a scene holds over ten, there are
    as many others as it holds. Shuffled.
    """
    found = []
    for k, scene in enumerate(scenes):
        rng = np.random.default_rng([seed, k])
        present = sorted({Phrase(color=item.color, shape=item.label) for item in scene.objects})
        far = [p for p in COLOR_PHRASES if p not in present]
        near = [p for p in far if any(p.color == q.color or p.shape == q.shape for q in present)]
        wanted = max(MAX_PHRASES - len(present), len(present))
        chosen = [near[i] for i in rng.permutation(len(near))[: wanted // 2]]
        others = [far[i] for i in rng.permutation(len(far)) if far[i] not in chosen]
        chosen += others[: wanted - len(chosen)]
        row = [*present, *chosen]
        found.append([row[i] for i in rng.permutation(len(row))])
    return found


def ways(scenes: Sequence[Scene]) -> dict[str, tuple[tuple[Phrase, ...], list[list[Phrase]]]]:
    """Per way of asking the categories and each scene's phrases."""
    held_out = (*HELD_OUT_COLORS, *HELD_OUT_FILLS)
    return {
        "shapes": (SHAPE_PHRASES, [list(SHAPE_PHRASES)] * len(scenes)),
        "colors": (COLOR_PHRASES, color_prompts(scenes)),
        "held_out": (held_out, [list(held_out)] * len(scenes)),
    }


@torch.no_grad()
def predict(
    forward: Forward,
    scenes: Sequence[Scene],
    prompts: Sequence[Sequence[Phrase]],
    categories: Sequence[Phrase],
    device: torch.device,
    batch: int = 50,
) -> list[dict]:
    """COCO result rows.

    ``forward`` maps pixels, mask, input ids and attention mask to logits (B, Q, T) and boxes (B, Q, 4).
    """
    index = {phrase: k for k, phrase in enumerate(categories)}
    small = [resize(scene.image) for scene in scenes]
    wide = [image.shape[1] >= image.shape[0] for image in small]
    results = []
    for side in (True, False):
        members = [k for k in range(len(scenes)) if wide[k] == side]
        for start in range(0, len(members), batch):
            part = members[start : start + batch]
            pixels, mask = (torch.from_numpy(x).to(device) for x in stack([small[k] for k in part]))
            most = max(1, max(len(prompts[k]) for k in part))
            rows = np.full((len(part), most, 3), -1)
            for row, k in enumerate(part):
                rows[row, : len(prompts[k])] = [numbers(p) for p in prompts[k]]
            asked = np.arange(most) < np.array([[len(prompts[k])] for k in part])
            text = write(rows, asked)
            ids, attention = (torch.from_numpy(x).to(device) for x in (text.input_ids, text.attention_mask))
            logits, boxes = forward(normalize(pixels, mask), mask.long(), ids, attention)
            tokens = logits.float().sigmoid()[..., : ids.shape[1]]
            owner = torch.from_numpy(text.owner).to(device)[:, None]
            scores = torch.stack([tokens.masked_fill(owner != p, -1).amax(-1) for p in range(most)], -1)
            best, flat = scores.flatten(1).topk(min(TOP_K, scores[0].numel()))
            query = flat.div(most, rounding_mode="floor")
            chosen = boxes.float().gather(1, query[..., None].expand(-1, -1, 4)).cpu().numpy()
            found, phrase = best.cpu().numpy(), (flat % most).cpu().numpy()
            for row, k in enumerate(part):
                height, width = scenes[k].image.shape[:2]
                for (cx, cy, w, h), score, p in zip(
                    chosen[row] * (width, height, width, height), found[row], phrase[row], strict=True
                ):
                    if score < 0:  # a phrase slot that this scene's prompt does not use
                        continue
                    results.append(result_row(k, index[prompts[k][p]], (cx, cy, w, h), score))
    return results


def average_precision(scenes: Sequence[Scene], categories: Sequence[Phrase], results: list[dict]) -> dict[str, object]:
    """AP over IoU 0.50..0.95, AP50, AP75, AP by object size and per category (COCO's rules)."""

    def named(item: SceneObject) -> list[int]:
        return [number for number, phrase in enumerate(categories) if phrase.matches(item)]

    document = coco_truth(scenes, [phrase.text() for phrase in categories], named)
    scores, each = coco_scores(document, results)
    return scores | {"objects": len(document["annotations"]), "per_phrase": each}


def evaluate(forward: Forward, scenes: Sequence[Scene], device: torch.device, batch: int = 50) -> dict[str, dict[str, object]]:
    """All three ways of asking; `held_out` also has the mean AP of its pairs of colour and of fill."""
    found = {}
    for name, (categories, prompts) in ways(scenes).items():
        results = predict(forward, scenes, prompts, categories, device, batch)
        found[name] = average_precision(scenes, categories, results)
    each: dict = found["held_out"]["per_phrase"]  # type: ignore[assignment]
    for name, phrases in (("ap_colors", HELD_OUT_COLORS), ("ap_fills", HELD_OUT_FILLS)):
        values = [each[p.text()] for p in phrases if p.text() in each]
        found["held_out"][name] = round(float(np.mean(values)), 4) if values else None
    del found["colors"]["per_phrase"]  # 144 of them
    return found


def score_model(model: nn.Module, scenes: list[Scene]) -> dict[str, object]:
    def forward(pixels: Tensor, mask: Tensor, ids: Tensor, attention: Tensor) -> tuple[Tensor, Tensor]:
        out = model(pixel_values=pixels, pixel_mask=mask, input_ids=ids, attention_mask=attention)
        return out.logits, out.pred_boxes

    return dict(evaluate(forward, scenes, torch.device("cpu"), batch=10))


if __name__ == "__main__":
    evaluate_folder(
        __doc__.splitlines()[0],
        script="evaluate_phrases.py",
        name="held_out_scenes",
        load=transformers.AutoModelForZeroShotObjectDetection.from_pretrained,
        score=score_model,
    )
