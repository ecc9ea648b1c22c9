"""Small calls of the deformable attention kernel, for a memory checker:

compute-sanitizer --tool memcheck python tests/gpu/sanitize_msda.py
"""

from __future__ import annotations

import torch
from test_msda_cuda import on_gpu, tensors

from detrt.kernels import ms_deform_attn, ms_deform_attn_fused


def main() -> None:
    for name in ("head 5", "head 14", "rf-detr", "d-fine", "one cell", "many points"):
        for dtype in (torch.float16, torch.float32):
            value, shapes, locations, weights, points = on_gpu(*tensors(name, dtype, spread=3.0))
            locations[0, 0], locations[0, 1] = float("nan"), 1e30
            ms_deform_attn(value, shapes, locations, weights, points)
            ms_deform_attn(value, shapes, locations, weights, points, True)
            ms_deform_attn(value, shapes * 2, locations, weights, points)
            references = torch.rand(1, locations.shape[1], 1, 4, device="cuda")
            ms_deform_attn_fused(value, shapes, references, locations, weights, points)
    torch.cuda.synchronize()
    print("ran")


if __name__ == "__main__":
    main()
