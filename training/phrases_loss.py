"""Losses of the prompted demo detector: which tokens a box belongs to, and where it is.

As in Grounding DINO (arXiv:2303.05499) a query scores every token of the prompt and an object is
positive for all tokens of every phrase that names it. Token scores are trained towards the IoU of
their box (the varifocal loss of RT-DETR, arXiv:2304.08069), boxes with L1 and generalised IoU. Each
decoder layer is matched one to one, the encoder's proposals four to one, denoising queries are fixed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from demo_loss import _corners, _iou_and_giou
from phrases_model import Outputs
from torch import Tensor, nn

CLASS_COST, L1_COST, GIOU_COST = 2.0, 5.0, 2.0
CLASS_WEIGHT, L1_WEIGHT, GIOU_WEIGHT, ATTRIBUTE_WEIGHT = 2.0, 5.0, 2.0, 0.3
ALPHA, GAMMA = 0.75, 2.0
POSITIONS_PER_OBJECT = 4  # encoder positions that learn one object
DENOISING_PAIRS = 48  # positive and as many negative denoising queries, shared by the groups


@dataclass(frozen=True, slots=True)
class Targets:
    """Named objects of B images, padded to M; T tokens.

    ``boxes`` (B, M, 4) float32 as (cx, cy, w, h) in 0..1, ``tokens`` (B, M, T) float32 with 1 for
    every token of a phrase that names the object, ``valid`` (B, M) bool, ``attributes`` (B, M, 3) int64 of
    colour, fill and shape, ``pure`` (B, M) bool: real, and no combination that is held out.
    """

    boxes: Tensor
    tokens: Tensor
    valid: Tensor
    attributes: Tensor
    pure: Tensor


def _costs(logits: Tensor, boxes: Tensor, targets: Targets) -> Tensor:
    """(S, B, M, N) cost of giving target m to prediction n; S layers, N predictions."""
    prob = logits.sigmoid()
    negative = 0.75 * prob**2 * -(1 - prob + 1e-8).log()
    positive = 0.25 * (1 - prob) ** 2 * -(prob + 1e-8).log()
    share = targets.tokens / targets.tokens.sum(-1, keepdim=True).clamp(min=1)
    cost = CLASS_COST * (share[None] @ (positive - negative).transpose(-1, -2))
    ours, theirs = boxes[:, :, None], targets.boxes[None, :, :, None]
    cost += L1_COST * (ours - theirs).abs().sum(-1)
    cost -= GIOU_COST * _iou_and_giou(ours, theirs)[1]
    return torch.nan_to_num(cost, nan=1e6, posinf=1e6, neginf=-1e6)


@torch.no_grad()
def match(logits: Tensor, boxes: Tensor, targets: Targets) -> Tensor:
    """One query for each target and layer, (S, B, M) int64 (some query for padding), cheapest pair first.

    Greedy in place of the Hungarian method: it stays on the GPU, which otherwise waits for the host in
    every step, and differs only where two targets want the same query.
    """
    table = _costs(logits, boxes, targets)
    sets, batch, objects, queries = table.shape
    table = table.masked_fill(~targets.valid[None, :, :, None], torch.inf).reshape(-1, objects, queries)
    found = torch.zeros(len(table), objects, dtype=torch.int64, device=table.device)
    for _ in range(objects):
        best = table.flatten(1).argmin(1, keepdim=True)  # the first element once only padding is left
        target, query = best.div(queries, rounding_mode="floor"), best % queries
        open_pair = table.flatten(1).gather(1, best).isfinite()
        found.scatter_(1, target, torch.where(open_pair, query, found.gather(1, target)))
        table.scatter_(1, target[..., None].expand(-1, -1, queries), torch.inf)
        table.scatter_(2, query[..., None].expand(-1, objects, -1), torch.inf)
    return found.view(sets, batch, objects)


@torch.no_grad()
def nearest_positions(logits: Tensor, boxes: Tensor, targets: Targets) -> Tensor:
    """(B, M * POSITIONS_PER_OBJECT) int64: the cheapest encoder positions of each target."""
    best = _costs(logits[None], boxes[None], targets)[0].topk(POSITIONS_PER_OBJECT, dim=-1, largest=False)[1]
    return best.flatten(1)


def repeat_targets(targets: Targets, times: int, each: bool = False) -> Targets:
    """Every row ``times`` over: as a whole, or with ``each`` one row after the other."""

    def again(x: Tensor) -> Tensor:
        return x.repeat_interleave(times, 1) if each else torch.cat([x] * times, 1)

    return Targets(*(again(getattr(targets, field.name)) for field in fields(targets)))


def set_loss(logits: Tensor, boxes: Tensor, matched: Tensor, targets: Targets, token_mask: Tensor) -> dict[str, Tensor]:
    """Weighted losses, summed over S layers.

    ``logits`` (S, B, N, T), ``boxes`` (S, B, N, 4), ``matched`` (S, B, M) int64, ``token_mask`` (B, T)
    float32. Token losses are divided by the number of positive tokens, box losses by that of objects.
    """
    valid = targets.valid[None].to(boxes.dtype)
    objects = valid.sum().clamp(min=1)
    ours = boxes.gather(2, matched[..., None].expand(-1, -1, -1, 4))
    iou, giou = _iou_and_giou(ours, targets.boxes[None])
    l1 = ((ours - targets.boxes[None]).abs().sum(-1) * valid).sum() / objects
    overlap = ((1 - giou) * valid).sum() / objects

    # (S, B, N, T) from (S, B, N, M) @ (B, M, T): rows of padding are zeros and add nothing.
    chosen = torch.zeros(*logits.shape[:3], matched.shape[-1], device=logits.device)
    chosen.scatter_(2, matched[:, :, None], valid[:, :, None].expand(len(matched), -1, -1, -1))
    quality = iou.detach().clamp(0, 1)[:, :, None]
    with torch.no_grad():
        hot = (chosen @ targets.tokens[None]).clamp(max=1)
        score = ((chosen * quality) @ targets.tokens[None]).clamp(max=1)
        weight = ALPHA * logits.sigmoid() ** GAMMA * (1 - hot) + score
        weight = weight * token_mask[None, :, None]
    positive = (targets.tokens.sum(-1) * valid[0]).sum().clamp(min=1)
    tokens = F.binary_cross_entropy_with_logits(logits, score, weight=weight, reduction="sum") / positive
    return {"token": CLASS_WEIGHT * tokens, "l1": L1_WEIGHT * l1, "giou": GIOU_WEIGHT * overlap}


@dataclass(frozen=True, slots=True)
class Noise:
    """Denoising queries: ``boxes`` (B, D, 4), ``hidden`` (D + Q, D + Q) bool, ``groups`` of 2 M queries."""

    boxes: Tensor
    hidden: Tensor
    groups: int


def noised_boxes(targets: Targets, queries: int) -> Noise:
    """Contrastive denoising queries as in DINO (arXiv:2203.03605), without labels.

    Per group come M boxes with small noise, which learn their object, and M with large noise, which
    learn that they are none. Their contents are the model's own queries, so no weight is added.
    """
    batch, objects = targets.valid.shape
    device = targets.boxes.device
    groups = max(1, DENOISING_PAIRS // objects)
    boxes = targets.boxes[:, None, None].expand(batch, groups, 2, objects, 4)
    reach = boxes[..., 2:].repeat(1, 1, 1, 1, 2) * 0.5
    amount = torch.rand(boxes.shape, device=device) + torch.arange(2, device=device)[:, None, None]
    sign = torch.randint(0, 2, boxes.shape, device=device) * 2.0 - 1.0
    noisy = (_corners(boxes) + amount * sign * reach).clamp(0, 1)
    low, high = noisy[..., :2], noisy[..., 2:]
    noisy = torch.cat([(low + high) / 2, (high - low).abs()], dim=-1).clamp(1e-4, 1 - 1e-4)
    total = groups * 2 * objects
    owner = torch.arange(total + queries, device=device).div(2 * objects, rounding_mode="floor")
    owner[total:] = -1  # the matched queries see only each other, a group also sees them
    hidden = (owner[:, None] != owner[None, :]) & (owner[None, :] != -1)
    return Noise(noisy.reshape(batch, total, 4), hidden, groups)


class AttributeHeads(nn.Module):
    """Colour, fill and shape of an object from its features, each by itself; thrown away after training.

    They teach the features what there is to see before the words have found their meaning. Objects of a
    held-out combination are left out, so nothing but single words is ever said about those.
    """

    def __init__(self, width: int, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.decoder = nn.Linear(width, sum(sizes))
        self.encoder = nn.Linear(width, sum(sizes))
        self.sizes = sizes

    def loss(self, head: nn.Linear, states: Tensor, matched: Tensor, targets: Targets) -> Tensor:
        """Mean cross entropy of objects, summed over S layers; ``states`` (S, B, N, C)."""
        chosen = states.gather(2, matched[..., None].expand(-1, -1, -1, states.shape[-1]))
        weight = (targets.pure & targets.valid)[None].expand(matched.shape).float()
        total = states.new_zeros(())
        for k, part in enumerate(head(chosen).split(self.sizes, -1)):
            wanted = targets.attributes[None, :, :, k].expand(matched.shape)
            each = F.cross_entropy(part.flatten(0, 2), wanted.flatten(), reduction="none")
            total = total + (each * weight.flatten()).sum()
        return ATTRIBUTE_WEIGHT * total * len(matched) / weight.sum().clamp(min=1)


def detection_loss(
    out: Outputs,
    targets: Targets,
    noise: Noise | None,
    token_mask: Tensor,
    heads: AttributeHeads | None = None,
) -> dict[str, Tensor]:
    """All losses of one forward pass; float32 scalars to be summed. ``token_mask`` (B, T) float32."""
    logits, boxes, states = out.logits, out.boxes, out.states
    losses: dict[str, Tensor] = {}
    if noise is not None:
        total, objects = noise.boxes.shape[1], targets.boxes.shape[1]
        group = torch.arange(noise.groups, device=logits.device)[:, None] * 2 * objects
        index = (group + torch.arange(objects, device=logits.device)).flatten().expand(*logits.shape[:2], -1)
        repeated = repeat_targets(targets, noise.groups)
        found = set_loss(logits[:, :, :total], boxes[:, :, :total], index, repeated, token_mask)
        if heads is not None:
            found["attribute"] = heads.loss(heads.decoder, states[:, :, :total], index, repeated)
        losses |= {f"{name}_denoising": value for name, value in found.items()}
        logits, boxes, states = logits[:, :, total:], boxes[:, :, total:], states[:, :, total:]
    matched = match(logits.detach(), boxes.detach(), targets)
    losses |= set_loss(logits, boxes, matched, targets, token_mask)
    near = nearest_positions(out.encoder_logits.detach(), out.encoder_boxes.detach(), targets)[None]
    several = repeat_targets(targets, POSITIONS_PER_OBJECT, each=True)
    found = set_loss(out.encoder_logits[None], out.encoder_boxes[None], near, several, token_mask)
    if heads is not None:
        losses["attribute"] = heads.loss(heads.decoder, states, matched, targets)
        found["attribute"] = heads.loss(heads.encoder, out.proposals[None], near, several)
    return losses | {f"{name}_encoder": value for name, value in found.items()}
