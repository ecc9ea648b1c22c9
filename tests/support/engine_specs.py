"""Two specs for the tests of the engine builder: padded images of any size, and one size. Needs no library."""

from detrt.spec import DecodeSpec, InputSpec, ModelSpec

EDGE = ModelSpec(
    "detr",
    InputSpec("shortest_edge", 64, 96, shortest_edge=64, longest_edge=120, mask=True, dynamic=True, multiple_of=16),
    DecodeSpec("softmax", "query", 2, 2, 2),
    {0: "a"},
)
FIXED = ModelSpec("rt_detr", InputSpec("stretch", 64, 64), DecodeSpec("sigmoid", "topk", 2, 2, 2), {0: "a"})
