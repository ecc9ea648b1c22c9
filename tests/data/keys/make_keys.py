"""Writes the key lists in this folder from the authors' own code: `python make_keys.py CHECKOUT FILE...`.

CHECKOUT is the repository of the file's `source` at its commit, with its requirements installed. Each
file holds where it is from, and the name and shape of every tensor of the model's `state_dict()` in
order. Tests fill them with random numbers.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DETR = "https://github.com/facebookresearch/detr @ 29901c51d7fe8712168b8d0d64351170bc0f83e0"
DEFORMABLE = "https://github.com/fundamentalvision/Deformable-DETR @ 11169a60c33333af00a4849f1808023eba96a931"
RT_DETR = "https://github.com/lyuwenyu/RT-DETR @ 068dfde65f2667ad6555883c69d73de886518cad"
D_FINE = "https://github.com/Peterande/D-FINE @ 4a1f73a8bcfac736a88abde9596d87f116d780a7"
DEIM_V1 = "https://github.com/Intellindust-AI-Lab/DEIM @ 09d35d53d39ee3145a1e61e3a989b28b9468d1dd"
DEIM = "https://github.com/Intellindust-AI-Lab/DEIMv2 @ 0fff8d4dcdc272e6cf2d84be31399db471357941"
GROUNDING = "https://github.com/IDEA-Research/GroundingDINO @ 856dde20aee659246248e20734ef9ba5214f5e44"
RT_DETR_V4 = "https://github.com/RT-DETRs/RT-DETRv4 @ df4412261c6162f62aa4fb84e90b2df3c1b5f223"
LLMDET = "https://github.com/iSEE-Laboratory/LLMDet @ 5426efb55f2dfaf255287750f04180cf9c4994f5"
D_FINE_SEG = "https://github.com/ArgoHA/D-FINE-seg @ 40fdf64454629fb4a7157da268d7d1732f036ba7"
EDGECRAFTER = "https://github.com/Intellindust-AI-Lab/EdgeCrafter @ 706d037c17c1703bb97f42a35d269959b511b5be"
CONDITIONAL = "https://github.com/Atten4Vis/ConditionalDETR @ 8ea7c3f3fff49cd287855d4f13cc12a6066bc8e9"
DAB = "https://github.com/IDEA-Research/DAB-DETR @ 723ddb80e95dbd3c9a2e4ef68c1e0fa9319167cf"
TABLE = "https://github.com/microsoft/table-transformer @ 16d124f616109746b7785f03085100f1f6247575"
YOLOS = "https://github.com/hustvl/YOLOS @ 5717fc29d727dab84ad585c56457b4de1225eddc"
LW = "https://github.com/Atten4Vis/LW-DETR @ d5e6e6c4add2d24dafb965ced8b50163c50b9788"
EOMT = "https://github.com/tue-mps/eomt @ 7bd19ddd621c5c6adedcd260458a34783cd4a45f"
RF_DETR = "https://github.com/roboflow/rf-detr @ 35ac6ab64634e188bbb0fa3fc5135132f0df45fc"

# The defaults of the authors' argument parsers that their model builders read.
COMMON = {
    **{
        "hidden_dim": 256,
        "position_embedding": "sine",
        "lr_backbone": 1e-5,
        "masks": False,
        "dilation": False,
    },
    **{
        "backbone": "resnet50",
        "device": "cpu",
        "aux_loss": True,
        "dropout": 0.1,
        "nheads": 8,
        "enc_layers": 6,
        "dec_layers": 6,
    },
    **{
        "dataset_file": "coco",
        "set_cost_class": 1,
        "set_cost_bbox": 5,
        "set_cost_giou": 2,
        "mask_loss_coef": 1,
    },
    **{"dice_loss_coef": 1, "bbox_loss_coef": 5, "giou_loss_coef": 2, "frozen_weights": None},
}
OLD = {**COMMON, "num_queries": 100, "dim_feedforward": 2048, "pre_norm": False, "eos_coef": 0.1}
NEW = {
    **COMMON,
    **{
        "num_queries": 300,
        "dim_feedforward": 1024,
        "cls_loss_coef": 2,
        "focal_alpha": 0.25,
        "num_feature_levels": 4,
    },
    **{
        "dec_n_points": 4,
        "enc_n_points": 4,
        "two_stage": False,
        "with_box_refine": False,
        "position_embedding_scale": 6.28,
    },
}
HEIRS = {**OLD, "num_queries": 300, "cls_loss_coef": 2, "ce_loss_coef": 1, "focal_alpha": 0.25}
PATTERNS = {
    **{"transformer_activation": "prelu", "num_patterns": 3, "random_refpoints_xy": True, "num_select": 300},
    **{"pe_temperatureH": 20, "pe_temperatureW": 20, "batch_norm_type": "FrozenBatchNorm2d", "dilation": True},
    **{"return_interm_layers": False, "backbone_freeze_keywords": None},
}
TABLES = {"backbone": "resnet18", "pre_norm": True, "num_queries": 15, "num_classes": 2, "emphasized_weights": {}}
LARGE = {
    **{"encoder": "vit_small", "vit_encoder_num_layers": 10, "window_block_indexes": [0, 1, 3, 6, 7, 9], "drop_path": 0.0},
    **{"out_feature_indexes": [2, 4, 5, 9], "dec_layers": 3, "projector_scale": ["P3", "P5"], "hidden_dim": 384},
    **{"sa_nheads": 12, "ca_nheads": 24, "dec_n_points": 4, "group_detr": 13, "two_stage": True, "lite_refpoint_refine": True},
    **{"bbox_reparam": True, "decoder_norm": "LN", "pretrained_encoder": None, "lr_encoder": 1e-4, "num_select": 300},
    **{"use_varifocal_loss": False, "use_position_supervised_loss": False, "ia_bce_loss": True},
}
TINY = {
    **{"encoder": "vit_tiny", "vit_encoder_num_layers": 6, "window_block_indexes": [0, 2, 4], "out_feature_indexes": [1, 3, 5]},
    **{"projector_scale": ["P4"], "hidden_dim": 256, "sa_nheads": 8, "ca_nheads": 16, "dec_n_points": 2, "num_queries": 100},
}
YOLOS_TI = {"backbone_name": "tiny", "pre_trained": "", "det_token_num": 100, "init_pe_size": [800, 1333], "mid_pe_size": None}
YOLOS_S = {"backbone_name": "small", "init_pe_size": [512, 864], "mid_pe_size": [512, 864]}
RF = {
    **{
        "vit_encoder_num_layers": 12,
        "pretrained_encoder": None,
        "window_block_indexes": None,
        "drop_path": 0.0,
    },
    **{"use_cls_token": False, "position_embedding": "sine", "freeze_encoder": False, "rms_norm": False},
    **{
        "backbone_lora": False,
        "force_no_pretrain": True,
        "encoder_only": False,
        "backbone_only": False,
        "dropout": 0,
    },
    **{
        "dim_feedforward": 2048,
        "decoder_norm": "LN",
        "aux_loss": True,
        "pretrain_weights": "none",
        "device": "cpu",
    },
}


def by_arguments(
    root: Path, base: dict[str, Any], changes: dict[str, Any], build: str = "build_model", part: str = "models.backbone"
) -> Any:
    importlib.import_module(part).is_main_process = lambda: False  # no download of the backbone
    arguments = argparse.Namespace(use_checkpoint=False, **{**base, **changes})
    return getattr(importlib.import_module("models"), build)(arguments)[0]


def by_config(root: Path, package: str, config: str, names: tuple[str, ...] = ()) -> Any:
    # Only the model's part of the package: its data and solver folders need the packages of a training.
    part = types.ModuleType(package)
    part.__path__ = [str(root / package)]
    sys.modules[package] = part
    for name in names or {"src": ("nn", "zoo"), "engine": ("backbone", "deim")}[package]:
        importlib.import_module(f"{package}.{name}")
    made = importlib.import_module(f"{package}.core").YAMLConfig(str(root / config))
    for value in made.yaml_cfg.values():
        if isinstance(value, dict) and "pretrained" in value:
            value["pretrained"] = False
        if isinstance(value, dict) and "weights_path" in value:
            value["skip_load_backbone"] = True
    return made.model


def by_eomt(model: str) -> Any:
    timm = importlib.import_module("timm")
    create, timm.create_model = timm.create_model, lambda *names, **settings: create(*names, **{**settings, "pretrained": False})
    encoder = importlib.import_module("models.vit").ViT((640, 640), backbone_name=model)
    return importlib.import_module("models.eomt").EoMT(encoder, 80, 200)


def by_dfine_seg(size: str) -> Any:
    build = importlib.import_module("src.d_fine.dfine").build_model
    return build(size, 80, True, "cpu", img_size=(640, 640))


def by_class(root: Path, name: str, module: str = "rfdetr.config") -> Any:
    part = types.ModuleType("rfdetr")
    part.__path__ = [str(root / "rfdetr")]
    sys.modules["rfdetr"] = part
    # The configs of the largest models lie beside classes for training.
    sys.modules["rfdetr.detr"] = types.SimpleNamespace(RFDETR=object)  # type: ignore[assignment]
    config = getattr(importlib.import_module(module), name)()
    settings = {"num_queries": 300, "num_select": 300, **config.model_dump(), **RF}
    return importlib.import_module("rfdetr.models.lwdetr").build_model(argparse.Namespace(**settings))


def by_grounding(root: Path, config: str) -> Any:
    """Without the download of BERT's weights; with what the published files have beside the model's state."""
    import torch
    from transformers import BertConfig, BertModel

    tokens = importlib.import_module("groundingdino.util.get_tokenlizer")
    tokens.get_tokenlizer = lambda name: types.SimpleNamespace(convert_tokens_to_ids=lambda words: words)
    tokens.get_pretrained_language_model = lambda name: BertModel(BertConfig())
    for name in ("get_extended_attention_mask", "invert_attention_mask", "get_head_mask"):
        if not hasattr(BertModel, name):
            setattr(BertModel, name, None)
    given: dict[str, Any] = {}
    exec((root / f"groundingdino/config/{config}.py").read_text("utf-8"), given)
    settings = {key: value for key, value in given.items() if not key.startswith("__")}
    module = importlib.import_module("groundingdino.models.GroundingDINO.groundingdino")
    model = module.build_groundingdino(argparse.Namespace(**settings, device="cpu"))
    # Their loader prints these two as unexpected.
    model.register_buffer("label_enc_weight", torch.zeros(settings["dn_labelbook_size"] + 1, settings["hidden_dim"]))
    model.register_buffer("bert_position_ids", torch.zeros(1, 512))
    own = model.state_dict
    names = {"label_enc_weight": "label_enc.weight", "bert_position_ids": "bert.embeddings.position_ids"}
    model.state_dict = lambda: {names.get(key, key): tensor for key, tensor in own().items()}
    return model


def by_mmdet(root: Path, config: str) -> Any:
    """mmdetection's MM-Grounding-DINO as LLMDet builds it, without its language model and the download of BERT's weights."""
    from mmengine.config import Config
    from mmengine.registry import DefaultScope
    from transformers import BertConfig, BertModel

    importlib.import_module("mmdet.models")
    texts = importlib.import_module("mmdet.models.language_models.bert")
    texts.AutoTokenizer = types.SimpleNamespace(
        from_pretrained=lambda name: types.SimpleNamespace(convert_tokens_to_ids=lambda words: words)
    )
    texts.BertConfig = types.SimpleNamespace(from_pretrained=lambda name: BertConfig())
    texts.HFBertModel = types.SimpleNamespace(
        from_pretrained=lambda name, add_pooling_layer, config: BertModel(config, add_pooling_layer=add_pooling_layer)
    )
    os.chdir(root / "configs")
    settings = Config.fromfile(config).model
    own = ("type", "num_queries", "with_box_refine", "as_two_stage", "num_feature_levels", "positional_encoding", "dn_cfg")
    parts = ("language_model", "backbone", "neck", "encoder", "decoder", "bbox_head")
    settings = type(settings)({key: value for key, value in settings.items() if key in (*own, *parts)})
    settings.backbone.init_cfg, settings.encoder.num_cp = None, 0
    DefaultScope.get_instance("mmdet", scope_name="mmdet")
    return importlib.import_module("mmdet.registry").MODELS.build(settings)


# file -> (source, folder in it, how its model is made)
FILES: dict[str, tuple[str, str, Any]] = {
    "detr_r50": (DETR, "", lambda r: by_arguments(r, OLD, {})),
    "conditional_detr_r50": (CONDITIONAL, "", lambda r: by_arguments(r, HEIRS, {})),
    "dab_detr_r50_dc5_3pat": (
        DAB,
        "",
        lambda r: by_arguments(r, HEIRS, PATTERNS, "build_DABDETR", "models.DAB_DETR.backbone"),
    ),
    "table_transformer_detection": (TABLE, "detr", lambda r: by_arguments(r, HEIRS, TABLES)),
    "eomt_l": (EOMT, "", lambda r: by_eomt("vit_large_patch14_reg4_dinov2")),
    "yolos_ti": (YOLOS, "", lambda r: by_arguments(r, HEIRS, YOLOS_TI)),
    "yolos_s": (YOLOS, "", lambda r: by_arguments(r, HEIRS, {**YOLOS_TI, **YOLOS_S})),
    "lwdetr_large": (LW, "", lambda r: by_arguments(r, HEIRS, LARGE)),
    "lwdetr_tiny": (LW, "", lambda r: by_arguments(r, HEIRS, {**LARGE, **TINY})),
    "deformable_single_scale": (DEFORMABLE, "", lambda r: by_arguments(r, NEW, {"num_feature_levels": 1})),
    "deformable_plain": (DEFORMABLE, "", lambda r: by_arguments(r, NEW, {})),
    "deformable_refine": (DEFORMABLE, "", lambda r: by_arguments(r, NEW, {"with_box_refine": True})),
    "deformable_two_stage": (
        DEFORMABLE,
        "",
        lambda r: by_arguments(r, NEW, {"with_box_refine": True, "two_stage": True}),
    ),
    **{
        name: (RT_DETR, "rtdetr_pytorch", lambda r, n=name: by_config(r, "src", f"configs/rtdetr/{n}.yml"))
        for name in ("rtdetr_r18vd_6x_coco", "rtdetr_r50vd_6x_coco", "rtdetr_r101vd_6x_coco")
    },
    **{
        name: (
            RT_DETR,
            "rtdetrv2_pytorch",
            lambda r, n=name: by_config(r, "src", f"configs/rtdetrv2/{n}.yml"),
        )
        for name in ("rtdetrv2_r18vd_120e_coco", "rtdetrv2_r50vd_m_7x_coco", "rtdetrv2_hgnetv2_l_6x_coco")
    },
    **{
        name: (D_FINE, "", lambda r, n=name: by_config(r, "src", f"configs/dfine/{n}.yml"))
        for name in ("dfine_hgnetv2_n_coco", "dfine_hgnetv2_m_coco")
    },
    **{
        name: (DEIM, "", lambda r, n=name: by_config(r, "engine", f"configs/deimv2/{n}.yml"))
        for name in (
            *(f"deimv2_hgnetv2_{size}_coco" for size in ("atto", "femto", "pico", "n", "s", "x")),
            *(f"deimv2_dinov3_{size}_coco" for size in "slx"),
        )
    },
    **{f"dfine_seg_{size}": (D_FINE_SEG, "", lambda r, n=size: by_dfine_seg(n)) for size in "ns"},
    "deim_r18vd_120e_coco": (
        DEIM,
        "",
        lambda r: by_config(r, "engine", "configs/deim_rtdetrv2/deim_r18vd_120e_coco.yml"),
    ),
    "deim_hgnetv2_s_coco": (
        DEIM_V1,
        "",
        lambda r: by_config(r, "engine", "configs/deim_dfine/deim_hgnetv2_s_coco.yml"),
    ),
    **{
        f"rtv4_hgnetv2_{size}_coco": (
            RT_DETR_V4,
            "",
            lambda r, n=size: by_config(r, "engine", f"configs/rtv4/rtv4_hgnetv2_{n}_coco.yml", ("backbone", "rtv4")),
        )
        for size in "sx"
    },
    **{
        f"{kind}_{size}": (
            EDGECRAFTER,
            "ecdetseg",
            lambda r, k=kind, n=size: by_config(r, "engine", f"configs/{k}/{k}_{n}.yml", ("edgecrafter",)),
        )
        for kind in ("ecdet", "ecseg")
        for size in "smlx"
    },
    "groundingdino_swint_ogc": (GROUNDING, "", lambda r: by_grounding(r, "GroundingDINO_SwinT_OGC")),
    "groundingdino_swinb_cogcoor": (GROUNDING, "", lambda r: by_grounding(r, "GroundingDINO_SwinB_cfg")),
    "mm_grounding_dino_swin_t": (LLMDET, "", lambda r: by_mmdet(r, "grounding_dino_swin_t.py")),
    "mm_grounding_dino_swin_l": (LLMDET, "", lambda r: by_mmdet(r, "grounding_dino_swin_l.py")),
    "rf_detr_base": (RF_DETR, "", lambda r: by_class(r, "RFDETRBaseConfig")),
    "rf_detr_nano": (RF_DETR, "", lambda r: by_class(r, "RFDETRNanoConfig")),
    "rf_detr_large": (RF_DETR, "", lambda r: by_class(r, "RFDETRLargeConfig")),
    "rf_detr_xlarge": (RF_DETR, "", lambda r: by_class(r, "RFDETRXLargeConfig", "rfdetr.platform.models")),
    "rf_detr_2xlarge": (RF_DETR, "", lambda r: by_class(r, "RFDETR2XLargeConfig", "rfdetr.platform.models")),
    "rf_detr_seg_nano": (RF_DETR, "", lambda r: by_class(r, "RFDETRSegNanoConfig")),
    "rf_detr_seg_medium": (RF_DETR, "", lambda r: by_class(r, "RFDETRSegMediumConfig")),
    "rf_detr_seg_2xlarge": (RF_DETR, "", lambda r: by_class(r, "RFDETRSeg2XLargeConfig")),
}


def main() -> None:
    checkout, *names = sys.argv[1:]
    for name in names:
        source, folder, make = FILES[name]
        root = (Path(checkout) / folder).resolve()
        sys.path.insert(0, str(root))
        os.chdir(root)
        state = make(root).state_dict()
        lines = [f'  {json.dumps(key)}: "{"x".join(map(str, tensor.shape))}"' for key, tensor in state.items()]
        # Buffers whose values, not only shapes, are part of the architecture.
        values = {
            key: tensor.tolist()
            for key, tensor in state.items()
            if key.endswith(("num_points_scale", ".up", ".reg_scale", ".periods", "attn_mask_probs"))
        }
        head = f'{{"source": {json.dumps(source)},\n"values": {json.dumps(values)},\n"keys": {{\n'
        (HERE / f"{name}.json").write_text(head + ",\n".join(lines) + "\n}}\n", "utf-8")
        print(name, len(state))


if __name__ == "__main__":
    main()
