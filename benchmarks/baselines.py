"""What transformers itself gives: eager, torch.compile, and compiled with a plain Triton op in place of its deformable attention.

Of models that transformers lacks, detrt's own PyTorch module takes its place, in 16 bits with autocast.

The last one is what a skilled user writes in an afternoon: one `torch.library` op around a plain kernel, so that the model
compiles without a graph break.
"""

from __future__ import annotations

import os
import sys

import torch

KINDS = ("eager", "compile", "patched")
V2 = "multi_scale_deformable_attention_v2"  # of modules of transformers that have such a function


def transformers_job(source, spec, row, kind, precision, batch, tokens):
    dtype = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    module = source.module
    for part in module.modules():
        config = getattr(part, "config", None)
        if getattr(type(part), "_supports_sdpa", False) and getattr(config, "_attn_implementation", None) == "eager":
            config._attn_implementation = "sdpa"
    module = module.to("cuda", dtype)
    if type(module).__module__.startswith("detrt."):  # its rotary positions are FP32, which autocast rounds before matmuls
        module.forward = torch.autocast("cuda", dtype, enabled=dtype != torch.float32)(module.forward)
    pixels = torch.rand(batch, 3, row["height"], row["width"], device="cuda", dtype=dtype)
    feeds = {"pixel_values": pixels}
    if spec.text is not None:
        from detrt.models.example_inputs import example_ids

        ids, mask = example_ids(source, batch, tokens)
        ids, mask = torch.from_numpy(ids).cuda(), torch.from_numpy(mask).cuda()
        if spec.text.kind == "classes":  # OmDet-Turbo: three names for each image, and a task
            names = [torch.from_numpy(part).cuda().repeat(batch, 1) for part in example_ids(source, 3, 7, seed=batch)]
            feeds |= {"classes_input_ids": names[0], "classes_attention_mask": names[1], "tasks_input_ids": ids}
            feeds |= {"tasks_attention_mask": mask, "classes_structure": torch.full((batch,), 3)}
        else:
            feeds |= {"input_ids": ids, "attention_mask": mask}
    row["graph"] = False
    want = None if kind == "eager" else outputs(module(**feeds))
    run = module
    if kind == "patched":
        row["patched"] = patch(module)
        module(**feeds)  # makes the tensors of sizes, which must not lie in the memory of a CUDA graph
    if kind != "eager":
        run = torch.compile(module, mode="reduce-overhead")
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            run(**feeds)

    def step():
        if kind != "eager":
            torch.compiler.cudagraph_mark_step_begin()
        return outputs(run(**feeds), copied=False)

    return step, want, (), row


def outputs(found, copied=True):
    """(logits, boxes), and mask logits where there are some; FP32 copies of them where the model's own may be written over."""
    names = [("logits", "decoder_class_logits", "pred_logits"), ("pred_boxes", "decoder_coord_logits")]
    tensors = [next(getattr(found, n) for n in some if getattr(found, n, None) is not None) for some in names]
    tensors += [masks for masks in (getattr(found, "pred_masks", None),) if masks is not None]
    return [t.float().clone() for t in tensors] if copied else tensors


def patch(model) -> int:
    """Replace the sampling of every deformable attention of a transformers model; how many there are."""
    op = _op()

    def library(self, value, value_spatial_shapes, value_spatial_shapes_list, level_start_index, places, weights, im2col_step):
        points = places.shape[4]
        sides = [int(side) for pair in value_spatial_shapes_list for side in pair]
        return op(value, places.flatten(3, 4), weights.flatten(3), sides, [points] * places.shape[3])

    def second(value, value_spatial_shapes, sampling_locations, attention_weights, num_points_list, method="default"):
        sides = [int(side) for pair in value_spatial_shapes for side in pair]
        return op(value, sampling_locations, attention_weights, sides, list(num_points_list))

    count = 0
    for module in model.modules():
        cls, home = type(module), sys.modules[type(module).__module__]
        if cls.__name__ == "MultiScaleDeformableAttention":
            cls.forward = library
            count += 1
        elif hasattr(module, "ms_deformable_attn_core"):
            module.ms_deformable_attn_core = second
            count += 1
        elif cls.__name__.endswith("MultiscaleDeformableAttention") and hasattr(home, V2):
            setattr(home, V2, second)
            count += 1
    return count


def _op():
    from plain_kernel import plain_msda

    sizes: dict = {}

    @torch.library.custom_op("afternoon::msda", mutates_args=())
    def msda(
        value: torch.Tensor, places: torch.Tensor, weights: torch.Tensor, sides: list[int], points: list[int]
    ) -> torch.Tensor:
        key = (*sides, value.device)
        if key not in sizes:
            sizes[key] = torch.tensor(sides, device=value.device).view(-1, 2)
        return plain_msda(value.contiguous(), sizes[key], places.contiguous(), weights.contiguous(), points)

    @msda.register_fake
    def _(value, places, weights, sides, points):
        return value.new_empty(value.shape[0], places.shape[1], value.shape[2] * value.shape[3])

    return msda


def before_import(kind: str) -> None:
    if kind == "patched":
        os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"
