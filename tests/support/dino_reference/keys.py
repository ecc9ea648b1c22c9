"""Names and shapes of the tensors in original DINO and Co-DINO checkpoints, from their configs.

`python -m tests.cpu.dino_reference.keys` writes the lists of the published models to tests/data/keys/.
Sources: IDEA-Research/DINO (models/dino/*.py, config/DINO/*.py), open-mmlab/mmdetection 3.3
(mmdet/models/detectors/dino.py, configs/dino) and Sense-X/Co-DETR (projects/models, projects/configs/co_dino).
"""

import json
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "data" / "keys"
R50 = {"kind": "resnet", "depths": (3, 4, 6, 3), "width": 64}
SWIN_L = {"kind": "swin", "depths": (2, 2, 18, 2), "width": 192, "heads": (6, 12, 24, 48), "window": 12}


def both(name, out, *rest):
    return {f"{name}.weight": [out, *rest], f"{name}.bias": [out]}


def norm(name, size):
    return both(name, size)


def resnet(p, depths, width, counter):
    keys = {}

    def bn(name, size):
        keys.update({f"{p}{name}.{leaf}": [size] for leaf in ("weight", "bias", "running_mean", "running_var")})
        if counter:
            keys[f"{p}{name}.num_batches_tracked"] = []

    keys[f"{p}conv1.weight"] = [width, 3, 7, 7]
    bn("bn1", width)
    channels = width
    for stage, depth in enumerate(depths):
        inner = width * 2**stage
        for block in range(depth):
            name = f"layer{stage + 1}.{block}."
            for i, (out, size, kernel) in enumerate([(inner, channels, 1), (inner, inner, 3), (4 * inner, inner, 1)]):
                keys[f"{p}{name}conv{i + 1}.weight"] = [out, size, kernel, kernel]
                bn(f"{name}bn{i + 1}", out)
            if not block:
                keys[f"{p}{name}downsample.0.weight"] = [4 * inner, channels, 1, 1]
                bn(f"{name}downsample.1", 4 * inner)
            channels = 4 * inner
    return keys


def swin(p, depths, width, heads, window, stages, mmdet):
    embed, part = ("patch_embed.projection", "stages") if mmdet else ("patch_embed.proj", "layers")
    keys = {**both(f"{p}{embed}", width, 3, 4, 4), **norm(f"{p}patch_embed.norm", width)}
    for stage, depth in enumerate(depths):
        dim = width * 2**stage
        for block in range(depth):
            name = f"{p}{part}.{stage}.blocks.{block}."
            attn = f"{name}attn.w_msa" if mmdet else f"{name}attn"
            first, second = ("ffn.layers.0.0", "ffn.layers.1") if mmdet else ("mlp.fc1", "mlp.fc2")
            keys[f"{attn}.relative_position_bias_table"] = [(2 * window - 1) ** 2, heads[stage]]
            keys[f"{attn}.relative_position_index"] = [window**2, window**2]
            keys |= norm(f"{name}norm1", dim) | norm(f"{name}norm2", dim)
            keys |= both(f"{attn}.qkv", 3 * dim, dim) | both(f"{attn}.proj", dim, dim)
            keys |= both(f"{name}{first}", 4 * dim, dim) | both(f"{name}{second}", dim, 4 * dim)
        if stage < 3:
            keys |= norm(f"{p}{part}.{stage}.downsample.norm", 4 * dim)
            keys[f"{p}{part}.{stage}.downsample.reduction.weight"] = [2 * dim, 4 * dim]
    for stage in stages:
        keys |= norm(f"{p}norm{stage}", width * 2**stage)
    return keys


VIT_L = {
    "kind": "vit", "width": 1024, "depth": 24, "head": 64, "hidden": 2730, "positions": 1025, "window": 24,
    "windowed": tuple(i for i in range(24) if i % 4 != 3), "whole": 0,
}  # fmt: skip


def vit(p, width, depth, head, hidden, positions, window, windowed, whole):
    """whole: side of the table of rotary positions of the blocks without windows, in models for one canvas."""
    keys = {f"{p}pos_embed": [1, positions, width], **both(f"{p}patch_embed.proj", width, 3, 16, 16)}

    def table(name, side):
        keys.update({f"{p}{name}.freqs_{leaf}": [side * side, head] for leaf in ("cos", "sin")})

    table("rope_win", window)
    if whole:
        table("rope_glb", whole)
    for i in range(depth):
        name = f"{p}blocks.{i}."
        keys |= {f"{name}attn.q_bias": [width], f"{name}attn.v_bias": [width]}
        keys |= norm(f"{name}norm1", width) | norm(f"{name}norm2", width) | both(f"{name}attn.proj", width, width)
        keys |= {f"{name}attn.{part}_proj.weight": [width, width] for part in "qkv"}
        if i in windowed or whole:
            table(f"blocks.{i}.attn.rope", window if i in windowed else whole)
        keys |= both(f"{name}mlp.w1", hidden, width) | both(f"{name}mlp.w2", hidden, width)
        keys |= norm(f"{name}mlp.ffn_ln", hidden) | both(f"{name}mlp.w3", width, hidden)
    return keys | norm(f"{p}out_norm", width)


def pyramid(width, dim):
    sizes = {
        "p2": {
            1: (width // 2, width, 3),
            5: (width // 4, width // 2, 3),
            8: (dim, width // 4, 1),
            11: (dim, dim, 3),
        },
        "p3": {1: (width // 2, width, 3), 4: (dim, width // 2, 1), 7: (dim, dim, 3)},
        "p4": {0: (dim, width, 1), 3: (dim, dim, 3)},
        "p5": {1: (dim, width, 1), 4: (dim, dim, 3)},
        "p6": {1: (width, width, 3), 4: (dim, width, 1), 7: (dim, dim, 3)},
    }
    keys = {}
    for level, layers in sizes.items():
        for index, (out, size, kernel) in layers.items():
            keys[f"neck.{level}.{index}.weight"] = [out, size, kernel, kernel]
            keys |= norm(f"neck.{level}.{index + 1}", out)
    return keys


def backbone(p, facts, stages, *, counter, mmdet=False):
    facts = dict(facts)
    if facts["kind"] == "vit":
        del facts["kind"]
        return vit(p, **facts), []
    if facts.pop("kind") == "resnet":
        return resnet(p, counter=counter, **facts), [facts["width"] * 4 * 2**s for s in stages]
    return swin(p, stages=stages, mmdet=mmdet, **facts), [facts["width"] * 2**s for s in stages]


def msda(name, dim, levels, points):
    rows = 8 * levels * points
    return (
        both(f"{name}.sampling_offsets", 2 * rows, dim)
        | both(f"{name}.attention_weights", rows, dim)
        | both(f"{name}.value_proj", dim, dim)
        | both(f"{name}.output_proj", dim, dim)
    )


def in_proj(name, dim):
    return {f"{name}.in_proj_weight": [3 * dim, dim], f"{name}.in_proj_bias": [3 * dim]} | both(f"{name}.out_proj", dim, dim)


def mlp(names, sizes):
    keys = {}
    for name, size, out in zip(names, sizes, sizes[1:], strict=False):
        keys |= both(name, out, size)
    return keys


def dino(facts, stages, levels, classes=91, dim=256, ffn=2048, layers=6, queries=900, points=4):
    """IDEA-Research/DINO: `model` of the checkpoint files."""
    swin_like = facts["kind"] == "swin"
    keys, channels = backbone("backbone.0." if swin_like else "backbone.0.body.", facts, stages, counter=False)
    for i in range(levels):
        extra = i - len(channels)
        size = channels[i] if extra < 0 else channels[-1] if extra == 0 else dim
        keys |= both(f"input_proj.{i}.0", dim, size, *([1, 1] if extra < 0 else [3, 3])) | norm(f"input_proj.{i}.1", dim)
    keys |= {"transformer.level_embed": [levels, dim], "transformer.tgt_embed.weight": [queries, dim]}
    keys |= both("transformer.enc_output", dim, dim) | norm("transformer.enc_output_norm", dim)
    for i in range(layers):
        name = f"transformer.encoder.layers.{i}"
        keys |= msda(f"{name}.self_attn", dim, levels, points) | norm(f"{name}.norm1", dim) | norm(f"{name}.norm2", dim)
        keys |= both(f"{name}.linear1", ffn, dim) | both(f"{name}.linear2", dim, ffn)
        name = f"transformer.decoder.layers.{i}"
        keys |= msda(f"{name}.cross_attn", dim, levels, points) | in_proj(f"{name}.self_attn", dim)
        keys |= norm(f"{name}.norm1", dim) | norm(f"{name}.norm2", dim) | norm(f"{name}.norm3", dim)
        keys |= both(f"{name}.linear1", ffn, dim) | both(f"{name}.linear2", dim, ffn)
        for root in ("", "transformer.decoder."):  # the same tensors under two names
            keys |= mlp([f"{root}bbox_embed.{i}.layers.{k}" for k in range(3)], [dim, dim, dim, 4])
            keys |= both(f"{root}class_embed.{i}", classes, dim)
    keys |= norm("transformer.decoder.norm", dim)
    keys |= mlp([f"transformer.decoder.ref_point_head.layers.{k}" for k in range(2)], [2 * dim, dim, dim])
    keys |= mlp([f"transformer.enc_out_bbox_embed.layers.{k}" for k in range(3)], [dim, dim, dim, 4])
    keys |= both("transformer.enc_out_class_embed", classes, dim)
    return keys | {"label_enc.weight": [classes + 1, dim]}


def _mmdet(names, facts, stages, levels, classes, dim, ffn, encoder, layers, queries, points, mmdet_swin):
    keys, channels = backbone("backbone.", facts, stages, counter=True, mmdet=mmdet_swin)
    if not channels:
        keys |= pyramid(facts["width"], dim)
    for i in range(levels if channels else 0):
        extra = i - len(channels)
        name = f"neck.convs.{i}" if extra < 0 else f"neck.extra_convs.{extra}"
        size = channels[i] if extra < 0 else channels[-1] if extra == 0 else dim
        keys[f"{name}.conv.weight"] = [dim, size, *([1, 1] if extra < 0 else [3, 3])]
        keys |= norm(f"{name}.gn", dim)
    root = names["root"]
    keys |= {f"{root}{names['level']}": [levels, dim], f"{root}{names['query']}": [queries, dim]}
    keys |= both(f"{root}{names['fc']}", dim, dim) | norm(f"{root}{names['fc_norm']}", dim)
    for part, count in (("encoder", encoder), ("decoder", layers)):
        for i in range(count):
            name = f"{root}{part}.layers.{i}"
            if part == "encoder":
                keys |= msda(f"{name}.{names['enc']}", dim, levels, points)
            else:
                keys |= in_proj(f"{name}.{names['self']}", dim) | msda(f"{name}.{names['cross']}", dim, levels, points)
            keys |= both(f"{name}.{names['ffn']}.layers.0.0", ffn, dim) | both(f"{name}.{names['ffn']}.layers.1", dim, ffn)
            for k in range(2 if part == "encoder" else 3):
                keys |= norm(f"{name}.norms.{k}", dim)
    keys |= norm(f"{root}decoder.norm", dim)
    keys |= mlp([f"{root}decoder.ref_point_head.{k}" for k in names["ref"]], [2 * dim, dim, dim])
    for i in range(layers + 1):
        keys |= both(f"{names['head']}cls_branches.{i}", classes, dim)
        keys |= mlp([f"{names['head']}reg_branches.{i}.{k}" for k in (0, 2, 4)], [dim, dim, dim, 4])
    return keys


def dino_mmdet(facts, stages, levels, classes=80, dim=256, ffn=2048, layers=6, queries=900, points=4):
    """mmdetection 3: `state_dict` of the checkpoint files."""
    names = {
        "root": "", "level": "level_embed", "query": "query_embedding.weight", "fc": "memory_trans_fc",
        "fc_norm": "memory_trans_norm", "enc": "self_attn", "self": "self_attn.attn", "cross": "cross_attn",
        "ffn": "ffn", "ref": ("layers.0", "layers.1"), "head": "bbox_head.",
    }  # fmt: skip
    keys = _mmdet(names, facts, stages, levels, classes, dim, ffn, layers, layers, queries, points, True)
    return keys | {"dn_query_generator.label_embedding.weight": [classes, dim]}


def co_dino(
    facts, stages=(0, 1, 2, 3), levels=5, classes=80, dim=256, ffn=2048, layers=6, queries=900, points=4, encoder=None,
    mmdet_swin=False, fc=1024,
):  # fmt: skip
    """Co-DETR's Co-DINO with its collaborative heads: `state_dict` of the checkpoint files."""
    names = {
        "root": "query_head.transformer.", "level": "level_embeds", "query": "query_embed.weight", "fc": "enc_output",
        "fc_norm": "enc_output_norm", "enc": "attentions.0", "self": "attentions.0.attn", "cross": "attentions.1",
        "ffn": "ffns.0", "ref": ("0", "2"), "head": "query_head.",
    }  # fmt: skip
    keys = _mmdet(
        names,
        facts,
        stages,
        levels,
        classes,
        dim,
        ffn,
        encoder or layers,
        layers,
        queries,
        points,
        mmdet_swin,
    )
    for i in range(2):
        keys |= both(f"query_head.transformer.aux_pos_trans.{i}", dim, 2 * dim)
        keys |= norm(f"query_head.transformer.aux_pos_trans_norm.{i}", dim)
    keys |= {"query_head.label_embedding.weight": [classes, dim]}
    keys |= both("query_head.downsample.0", dim, dim, 3, 3) | norm("query_head.downsample.1", dim)
    keys |= (
        both("rpn_head.rpn_conv", dim, dim, 3, 3)
        | both("rpn_head.rpn_cls", 9, dim, 1, 1)
        | both("rpn_head.rpn_reg", 36, dim, 1, 1)
    )
    roi = "roi_head.0.bbox_head."
    keys |= both(f"{roi}shared_fcs.0", fc, dim * 49)
    if facts["kind"] == "vit":
        for i in range(4):
            keys[f"{roi}shared_convs.{i}.conv.weight"] = [dim, dim, 3, 3]
            keys |= norm(f"{roi}shared_convs.{i}.gn", dim)
    else:
        keys |= both(f"{roi}shared_fcs.1", fc, fc)
    keys |= both(f"{roi}fc_cls", classes + 1, fc)
    keys |= both(f"{roi}fc_reg", 4 if facts["kind"] == "vit" else 4 * classes, fc)
    for name in ("cls_convs", "reg_convs"):
        keys[f"bbox_head.0.{name}.0.conv.weight"] = [dim, dim, 3, 3]
        keys |= norm(f"bbox_head.0.{name}.0.gn", dim)
    for name, out in (("atss_cls", classes), ("atss_reg", 4), ("atss_centerness", 1)):
        keys |= both(f"bbox_head.0.{name}", out, dim, 3, 3)
    return keys | {f"bbox_head.0.scales.{i}.scale": [] for i in range(6)}


THREE, FOUR = (1, 2, 3), (0, 1, 2, 3)
IDEA, MMDET, SENSE = "IDEA-Research/DINO", "open-mmlab/mmdetection 3.3", "Sense-X/Co-DETR"
PUBLISHED = {
    "dino_4scale_r50": (IDEA, lambda: dino(R50, THREE, 4)),
    "dino_5scale_r50": (IDEA, lambda: dino(R50, FOUR, 5)),
    "dino_4scale_swin_l": (IDEA, lambda: dino(SWIN_L, THREE, 4)),
    "dino_mmdet_4scale_r50": (MMDET, lambda: dino_mmdet(R50, THREE, 4)),
    "dino_mmdet_5scale_swin_l": (MMDET, lambda: dino_mmdet(SWIN_L, FOUR, 5)),
    "co_dino_5scale_r50": (SENSE, lambda: co_dino(R50)),
    "co_dino_5scale_9encoder_lsj_r50": (SENSE, lambda: co_dino(R50, encoder=9)),
    "co_dino_5scale_lsj_r50_lvis": (SENSE, lambda: co_dino(R50, classes=1203)),
    "co_dino_5scale_swin_l": (SENSE, lambda: co_dino(SWIN_L)),
    "co_dino_5scale_vit_large_coco": (SENSE, lambda: co_dino(VIT_L, queries=1500)),
    "co_dino_mmdet_5scale_swin_l": (MMDET + ", projects/CO-DETR", lambda: co_dino(SWIN_L, mmdet_swin=True)),
}


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, (source, make) in PUBLISHED.items():
        rows = ",\n".join(f'  "{key}": {json.dumps(shape)}' for key, shape in make().items())
        text = f'{{"source": "{source}", "keys": {{\n{rows}\n}}}}\n'
        (FOLDER / f"{name}.json").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
