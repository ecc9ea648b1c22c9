"""RT-DETR's loss and denoising queries over padded batches.

The same terms as the loss in transformers (varifocal, L1, generalised IoU; every decoder
layer, the encoder's proposals and the denoising queries), but all layers and images at once:
one cost tensor is built on the GPU and one copy goes to the host for the assignment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

CLASS_COST, L1_COST, GIOU_COST = 2.0, 5.0, 2.0
L1_WEIGHT, GIOU_WEIGHT = 5.0, 2.0
ALPHA, GAMMA = 0.75, 2.0


@dataclass(frozen=True, slots=True)
class Targets:
    """Labels of a batch of B images, padded to the M objects of the fullest one.

    ``classes`` (B, M) int64, ``boxes`` (B, M, 4) float32 as (cx, cy, w, h) in 0..1, ``valid``
    (B, M) bool, all on the model's device; ``counts`` holds the B object counts on the host.
    """

    classes: Tensor
    boxes: Tensor
    valid: Tensor
    counts: list[int]


def _corners(boxes: Tensor) -> Tensor:
    center, half = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat([center - half, center + half], dim=-1)


def _iou_and_giou(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """IoU and generalised IoU of boxes (..., 4) cxcywh that broadcast against each other."""
    a, b = _corners(a), _corners(b)
    area_a = (a[..., 2] - a[..., 0]) * (a[..., 3] - a[..., 1])
    area_b = (b[..., 2] - b[..., 0]) * (b[..., 3] - b[..., 1])
    inner = torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])
    outer = torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])
    shared = inner.clamp(min=0).prod(-1)
    union = (area_a + area_b - shared).clamp(min=1e-9)
    iou = shared / union
    hull = outer.prod(-1).clamp(min=1e-9)
    return iou, iou - (hull - union) / hull


@torch.no_grad()
def match(logits: Tensor, boxes: Tensor, targets: Targets) -> Tensor:
    """Hungarian assignment for S prediction sets at once.

    ``logits`` (S, B, Q, C), ``boxes`` (S, B, Q, 4); returns (S, B, M) int64, the query that
    each target got (0 for padding).
    """
    sets, batch, queries = logits.shape[:3]
    wanted = targets.classes[None, :, None, :].expand(sets, -1, queries, -1)
    prob = logits.sigmoid().gather(-1, wanted)
    negative = 0.75 * prob**2 * -(1 - prob + 1e-8).log()
    positive = 0.25 * (1 - prob) ** 2 * -(prob + 1e-8).log()
    ours, theirs = boxes[:, :, :, None], targets.boxes[None, :, None]
    cost = CLASS_COST * (positive - negative)
    cost += L1_COST * (ours - theirs).abs().sum(-1)
    cost -= GIOU_COST * _iou_and_giou(ours, theirs)[1]
    table = torch.nan_to_num(cost.transpose(2, 3), nan=1e6, posinf=1e6, neginf=-1e6).cpu().numpy()
    found = np.zeros((sets, batch, targets.classes.shape[1]), dtype=np.int64)
    for image, count in enumerate(targets.counts):
        if count:
            for k in range(sets):
                found[k, image, :count] = linear_sum_assignment(table[k, image, :count])[1]
    return torch.from_numpy(found).to(logits.device)


def set_loss(logits: Tensor, boxes: Tensor, matched: Tensor, targets: Targets, boxes_total: float) -> dict[str, Tensor]:
    """Weighted losses, summed over S sets.

    ``logits`` (S, B, N, C), ``boxes`` (S, B, N, 4), ``matched`` (S, B, M) int64 (see
    :func:`match`), ``boxes_total`` the number of targets that the sums are divided by.
    """
    valid = targets.valid[None].to(boxes.dtype)
    ours = boxes.gather(2, matched[..., None].expand(-1, -1, -1, 4))
    theirs = targets.boxes[None].expand_as(ours)
    iou, giou = _iou_and_giou(ours, theirs)
    l1 = ((ours - theirs).abs().sum(-1) * valid).sum() / boxes_total
    overlap = ((1 - giou) * valid).sum() / boxes_total

    # Padding adds zeros at query 0, so no row has to be picked out (which would wait for the GPU).
    sets, batch, _ = matched.shape
    set_index = torch.arange(sets, device=matched.device)[:, None, None].expand_as(matched)
    image_index = torch.arange(batch, device=matched.device)[None, :, None].expand_as(matched)
    where = (set_index, image_index, matched, targets.classes[None].expand_as(matched))
    hot = torch.zeros_like(logits).index_put_(where, valid.expand_as(iou), accumulate=True)
    quality = iou.detach().clamp(0, 1) * valid
    score = torch.zeros_like(logits).index_put_(where, quality, accumulate=True)
    with torch.no_grad():
        weight = ALPHA * logits.sigmoid() ** GAMMA * (1 - hot) + score
    vfl = F.binary_cross_entropy_with_logits(logits, score, weight=weight, reduction="sum")
    return {"vfl": vfl / boxes_total, "l1": L1_WEIGHT * l1, "giou": GIOU_WEIGHT * overlap}


def repeat_targets(targets: Targets, groups: int) -> Targets:
    """The same targets ``groups`` times over, for the groups of denoising queries."""
    return Targets(
        targets.classes.repeat(1, groups),
        targets.boxes.repeat(1, groups, 1),
        targets.valid.repeat(1, groups),
        [count * groups for count in targets.counts],
    )


def denoising_queries(
    targets: Targets,
    num_classes: int,
    num_queries: int,
    class_embed: nn.Module,
    num_denoising_queries: int = 100,
    label_noise_ratio: float = 0.5,
    box_noise_scale: float = 1.0,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, dict | None]:
    """Contrastive denoising queries of RT-DETR for padded targets.

    Takes the place of the function of the model's module, with its signature and results: the
    stock one loops over images in Python and waits for the GPU. Per group come M queries
    with small box noise (positives) and M with large noise (negatives).
    """
    batch, objects = targets.classes.shape
    if num_denoising_queries <= 0 or max(targets.counts) == 0:
        return None, None, None, None
    device = targets.boxes.device
    groups = max(1, num_denoising_queries // objects)
    shape = (batch, groups, 2, objects)
    valid = targets.valid[:, None, None].expand(shape)
    classes = targets.classes[:, None, None].expand(shape)
    padding = torch.full_like(classes, num_classes)
    random_class = torch.randint(0, num_classes, shape, device=device)
    swap = torch.rand(shape, device=device) < 0.5 * label_noise_ratio
    classes = torch.where(valid, torch.where(swap, random_class, classes), padding)

    boxes = targets.boxes[:, None, None].expand(*shape, 4)
    reach = boxes[..., 2:].repeat(1, 1, 1, 1, 2) * 0.5 * box_noise_scale
    amount = torch.rand(*shape, 4, device=device)
    amount = amount + torch.tensor([0.0, 1.0], device=device)[:, None, None]
    sign = torch.randint(0, 2, (*shape, 4), device=device) * 2.0 - 1.0
    noisy = (_corners(boxes) + amount * sign * reach).clamp(0, 1)
    low, high = noisy[..., :2], noisy[..., 2:]
    noisy = torch.cat([(low + high) / 2, high - low], dim=-1).clamp(1e-5, 1 - 1e-5)

    total = groups * 2 * objects
    size = total + num_queries
    owner = torch.arange(size, device=device).div(2 * objects, rounding_mode="floor")
    owner[total:] = -1  # the matched queries see only each other, a group also sees them
    hidden = (owner[:, None] != owner[None, :]) & (owner[None, :] != -1)
    mask = torch.zeros(size, size, device=device).masked_fill(hidden, -torch.inf)
    meta = {"dn_num_group": groups, "dn_num_split": [total, num_queries]}
    return (
        class_embed(classes.reshape(batch, total)),
        torch.logit(noisy).reshape(batch, total, 4),
        mask,
        meta,
    )


class Outputs(Protocol):
    """What is read of the outputs of `RTDetrV2Model` in training.

    intermediate_logits (B, L, N, C), intermediate_reference_points (B, L, N, 4): of L layers; enc_topk_logits (B, Q, C), enc_topk_bboxes
    (B, Q, 4): of the encoder's proposals. denoising_meta_values: where the groups of denoising queries lie; None without such queries.
    """

    intermediate_logits: Tensor
    intermediate_reference_points: Tensor
    enc_topk_logits: Tensor
    enc_topk_bboxes: Tensor
    denoising_meta_values: dict[str, Any] | None


def detection_loss(outputs: Outputs, targets: Targets) -> dict[str, Tensor]:
    """All losses of one forward pass of ``RTDetrV2Model``; float32 scalars to be summed."""
    logits = outputs.intermediate_logits.transpose(0, 1).float()  # (L, B, N, C)
    boxes = outputs.intermediate_reference_points.transpose(0, 1).float()
    total = float(max(1, sum(targets.counts)))
    losses: dict[str, Tensor] = {}
    meta = outputs.denoising_meta_values
    if meta is not None:
        split, groups = meta["dn_num_split"], meta["dn_num_group"]
        dn_logits, logits = logits.split(split, dim=2)
        dn_boxes, boxes = boxes.split(split, dim=2)
        objects = targets.classes.shape[1]
        group = torch.arange(groups, device=logits.device)[:, None] * 2 * objects
        index = (group + torch.arange(objects, device=logits.device)).flatten()
        index = index.expand(*dn_logits.shape[:2], -1)
        noised = set_loss(dn_logits, dn_boxes, index, repeat_targets(targets, groups), total * groups)
        losses.update({f"{name}_denoising": value for name, value in noised.items()})
    logits = torch.cat([logits, outputs.enc_topk_logits.float()[None]])
    boxes = torch.cat([boxes, outputs.enc_topk_bboxes.float()[None]])
    losses.update(set_loss(logits, boxes, match(logits, boxes, targets), targets, total))
    return losses
