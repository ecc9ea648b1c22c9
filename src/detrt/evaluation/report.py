"""The report of a comparison of two models."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.matching import Gate, ImageMatch, few, mismatched
from ..detections import Detections
from ..errors import number_of, one_line
from ..spec import Precision
from .coco import SEGM
from .divergence import Divergence


@dataclass(frozen=True, slots=True)
class Example:
    """An image with the detections of both sides, for the HTML report."""

    name: str
    image: NDArray[np.uint8]
    reference: Detections
    candidate: Detections
    matched: ImageMatch


@dataclass(frozen=True, slots=True)
class Check:
    """One line of a verdict. measured, allowed: as text; ok: inside the gate; decides: whether the verdict depends on it."""

    name: str
    measured: str
    allowed: str = ""
    ok: bool = True
    decides: bool = True


@dataclass(frozen=True, slots=True)
class TokenMatch:
    """One image by the rule of Grounding DINO's processor: scores over all tokens, labels of token text.

    wrong_labels: (candidate's, transformers') of each pair of detections whose labels differ by more than tokens at the threshold.
    """

    image: ImageMatch
    wrong_labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class PublishedMatch:
    """The candidate compared with the checkpoint that has transformers' own processor before and after it.

    oracle: the class of that processor. pixels: largest difference of pixels, relative to the largest value. images: one
    ImageMatch per image of the end result; with a prompt, classes are its phrases. by_tokens: the same images by the rule of
    Grounding DINO's processor, where the candidate returns a score for each token. differences: what is not equal, as text.
    tolerance: of pixels.
    """

    oracle: str
    tolerance: float
    pixels: float | None = None
    images: tuple[ImageMatch, ...] = ()
    by_tokens: tuple[TokenMatch, ...] = ()
    differences: tuple[str, ...] = ()

    @property
    def unmatched(self) -> tuple[int, int, int]:
        """(missing, extra, compared) detections of the end result."""
        return _counts(self.images)

    @property
    def wrong_labels(self) -> list[tuple[str, str]]:
        """(candidate's, transformers') labels that differ."""
        return [pair for one in self.by_tokens for pair in one.wrong_labels]

    def failures(self, gate: Gate) -> list[str]:
        """Failed checks as text."""
        of_tokens = [one.image for one in self.by_tokens]
        found = [
            *self.differences,
            *self._unequal(self.images, "", gate),
            *self._unequal(of_tokens, " with scores of tokens", gate),
        ]
        if wrong := self.wrong_labels:
            ours, theirs = wrong[0]
            found.append(
                f"against transformers' {self.oracle}, {len(wrong)} of {number_of(_counts(of_tokens)[2], 'text label')} differ: {ours!r} here, "
                f"{theirs!r} there"
            )
        return found

    def _unequal(self, images: Sequence[ImageMatch], what: str, gate: Gate) -> list[str]:
        missing, extra, compared = _counts(images)
        found, against = [], f"against transformers' {self.oracle}{what}"
        if max(missing, extra) > gate.unmatched * compared:
            found.append(f"{against}, {number_of(missing, 'detection')} missing and {extra} extra of {compared}")
        if gate.mismatched:
            if not few(count := sum(map(mismatched, images)), compared, gate.mismatched):
                found.append(f"{against}, {_beyond(count, compared, gate)}")
            return found
        for name in ("box_px", "score"):
            worst = max((getattr(one, name) for one in images), default=0.0)
            if not worst <= getattr(gate, name):
                found.append(f"{against}, {name} differs by {worst:.3g}, allowed {getattr(gate, name):g}")
        return found


def _beyond(count: int, compared: int, gate: Gate) -> str:
    return (
        f"{count} of {number_of(compared, 'detection')} are beyond {gate.box_px:g} px or a score difference of {gate.score:g}, or have no partner; "
        f"allowed {gate.mismatched:.0%}"
    )


def _counts(images: Sequence[ImageMatch]) -> tuple[int, int, int]:
    """(missing, extra, compared) detections."""
    missing, extra, compared = (sum(getattr(one, name) for one in images) for name in ("missing", "extra", "compared"))
    return missing, extra, compared


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of `verify`.

    Attributes:
        reference, candidate: runtime of each side, such as "torch-cpu".
        sources: (reference's, candidate's) file, folder or checkpoint, with the SHA-256 of its weights where it is a checkpoint.
        gate: the tolerances of the comparison.
        images: one ImageMatch per image.
        classes: class name -> ImageMatch over all images, most compared first.
        tensors: one row per run and output: batch, height, width, output, relative error (selections forced); empty where the
            selections of the candidate cannot be read (engines without `return_selections`).
        precision: the candidate's.
        facts: differences of the specs, as text.
        slots, padding: rows of `batching.slot_rows` and `batching.padding_rows`.
        ap: {"reference", "candidate"} -> the twelve COCO metrics, with ground truth only.
        divergence: the first node that differs, if it was searched.
        names: of the images.
        broken: errors of the candidate, if it failed on some images.
        published: the comparison with transformers' own processing; None if that was not run.
        precision_map: module path -> type -> nodes.
        scores: (reference's, candidate's) of each pair of detections, 0 if unmatched; not part of `to_dict`.
        examples: the worst images; not part of `to_dict`.
    """

    reference: str
    candidate: str
    gate: Gate
    images: tuple[ImageMatch, ...]
    tensors: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)
    precision: str = "fp32"
    facts: tuple[str, ...] = ()
    slots: tuple[dict[str, Any], ...] = ()
    padding: tuple[dict[str, Any], ...] = ()
    ap: dict[str, Any] | None = None
    divergence: Divergence | None = None
    names: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    published: PublishedMatch | None = None
    precision_map: dict[str, dict[str, int]] = field(default_factory=dict)
    classes: dict[str, ImageMatch] = field(default_factory=dict)
    sources: tuple[str, str] = ("", "")
    scores: tuple[tuple[float, float], ...] = field(default=(), repr=False, compare=False)
    examples: tuple[Example, ...] = field(default=(), repr=False, compare=False)

    @property
    def compared(self) -> int:
        return sum(m.compared for m in self.images)

    @property
    def missing(self) -> int:
        return sum(m.missing for m in self.images)

    @property
    def extra(self) -> int:
        return sum(m.extra for m in self.images)

    @property
    def mismatched(self) -> int:
        """Detections beyond a tolerance or without partner."""
        return sum(map(mismatched, self.images))

    @property
    def ap_loss(self) -> float | None:
        """Loss of AP of the candidate; negative if it gains."""
        if self.ap is None or self.ap["reference"]["AP"] is None or self.ap["candidate"]["AP"] is None:
            return None
        return self.ap["reference"]["AP"] - self.ap["candidate"]["AP"]

    @property
    def decider(self) -> str:
        """What decides in place of the checks that do not."""
        return "AP decides" if self._judged_by_ap else "their number decides"

    @property
    def _judged_by_ap(self) -> bool:
        return self.gate.ap_decides and self.ap_loss is not None

    @property
    def differences(self) -> list[str]:
        """Detections and tensors outside the gate, as text, whether or not they decide."""
        result = []
        if max(self.missing, self.extra) > self.gate.unmatched * self.compared:
            result.append(f"{number_of(self.missing, 'detection')} missing and {self.extra} extra of {self.compared} compared")
        if self.gate.mismatched:
            if not few(self.mismatched, self.compared, self.gate.mismatched):
                result.append(_beyond(self.mismatched, self.compared, self.gate))
            return result
        for name, worst in (("box_px", self.worst_box_px), ("score", self.worst_score), ("tensor", self.worst_tensor)):
            allowed = getattr(self.gate, name)
            if not worst <= allowed:
                result.append(f"{name} differs by {worst:.3g}, allowed {allowed:g}")
        if self.worst_mask_iou is not None and not self.worst_mask_iou >= self.gate.mask_iou:
            result.append(f"a mask has IoU {self.worst_mask_iou:.3g}, at least {self.gate.mask_iou:g} is allowed")
        return result

    @property
    def checks(self) -> list[Check]:
        """Measured and allowed values, in the order of the levels."""
        gate = self.gate
        decides = not self._judged_by_ap
        unmatched = f"{gate.unmatched:.0%} each" if gate.unmatched else "0 / 0"
        matched = max(self.missing, self.extra) <= gate.unmatched * self.compared
        result = [
            Check("fields of the spec that differ", str(len(self.facts)), "0", not self.facts),
            Check("detections compared", str(self.compared), "at least 1", self.compared > 0),
            Check("missing / extra", f"{self.missing} / {self.extra}", unmatched, matched, decides),
        ]
        if gate.mismatched:
            few_mismatched = few(self.mismatched, self.compared, gate.mismatched)
            result.append(
                Check(
                    "beyond a tolerance",
                    f"{self.mismatched} of {self.compared}",
                    f"{gate.mismatched:.0%}",
                    few_mismatched,
                    decides,
                )
            )
        each = decides and not gate.mismatched  # below FP32 the largest differences are shown
        for name, worst, allowed, shown, unit in (
            ("largest box difference", self.worst_box_px, gate.box_px, f"{self.worst_box_px:.4f} px", " px"),
            ("largest score difference", self.worst_score, gate.score, f"{self.worst_score:.2e}", ""),
            ("largest tensor difference", self.worst_tensor, gate.tensor, f"{self.worst_tensor:.2e}", ""),
        ):
            if "tensor" not in name or self.tensors:
                result.append(Check(name, shown, f"{allowed:g}{unit}", worst <= allowed, each))
        if (lowest := self.worst_mask_iou) is not None:
            result.append(Check("lowest mask IoU", f"{lowest:.4f}", f"{gate.mask_iou:g}", lowest >= gate.mask_iou, each))
        if self.slots:
            wrong = sum(not row["passed"] for row in self.slots)
            shapes = len({(row["batch"], row["height"], row["width"]) for row in self.slots})
            result.append(
                Check(f"wrong batch slots, {number_of(shapes, 'shape')}", f"{wrong} of {len(self.slots)}", "0", not wrong)
            )
        if self.padding:
            worst = max(row["error"] for row in self.padding)
            same = all(row["passed"] for row in self.padding)
            result.append(Check("effect of the padding's content", f"{worst:.2e}", f"{gate.tensor:g}", same))
        if self.published is not None:
            name, (missing, extra, _) = f"transformers' {self.published.oracle}", self.published.unmatched
            shown = "-" if self.published.pixels is None else f"{self.published.pixels:.1e}"
            result.append(Check(f"pixels against {name}", shown, f"{self.published.tolerance:g}", not self.published.differences))
            if self.published.images:
                same = not self.published.failures(gate)
                result.append(Check("missing / extra against its result", f"{missing} / {extra}", unmatched, same, decides))
            if self.published.by_tokens:
                wrong = len(self.published.wrong_labels)
                result.append(Check("text labels other than its", str(wrong), "0", not wrong, decides))
        if self.ap is not None:
            values = (self.ap[side]["AP"] for side in ("reference", "candidate"))
            shown = " -> ".join("-" if value is None else f"{value:.4f}" for value in values)
            lost = self.ap_loss
            kind = "mask AP" if self.ap.get("iou_type") == SEGM else "AP"
            name = f"{kind} on {number_of(self.ap['images'], 'annotated image')}"
            result.append(Check(name, shown, f"-{gate.ap:g}", lost is None or lost <= gate.ap))
        return result

    @property
    def failures(self) -> list[str]:
        """Failed checks as text; empty if the candidate passes."""
        judged_by_ap = self._judged_by_ap
        texts = [*self.broken, *(row.get("text") for row in (*self.tensors, *self.slots))]
        result = [*self.facts, *[_shorten(text) for text in texts if text][:1]]
        result += [] if judged_by_ap else self.differences
        if self.published is not None:
            result += self.published.differences if judged_by_ap else self.published.failures(self.gate)
        if (judged_by_ap or self.gate.mismatched) and not np.isfinite(self.worst_tensor):
            result.append("the outputs hold NaN or infinite values, or have other shapes")
        if wrong := [row for row in self.slots if not row["passed"]]:
            shown = ", ".join(sorted({_slot_name(row) for row in wrong})[:4])
            result.append(f"{len(wrong)} of {number_of(len(self.slots), 'batch slot')} differ from the same image alone: {shown}")
        if wrong := [row for row in self.padding if not row["passed"]]:
            result.append(f"the content of the padding changes the result ({wrong[0]['error']:.2g} relative)")
        if self.ap_loss is not None and not self.ap_loss <= self.gate.ap:
            result.append(f"AP falls by {self.ap_loss:.4f}, allowed {self.gate.ap:g}")
        if not self.compared:
            result.append("nothing was compared: the reference has no detections in these images")
        return result

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def verdict(self) -> str:
        """The result as text. Below FP32 it has the largest differences: the tolerances are wide there."""
        if not self.passed:
            return "DIFFERENT"
        if self.precision == Precision.FP32:
            return "the same detections"
        lost = "" if self.ap_loss is None else f", AP {-self.ap_loss:+.4f}"
        unmatched = f", {self.missing} missing, {self.extra} extra" if self.missing or self.extra else ""
        count = sum(m.beyond for m in self.images)
        beyond = f"{count} of {self.compared} beyond, " if count else ""
        return (
            f"within {Precision(self.precision).value.upper()} tolerances ({beyond}worst box {self.worst_box_px:.3g} px, worst score "
            f"{self.worst_score:.2g}{unmatched}{lost})"
        )

    @property
    def worst_box_px(self) -> float:
        return max((m.box_px for m in self.images), default=0.0)

    @property
    def worst_score(self) -> float:
        return max((m.score for m in self.images), default=0.0)

    @property
    def worst_mask_iou(self) -> float | None:
        """Lowest IoU of the masks of a pair; None of models without masks."""
        return min((m.mask_iou for m in self.images if m.mask_iou is not None), default=None)

    @property
    def worst_tensor(self) -> float:
        return max((row["error"] for row in self.tensors), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        names: tuple[str, ...] = ("reference", "candidate", "tensors", "notes", "precision", "facts", "slots", "padding", "ap")
        names += ("names", "broken", "precision_map", "sources")
        return {
            **{name: getattr(self, name) for name in names},
            "gate": asdict(self.gate),
            "images": [asdict(m) for m in self.images],
            "classes": {label: m.to_dict() for label, m in self.classes.items()},
            "divergence": None if self.divergence is None else self.divergence.to_dict(),
            "published": None if self.published is None else asdict(self.published),
            "compared": self.compared,
            "worst": {"box_px": self.worst_box_px, "score": self.worst_score, "tensor": self.worst_tensor},
            "ap_loss": self.ap_loss,
            "failures": self.failures,
            "passed": self.passed,
        }


def _shorten(text: str) -> str:
    """A message of a runtime without its source locations."""
    return one_line(re.sub(r"\s*(Status Message: )?/\S+\.(h|cc|cpp):\d+.*?\)\s", ": ", text), 400)


def _slot_name(row: dict[str, Any]) -> str:
    slot = "all slots" if row["slot"] < 0 else f"slot {row['slot']}"
    return f"{slot} of {row['batch']} at {row['height']}x{row['width']}"
