"""From a transformers module to the names of the authors' code: the way back, written apart from the maps.

Each family is a list of (pattern, replacement) for `re.sub`, applied in order to every name. It shares
nothing with `detrt.models.checkpoints`, so an error there cannot be repeated here.
"""

from __future__ import annotations

import re

import torch

WORD = r"(weight|bias|running_mean|running_var)"
RESNET = [
    (r"^model\.backbone\.model\.embedder\.embedder\.convolution", "backbone.0.body.conv1"),
    (r"^model\.backbone\.model\.embedder\.embedder\.normalization", "backbone.0.body.bn1"),
    *((rf"^model\.backbone\.model\.encoder\.stages\.{s}\.layers", f"backbone.0.body.layer{s + 1}") for s in range(4)),
    (r"^(backbone\.0\.body\.layer\d\.\d+)\.shortcut\.convolution", r"\1.downsample.0"),
    (r"^(backbone\.0\.body\.layer\d\.\d+)\.shortcut\.normalization", r"\1.downsample.1"),
    *((rf"^(backbone\.0\.body\.layer\d\.\d+)\.layer\.{i}\.convolution", rf"\1.conv{i + 1}") for i in range(3)),
    *((rf"^(backbone\.0\.body\.layer\d\.\d+)\.layer\.{i}\.normalization", rf"\1.bn{i + 1}") for i in range(3)),
]
DETR = [
    *RESNET,
    (r"^model\.input_projection", "input_proj"),
    (r"^model\.query_position_embeddings", "query_embed"),
    (r"^class_labels_classifier", "class_embed"),
    (r"^bbox_predictor", "bbox_embed"),
    (r"^model\.decoder\.layernorm", "transformer.decoder.norm"),
    (r"^model\.(encoder|decoder)\.layers", r"transformer.\1.layers"),
    (r"^(transformer.*)\.encoder_attn\.", r"\1.multihead_attn."),
    (r"\.o_proj\.", ".out_proj."),
    (r"\.mlp\.fc([12])", r".linear\1"),
    (r"\.self_attn_layer_norm", ".norm1"),
    (r"\.encoder_attn_layer_norm", ".norm2"),
    (r"^(transformer\.encoder.*)\.final_layer_norm", r"\1.norm2"),
    (r"^(transformer\.decoder.*)\.final_layer_norm", r"\1.norm3"),
]
DEFORMABLE = [
    *RESNET,
    (r"^model\.query_position_embeddings", "query_embed"),
    (r"^model\.input_proj", "input_proj"),
    (r"^model\.", "transformer."),
    (r"\.encoder_attn\.", ".cross_attn."),
    (r"\.o_proj\.", ".out_proj."),
    (r"\.mlp\.fc([12])", r".linear\1"),
    (r"^(transformer\.encoder.*)\.self_attn_layer_norm", r"\1.norm1"),
    (r"^(transformer\.encoder.*)\.final_layer_norm", r"\1.norm2"),
    (r"^(transformer\.decoder.*)\.encoder_attn_layer_norm", r"\1.norm1"),
    (r"^(transformer\.decoder.*)\.self_attn_layer_norm", r"\1.norm2"),
    (r"^(transformer\.decoder.*)\.final_layer_norm", r"\1.norm3"),
]
HYBRID = [
    (r"^model\.enc_output\.0", "decoder.enc_output.proj"),
    (r"^model\.enc_output\.1", "decoder.enc_output.norm"),
    (r"^model\.(enc_score_head|enc_bbox_head|denoising_class_embed)", r"decoder.\1"),
    (r"^model\.decoder\.class_embed", "decoder.dec_score_head"),
    (r"^model\.decoder\.bbox_embed", "decoder.dec_bbox_head"),
    (r"^model\.decoder\.(query_pos_head|pre_bbox_head)", r"decoder.\1"),
    (r"^model\.decoder\.(layers|lqe_layers|up|reg_scale)", r"decoder.decoder.\1"),
    (r"^model\.encoder\.aifi", "encoder.encoder"),
    (r"^model\.(encoder|decoder)_input_proj\.(\d+)\.0", r"\1.input_proj.\2.conv"),
    (r"^model\.(encoder|decoder)_input_proj\.(\d+)\.1", r"\1.input_proj.\2.norm"),
    (r"\.encoder_attn\.n_points_scale", ".encoder_attn.num_points_scale"),
    (r"\.encoder_attn\.", ".cross_attn."),
    (r"\.o_proj\.", ".out_proj."),
    (r"\.mlp\.fc([12])", r".linear\1"),
    (r"\.mlp\.layers\.0", ".linear1"),
    (r"\.mlp\.layers\.1", ".linear2"),
    (r"\.self_attn_layer_norm", ".norm1"),
    (r"\.encoder_attn_layer_norm", ".norm2"),
    (r"^(encoder\..*)\.final_layer_norm", r"\1.norm2"),
    (r"^(decoder\..*)\.final_layer_norm", r"\1.norm3"),
    (r"^model\.encoder\.", "encoder."),
]
PRESNET = [
    *((rf"^model\.backbone\.model\.embedder\.embedder\.{i}\.", f"backbone.conv1.conv1_{i + 1}.") for i in range(3)),
    (r"^model\.backbone\.model\.encoder\.stages\.(\d)\.layers\.(\d+)", r"backbone.res_layers.\1.blocks.\2"),
    (r"^(backbone\.res_layers.*)\.shortcut\.1\.convolution", r"\1.short.conv.conv"),
    (r"^(backbone\.res_layers.*)\.shortcut\.1\.normalization", r"\1.short.conv.norm"),
    (r"^(backbone\.res_layers.*)\.shortcut\.", r"\1.short."),
    *((rf"^(backbone\.res_layers.*)\.layer\.{i}\.", rf"\1.branch2{letter}.") for i, letter in enumerate("abc")),
    (r"^(backbone\..*)\.convolution\.", r"\1.conv."),
    (r"^(backbone\..*)\.normalization\.", r"\1.norm."),
]
HGNET = [
    (r"^model\.(backbone|conv_encoder)\.model\.embedder", "backbone.stem"),
    (r"^model\.(backbone|conv_encoder)\.model\.encoder\.stages", "backbone.stages"),
    (r"^(backbone\..*)\.convolution\.", r"\1.conv."),
    (r"^(backbone\..*)\.normalization\.", r"\1.bn."),
]
DOWN = [(r"^(model\.encoder\.downsample_convs\.\d+)\.conv([12])", r"\1.0.cv\2")]
FINE = [
    (r"^(model\.encoder\.(?:fpn|pan)_blocks\.\d+)\.conv1\.", r"\1.cv1."),
    (r"^(model\.encoder\.(?:fpn|pan)_blocks\.\d+)\.conv2\.", r"\1.cv2.1."),
    (r"^(model\.encoder\.(?:fpn|pan)_blocks\.\d+)\.conv3\.", r"\1.cv3.1."),
    (r"^(model\.encoder\.(?:fpn|pan)_blocks\.\d+)\.conv4\.", r"\1.cv4."),
    (r"\.csp_rep1\.", ".cv2.0."),
    (r"\.csp_rep2\.", ".cv3.0."),
]
V2_BLOCKS = [
    (r"^(model\.encoder\.(?:fpn|pan)_blocks?(?:\.\d+)?)\.conv1\.", r"\1.cv1."),
    (r"^(model\.encoder\.(?:fpn|pan)_blocks?(?:\.\d+)?)\.conv2\.", r"\1.cv4."),
    (r"\.csp_rep1\.conv2\.", ".cv2.1."),
    (r"\.csp_rep2\.conv2\.", ".cv3.1."),
    (r"\.csp_rep1\.", ".cv2.0."),
    (r"\.csp_rep2\.", ".cv3.0."),
]
V2 = [
    (r"^model\.encoder\.down_conv([12])\.conv", r"encoder.down_sample\1.1"),
    (r"^model\.encoder\.down_conv([12])\.norm", r"encoder.down_sample\1.2"),
    (r"^model\.encoder\.bi_fusion_conv", "encoder.bi_fusion.cv"),
    *V2_BLOCKS,
    (r"^model\.conv_encoder\.encoder_input_proj", "encoder.input_proj"),
    (r"^(model\.decoder\.layers.*(?:layer_norm|gateway\.norm))\.weight", r"\1.scale"),
    (r"\.mlp\.down_proj", ".swish_ffn.w3"),
]
# lyuwenyu's HGNetV2 has a layer of padding in two convolutions, and words for the two that join a block.
WORDS = [
    (r"^(model\.backbone\.model\.embedder\.stem2[ab])\.convolution", r"\1.convolution.1"),
    (r"\.aggregation\.0\.", ".aggregation_squeeze_conv."),
    (r"\.aggregation\.1\.", ".aggregation_excitation_conv."),
]
STA = [
    (r"^model\.conv_encoder\.fusion_proj\.(\d)\.conv", r"backbone.convs.\1"),
    (r"^model\.conv_encoder\.fusion_proj\.(\d)\.norm", r"backbone.norms.\1"),
    (r"^model\.conv_encoder\.spatial_tuning_adapter\.stem_conv\.conv", "backbone.sta.stem.0"),
    (r"^model\.conv_encoder\.spatial_tuning_adapter\.stem_conv\.norm", "backbone.sta.stem.1"),
    (r"^model\.conv_encoder\.spatial_tuning_adapter\.conv2\.conv", "backbone.sta.conv2.0"),
    (r"^model\.conv_encoder\.spatial_tuning_adapter\.conv2\.norm", "backbone.sta.conv2.1"),
    (r"^model\.conv_encoder\.spatial_tuning_adapter\.conv([34])\.conv", r"backbone.sta.conv\1.1"),
    (r"^model\.conv_encoder\.spatial_tuning_adapter\.conv([34])\.norm", r"backbone.sta.conv\1.2"),
]
VIT = [
    (r"^model\.conv_encoder\.backbone\.embeddings\.patch_embeddings", "backbone.dinov3.patch_embed.proj"),
    (r"^model\.conv_encoder\.backbone\.embeddings\.register_tokens", "backbone.dinov3.storage_tokens"),
    (r"^model\.conv_encoder\.backbone\.embeddings\.", "backbone.dinov3."),
    (r"^model\.conv_encoder\.backbone\.model\.layer\.", "backbone.dinov3.blocks."),
    (r"^model\.conv_encoder\.backbone\.norm", "backbone.dinov3.norm"),
    (r"^(backbone\.dinov3\..*)\.attention\.o_proj", r"\1.attn.proj"),
    (r"^(backbone\.dinov3\..*)\.attention\.", r"\1.attn."),
    (r"\.layer_scale([12])\.lambda1", r".ls\1.gamma"),
]
MLP = [(rf"^(backbone\.dinov3\..*)\.{old}_proj", rf"\1.{new}") for old, new in (("up", "fc1"), ("down", "fc2"))]
SWIGLU = [(rf"^(backbone\.dinov3\..*)\.{old}_proj", rf"\1.{new}") for old, new in (("gate", "w1"), ("up", "w2"), ("down", "w3"))]
EDGECRAFTER = [
    (r"^model\.conv_encoder\.backbone\.embeddings\.patch_embeddings", "backbone.backbone.patch_embed"),
    (r"^model\.conv_encoder\.backbone\.embeddings\.cls_token", "backbone.backbone.register_token"),
    (r"^model\.conv_encoder\.backbone\.rope_embeddings\.inv_freq", "backbone.backbone.rope_embed.periods"),
    (r"^model\.conv_encoder\.backbone\.model\.layer\.", "backbone.backbone.blocks."),
    (r"^model\.conv_encoder\.fusion_proj", "backbone.projector"),
    (r"^(backbone\..*)\.attention\.o_proj", r"\1.attn.proj"),
    (r"^(backbone\..*)\.attention\.", r"\1.attn."),
    *DOWN,
    *V2_BLOCKS,
    *HYBRID,
    (r"^(decoder\.decoder\.layers\.\d+)\.norm3", r"\1.norm2"),
    (r"^(backbone\..*)\.mlp\.up_proj", r"\1.mlp.fc1"),
    (r"^(backbone\..*)\.mlp\.down_proj", r"\1.mlp.fc2"),
]
RF_DETR = [
    (r"^model\.backbone\.backbone\.", "backbone.0.encoder.encoder."),
    (r"\.attention\.q_proj", ".attention.attention.query"),
    (r"\.attention\.k_proj", ".attention.attention.key"),
    (r"\.attention\.v_proj", ".attention.attention.value"),
    (r"\.attention\.o_proj", ".attention.output.dense"),
    (r"^model\.backbone\.projector\.layer_norm", "backbone.0.projector.stages.0.1"),
    (r"^model\.backbone\.projector\.projector_layer\.", "backbone.0.projector.stages.0.0."),
    (r"^(backbone\.0\.projector.*)bottlenecks", r"\1m"),
    (r"^(backbone\.0\.projector.*)conv([12])\.conv", r"\1cv\2.conv"),
    (r"^(backbone\.0\.projector.*)conv([12])\.norm", r"\1cv\2.bn"),
    (r"^model\.reference_point_embed", "refpoint_embed"),
    (r"^model\.query_feat", "query_feat"),
    (r"^model\.decoder\.layernorm", "transformer.decoder.norm"),
    (r"^model\.", "transformer."),
    (r"\.cross_attn_layer_norm", ".norm2"),
    (r"\.self_attn_layer_norm", ".norm1"),
    (r"^(transformer\.decoder\.layers\.\d+)\.layer_norm", r"\1.norm3"),
    (r"^(transformer\.decoder\.layers\.\d+)\.mlp\.fc([12])", r"\1.linear\2"),
    (r"\.o_proj\.", ".out_proj."),
]
SEGMENTATION_HEAD = [
    (r"^blocks\.(\d+)\.depthwise_conv", r"segmentation_head.blocks.\1.dwconv"),
    (r"^blocks\.(\d+)\.layernorm", r"segmentation_head.blocks.\1.norm"),
    (r"^blocks\.(\d+)\.pointwise_conv", r"segmentation_head.blocks.\1.pwconv1"),
    (r"^query_features_block\.norm", "segmentation_head.query_features_block.norm_in"),
    (r"^query_features_block\.mlp\.fc1", "segmentation_head.query_features_block.layers.0"),
    (r"^query_features_block\.mlp\.fc2", "segmentation_head.query_features_block.layers.2"),
    (r"^(spatial_features_proj|query_features_proj)", r"segmentation_head.\1"),
    (r"^segmentation_bias", "segmentation_head.bias"),
]
RF_DETR_SEG = [
    (r"^model\.(model\.|class_embed|bbox_embed)", r"\1"),  # the detector inside
    *RF_DETR,
    *SEGMENTATION_HEAD,
]
CONV_ENCODER = (r"^model\.backbone\.conv_encoder\.model", "model.backbone.model")
CONDITIONAL = [
    (r"\.self_attn\.([qk])_(content|pos)_proj", r".sa_\1\2_proj"),
    (r"(decoder.*)\.self_attn\.v_proj", r"\1.sa_v_proj"),
    (r"\.encoder_attn\.q_pos_sine_proj", ".ca_qpos_sine_proj"),
    (r"\.encoder_attn\.([qk])_(content|pos)_proj", r".ca_\1\2_proj"),
    (r"\.encoder_attn\.v_proj", ".ca_v_proj"),
    (r"\.encoder_attn\.o_proj", ".cross_attn.out_proj"),
    (r"^model\.decoder\.(query_scale|ref_point_head)", r"transformer.decoder.\1"),
    *DETR,
]
DAB = [
    CONV_ENCODER,
    *(
        (rf"\.{part}\.{part}_(query|key)_(content|pos|pos_sine)_proj", lambda m, s=short: f".{s}_{m[1][0]}{m[2]}_proj")
        for part, short in (("self_attn", "sa"), ("cross_attn", "ca"))
    ),
    (r"\.self_attn\.self_attn_value_proj", ".sa_v_proj"),
    (r"\.cross_attn\.cross_attn_value_proj", ".ca_v_proj"),
    (r"\.(self|cross)_attn\.(self|cross)_attn\.output_proj", r".\1_attn.out_proj"),
    (r"\.self_attn\.self_attn_layer_norm", ".norm1"),
    (r"\.cross_attn\.cross_attn_layer_norm", ".norm2"),
    (r"\.mlp\.final_layer_norm", ".norm3"),
    (r"\.(mlp\.)?activation_fn", ".activation"),
    (r"\.(mlp\.)?fc([12])", r".linear\2"),
    (r"^model\.query_refpoint_embeddings", "refpoint_embed"),
    (r"^model\.patterns", "transformer.patterns"),
    (r"^model\.(encoder|decoder)\.(query_scale|ref_point_head|ref_anchor_head|bbox_embed)", r"transformer.\1.\2"),
    *DETR,
]
TABLE = [
    CONV_ENCODER,
    (r"^model\.encoder\.layernorm", "transformer.encoder.norm"),
    (r"\.fc([12])", r".linear\1"),
    *DETR,
]
YOLOS = [
    (r"^vit\.embeddings\.detection_tokens", "backbone.det_token"),
    (r"^vit\.embeddings\.position_embeddings", "backbone.pos_embed"),
    (r"^vit\.embeddings\.patch_embeddings\.projection", "backbone.patch_embed.proj"),
    (r"^vit\.embeddings\.", "backbone."),
    (r"^vit\.encoder\.interpolation\.mid_position_embeddings", "backbone.mid_pos_embed"),
    (r"^vit\.encoder\.layer", "backbone.blocks"),
    (r"\.attention\.attention\.(query|key|value)", r".attn.\1"),
    (r"\.attention\.output\.dense", ".attn.proj"),
    (r"\.intermediate\.dense", ".mlp.fc1"),
    (r"\.output\.dense", ".mlp.fc2"),
    (r"\.layernorm_before", ".norm1"),
    (r"\.layernorm_after", ".norm2"),
    (r"^vit\.layernorm", "backbone.norm"),
    (r"^class_labels_classifier", "class_embed"),
    (r"^bbox_predictor", "bbox_embed"),
]
LW_DETR = [
    (r"^model\.backbone\.backbone\.embeddings\.position_embeddings", "backbone.0.encoder.pos_embed"),
    (r"^model\.backbone\.backbone\.embeddings\.projection", "backbone.0.encoder.patch_embed.proj"),
    (r"^model\.backbone\.backbone\.encoder\.layer", "backbone.0.encoder.blocks"),
    (r"\.layernorm_before", ".norm1"),
    (r"\.layernorm_after", ".norm2"),
    (r"^(backbone\.0\.encoder.*)\.attention\.([qv])_proj\.bias", r"\1.attn.\2_bias"),
    (r"^(backbone\.0\.encoder.*)\.attention\.o_proj", r"\1.attn.proj"),
    (r"^(backbone\.0\.encoder.*)\.attention\.", r"\1.attn."),
    (r"\.intermediate\.", ".mlp."),
    (
        r"^model\.backbone\.projector\.scale_layers\.(\d)\.sampling_layers\.(\d)\.layers\.",
        r"backbone.0.projector.stages_sampling.\1.\2.",
    ),
    (r"^model\.backbone\.projector\.scale_layers\.(\d)\.projector_layer", r"backbone.0.projector.stages.\1.0"),
    (r"^model\.backbone\.projector\.scale_layers\.(\d)\.layer_norm", r"backbone.0.projector.stages.\1.1"),
    (r"\.bottlenecks\.", ".m."),
    (r"^(backbone\.0\.projector\.stages\..*)\.conv([12])\.", r"\1.cv\2."),
    (r"^(backbone\.0\.projector.*)\.norm\.", r"\1.bn."),
    *RF_DETR,
]
RENAMES = {
    "detr": DETR,
    "conditional_detr": CONDITIONAL,
    "dab_detr": DAB,
    "table-transformer": TABLE,
    "yolos": YOLOS,
    "lw_detr": LW_DETR,
    "eomt": [
        (r"^embeddings\.position_embeddings\.weight", "encoder.backbone.pos_embed"),
        (r"^embeddings\.register_tokens", "encoder.backbone.reg_token"),
        (r"^embeddings\.patch_embeddings\.projection", "encoder.backbone.patch_embed.proj"),
        (r"^embeddings\.", "encoder.backbone."),
        (r"^layernorm", "encoder.backbone.norm"),
        (r"^layers", "encoder.backbone.blocks"),
        (r"\.attention\.out_proj", ".attn.proj"),
        (r"\.attention\.", ".attn."),
        (r"\.layer_scale([12])\.lambda1", r".ls\1.gamma"),
        (r"^query", "q"),
        (r"^class_predictor", "class_head"),
        (r"^mask_head\.fc([123])", lambda m: f"mask_head.{2 * int(m[1]) - 2}"),
        (r"^upscale_block\.block", "upscale"),
        (r"\.layernorm2d", ".norm"),
    ],
    "deformable_detr": DEFORMABLE,
    "rt_detr": [
        *PRESNET,
        *HYBRID,
        (r"^encoder\.input_proj\.(\d+)\.conv", r"encoder.input_proj.\1.0"),
        (r"^encoder\.input_proj\.(\d+)\.norm", r"encoder.input_proj.\1.1"),
        (r"enc_output\.proj", "enc_output.0"),
        (r"enc_output\.norm", "enc_output.1"),
    ],
    "rt_detr_v2": [*PRESNET, *HYBRID],
    "d_fine": [*HGNET, *DOWN, *FINE, *HYBRID, (r"^(mask_decoder|mask_head)\.", r"decoder.\1.")],
    "deimv2": [*HGNET, *DOWN, *V2, *HYBRID],
    "rt_detr_v2-hgnet": [*WORDS, *HGNET, *HYBRID],
    "deimv2-plain-vit": [
        *VIT,
        *MLP,
        *STA,
        *DOWN,
        *V2,
        *HYBRID,
        (r"^(backbone\.dinov3\..*)\.linear([12])", r"\1.mlp.fc\2"),
        (r"^backbone\.dinov3\.", "backbone.dinov3._model."),
    ],
    "deimv2-dinov3": [*VIT, *SWIGLU, *STA, *DOWN, *V2, *HYBRID],
    "ecdet": [
        (r"^mask_head\.block\.", "blocks.0."),
        (r"^mask_head\.", ""),
        *SEGMENTATION_HEAD,
        (r"^segmentation_head", "decoder.decoder.segmentation_head"),
        *EDGECRAFTER,
    ],
    "rf_detr": RF_DETR,
    "rf_detr-seg": RF_DETR_SEG,
}
# Families whose authors stack query, key and value of these attentions, and gate and up of the feed-forward part.
STACKED = r"^(.*self_attn|.*multihead_attn)\.([qkv])_proj\.(weight|bias)$"
VIT_STACKED = r"^((?:encoder\.)?backbone\.(?:blocks|dinov3|backbone|0\.encoder).*\.attn)\.([qkv])_proj\.(weight|bias)$"
YOLOS_STACKED = r"^(backbone\.blocks.*\.attn)\.(query|key|value)\.(weight|bias)$"
GATED = r"^(.*)\.mlp\.(gate|up)_proj\.(weight|bias)$"


def to_original(family: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A transformers state dict -> the authors' names."""
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if family.startswith(("rt_detr_v2", "d_fine", "deimv2", "ecdet")) and re.match(r"(class|bbox)_embed\.", name):
            continue  # one more name of decoder.class_embed and decoder.bbox_embed
        for pattern, replacement in RENAMES[family]:
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor.clone()
    for pattern, parts, stacked in (
        (STACKED, "qkv", "{}.in_proj_{}"),
        (VIT_STACKED, "qkv", "{}.qkv.{}"),
        (YOLOS_STACKED, ("query", "key", "value"), "{}.qkv.{}"),
        (GATED, ("gate", "up"), "{}.swish_ffn.w12.{}"),
    ):
        for name in [n for n in renamed if re.match(pattern, n)]:
            if name not in renamed:
                continue
            head, _, leaf = re.match(pattern, name).groups()
            middle = ".mlp." if "gate" in parts else "."
            end = "" if "query" in parts else "_proj"
            keys = [f"{head}{middle}{part}{end}.{leaf}" for part in parts]
            renamed[stacked.format(head, leaf)] = torch.cat([renamed.pop(key) for key in keys])
    if family == "eomt":
        renamed["encoder.backbone.pos_embed"] = renamed["encoder.backbone.pos_embed"].unsqueeze(0)
    return renamed
