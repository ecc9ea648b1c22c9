"""Prompted checkpoints: transformers folders, the authors' files, timm's names, tokenizers, bad input."""

from __future__ import annotations

import json
import re
from copy import deepcopy

import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")
pytest.importorskip("transformers", reason="needs the 'export' extra")

from checkpoint_folders import save_folder, save_processor
from key_lists import KEYS, meta_state
from tokenizers import Tokenizer

from detrt.cli import main
from detrt.errors import SourceError
from detrt.models.checkpoints import loader as original
from detrt.models.checkpoints.assumed import Assumed
from detrt.models.checkpoints.key_map import LoadReport, rename
from detrt.models.checkpoints.loader import recognise
from detrt.models.checkpoints.shapes import Shapes
from detrt.models.families import BY_NAME, formats
from detrt.models.families import omdet_turbo as timm_swin
from detrt.models.families.sizes import TINY_BERT, TINY_GROUNDING, TINY_SWIN
from detrt.models.load import load_source
from detrt.models.random import TINY_VOCABULARY
from detrt.models.text import bert_tokenizer, read_tokenizer

FAMILIES = ["grounding_dino", "mm_grounding_dino", "omdet_turbo"]


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """name -> a transformers folder of a tiny model, with its tokenizer."""

    def make(name):
        place = tmp_path_factory.mktemp(name)
        return save_folder(tiny(name), place)

    return make


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_gives_the_same_model(name, folder, tiny):
    want, found = tiny(name), load_source(str(folder(name)))
    assert found.spec.text == want.spec.text and found.spec.decode == want.spec.decode
    assert Tokenizer.from_str(found.tokenizer.decode()).get_vocab() == Tokenizer.from_str(want.tokenizer.decode()).get_vocab()
    state = found.module.state_dict()
    for key, tensor in want.module.state_dict().items():
        assert torch.equal(state[key], tensor), key
    if name != "omdet_turbo":
        assert found.module.model.text_backbone.config._attn_implementation == "sdpa"


def test_a_folder_without_its_tokenizer(folder, tmp_path, capsys):
    place = folder("grounding_dino")
    saved = (place / "tokenizer.json").read_bytes()
    (place / "tokenizer.json").unlink()
    with pytest.raises(SourceError, match=r"without its tokenizer.*`tokenizer=FILE`"):
        load_source(str(place))
    assert main(["export", str(place), "-o", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert "--tokenizer FILE" in message and "Traceback" not in message
    assert not (tmp_path / "out").exists()
    (tmp_path / "t.json").write_bytes(saved)
    assert load_source(str(place), tokenizer=tmp_path / "t.json").tokenizer == saved


def test_a_vocabulary_makes_the_same_tokenizer(tiny, folder, tmp_path):
    made = Tokenizer.from_str(tiny("grounding_dino").tokenizer.decode())
    words = {index: word for word, index in made.get_vocab().items()}
    lines = [words.get(i, f"[unused{i}]") for i in range(TINY_VOCABULARY)]
    (tmp_path / "vocab.txt").write_text("\n".join(lines), "utf-8")
    found = Tokenizer.from_str(read_tokenizer(tmp_path, None, "x").decode())
    for prompt in ("a red cat. remote control.", "Ünïcode, 中文?", "", "striped star"):
        assert found.encode(prompt).ids == made.encode(prompt).ids


def test_padding_and_truncation_are_left_to_the_runtime(tiny, tmp_path):
    made = Tokenizer.from_str(tiny("grounding_dino").tokenizer.decode())
    made.enable_padding(length=50)
    made.enable_truncation(5)
    made.save(str(tmp_path / "tokenizer.json"))
    found = json.loads(read_tokenizer(tmp_path / "tokenizer.json", None, "x"))
    assert found["padding"] is None and found["truncation"] is None


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (None, "missing.json", "is not there"),
        ("{", "tokenizer.json", "is not a file of the tokenizers library"),
        ("[]", "tokenizer.json", "is not a file of the tokenizers library"),
        ("one\ntwo\n", "vocab.txt", r"not a vocabulary of BERT: it has no \[UNK\], \[CLS\], \[SEP\]"),
    ],
)
def test_damaged_tokenizers(content, name, message, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_text(content, "utf-8")
    with pytest.raises(SourceError, match=message):
        load_source("random:grounding_dino/tiny", tokenizer=path)


def test_the_tokenizer_of_another_model(tmp_path):
    other = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, ".": 4, "?": 5}
    bert_tokenizer(other).save(str(tmp_path / "a.json"))
    with pytest.raises(SourceError, match=r"the ids \[2, 3, 4, 5\], and the model splits prompts at \[101, 102"):
        load_source("random:grounding_dino/tiny", tokenizer=tmp_path / "a.json")
    bert_tokenizer({**other, "far": 99999}).save(str(tmp_path / "b.json"))
    with pytest.raises(SourceError, match="has 100000 ids, and the model knows 1200"):
        load_source("random:grounding_dino/tiny", tokenizer=tmp_path / "b.json")


def test_choices_of_the_other_kind_of_model(tmp_path):
    (tmp_path / "names.txt").write_text("one\n")
    with pytest.raises(SourceError, match="cannot be given for Grounding DINO: it finds what a prompt asks for"):
        load_source("random:grounding_dino/tiny", labels=tmp_path / "names.txt")
    with pytest.raises(SourceError, match="takes no prompt"):
        load_source("random:detr/tiny", tokenizer=tmp_path / "names.txt")


# The authors' names, written from their code and apart from the map that is tested.
# Both publishers of Grounding DINOs name the fusion of image and text so.
FUSION = [
    (r"(fusion_layers.*)vision_param", r"\1gamma_v"),
    (r"(fusion_layers.*)text_param", r"\1gamma_l"),
    (r"(fusion_layers.*layer_norm)_vision", r"\1_v"),
    (r"(fusion_layers.*layer_norm)_text", r"\1_l"),
    (r"(fusion_layers.*)vision_proj", r"\1v_proj"),
    (r"(fusion_layers.*)text_proj", r"\1l_proj"),
]
IDEA = [
    (
        r"^model\.backbone\.conv_encoder\.model\.swin\.embeddings\.patch_embeddings\.projection",
        "backbone.0.patch_embed.proj",
    ),
    (r"^model\.backbone\.conv_encoder\.model\.swin\.embeddings\.norm", "backbone.0.patch_embed.norm"),
    (r"^model\.backbone\.conv_encoder\.model\.swin\.encoder\.layers", "backbone.0.layers"),
    *((rf"^model\.backbone\.conv_encoder\.model\.hidden_states_norms\.stage{i + 1}", f"backbone.0.norm{i}") for i in range(4)),
    (r"\.attention\.relative_position_bias\.", ".attn."),
    (r"\.attention\.o_proj\.", ".attn.proj."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"^model\.text_backbone", "bert"),
    (r"^model\.text_projection", "feat_map"),
    (r"^model\.input_proj_vision", "input_proj"),
    (r"^model\.query_position_embeddings", "transformer.tgt_embed"),
    (r"^model\.encoder_output_bbox_embed", "transformer.enc_out_bbox_embed"),
    (r"^model\.decoder\.reference_points_head", "transformer.decoder.ref_point_head"),
    (r"^model\.decoder\.layer_norm", "transformer.decoder.norm"),
    (r"^model\.encoder\.layers\.(\d+)\.deformable_layer", r"transformer.encoder.layers.\1"),
    (r"^model\.encoder\.layers\.(\d+)\.text_enhancer_layer", r"transformer.encoder.text_layers.\1"),
    (r"^model\.encoder\.layers\.(\d+)\.fusion_layer", r"transformer.encoder.fusion_layers.\1"),
    (r"^model\.", "transformer."),
    *FUSION,
    (r"(text_layers.*)layer_norm_before", r"\1norm1"),
    (r"(text_layers.*)layer_norm_after", r"\1norm2"),
    (r"(transformer\.(?:encoder|decoder)\..*)\.fc([12])", r"\1.linear\2"),
    (r"(transformer\.encoder\.layers.*)self_attn_layer_norm", r"\1norm1"),
    (r"(transformer\.encoder\.layers.*)final_layer_norm", r"\1norm2"),
    (r"(transformer\.decoder\.layers.*)encoder_attn_text_layer_norm", r"\1catext_norm"),
    (r"(transformer\.decoder\.layers.*)encoder_attn_layer_norm", r"\1norm1"),
    (r"(transformer\.decoder\.layers.*)self_attn_layer_norm", r"\1norm2"),
    (r"(transformer\.decoder\.layers.*)final_layer_norm", r"\1norm3"),
    (r"(transformer\.decoder\.layers.*)encoder_attn_text\.", r"\1ca_text."),
    (r"(transformer\.decoder\.layers.*)encoder_attn\.", r"\1cross_attn."),
]
ATTENTIONS = r"^(model\.(?:encoder|decoder)\.layers.*(?:self_attn|encoder_attn_text))\.query\.(\w+)$"


def as_published(module):
    """The state of a transformers Grounding DINO under the authors' names."""
    state, found = module.state_dict(), {}

    def rename(key):
        for pattern, new in IDEA:
            key = re.sub(pattern, new, key)
        return key

    for key, tensor in state.items():
        if ".swin.layernorm." in key or (re.search(r"\.(k_proj|v_proj|key|value)\.\w+$", key) and ".text_backbone." not in key):
            continue
        swin, attention = re.search(r"\.attention\.q_proj\.(\w+)$", key), re.match(ATTENTIONS, key)
        if swin:
            parts = [state[key.replace(".q_proj.", f".{n}_proj.")] for n in "qkv"]
            found[rename(key).replace(".attention.q_proj.", ".attn.qkv.")] = torch.cat(parts)
        elif attention:
            parts = [state[f"{attention[1]}.{n}.{attention[2]}"] for n in ("query", "key", "value")]
            found[rename(f"{attention[1]}.in_proj_{attention[2]}")] = torch.cat(parts)
        else:
            found[rename(key)] = tensor
    tables = {k: torch.zeros(16, 16) for k in found if k.endswith("relative_position_bias_table")}
    found |= {k.replace("bias_table", "index"): t for k, t in tables.items()}
    found["label_enc.weight"] = torch.zeros(11, 32)
    return found


@pytest.fixture(scope="module")
def published():
    """A small model of the authors' shape: eight heads everywhere, 64 channels per head in BERT."""
    from detrt.models.random import build

    heads = {"encoder_attention_heads": 8, "decoder_attention_heads": 8}
    words = {**TINY_BERT, "hidden_size": 64, "num_attention_heads": 1}
    module = build(BY_NAME["grounding_dino"], {**TINY_GROUNDING, **heads, "text_config": words})
    return module, as_published(module)


class AuthorsLogit:
    """The authors' inverse sigmoid in place of the library's: of the first `layers` calls, which the decoder makes, and of the others."""

    def __init__(self, layers, between, last):
        self.left, self.between, self.last = layers, between, last

    def __call__(self, x, eps):
        self.left -= 1
        least = self.between if self.left >= 0 else self.last
        return torch.log(x.clamp(min=least) / (1 - x).clamp(min=least))


@pytest.mark.parametrize(
    ("name", "clamps"), [("groundingdino", (1e-3, 1e-3)), ("llmdet", (1e-3, 1e-5))], ids=["IDEA-Research", "mmdetection"]
)
def test_weights_of_the_authors_refine_boxes_with_the_authors_clamps(
    name, clamps, published, multi_head, tiny, tmp_path, monkeypatch
):
    """Boxes as large as the image or without a size, where the clamps differ."""
    module = deepcopy(published[0] if name == "groundingdino" else multi_head)
    with torch.no_grad():
        module.model.encoder_output_bbox_embed.layers[-1].bias.copy_(torch.tensor([9.0, -9.0, 9.0, -9.0]))
    file = {"model": as_published(module)} if name == "groundingdino" else {"state_dict": as_mmdetection(module)}
    torch.save(file, tmp_path / f"{name}.pth")
    (tmp_path / "tokenizer.json").write_bytes(tiny("grounding_dino").tokenizer)
    found = load_source(f"ckpt:{tmp_path}/{name}.pth", tokenizer=tmp_path)
    ids = torch.tensor([[101, 1037, 44, 1012, 60, 1012, 102]])
    pixels = torch.rand(1, 3, 64, 96, generator=torch.Generator().manual_seed(3))
    inputs = {"pixel_values": pixels, "input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        stock = module(**inputs).pred_boxes
        got = deepcopy(found.module)(**inputs).pred_boxes
        monkeypatch.setattr(torch.special, "logit", AuthorsLogit(len(module.model.decoder.layers), *clamps))
        want = module(**inputs).pred_boxes
    assert (want - stock).abs().max() > 1e-4
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    sides = torch.linspace(0, 1, 2001)
    exported = found.family.detector(found.module)
    for last, least in enumerate(clamps):
        torch.testing.assert_close(
            exported._logit(sides, last=bool(last)), AuthorsLogit(1, least, 0)(sides, 0), atol=1e-6, rtol=0
        )


@pytest.mark.parametrize(("prefix", "wrapped"), [("", False), ("", True), ("module.", True)])
def test_the_authors_file_gives_the_same_model(prefix, wrapped, published, tiny, tmp_path):
    module, state = published
    named = {prefix + key: tensor for key, tensor in state.items()}
    torch.save({"model": named, "epoch": 3} if wrapped else named, tmp_path / "groundingdino.pth")
    (tmp_path / "tokenizer.json").write_bytes(tiny("grounding_dino").tokenizer)
    found = load_source(f"ckpt:{tmp_path}/groundingdino.pth", tokenizer=tmp_path)
    loaded = found.module.state_dict()
    for key, tensor in module.state_dict().items():
        if ".swin.layernorm." not in key:
            assert torch.equal(loaded[key], tensor), key
    ids = torch.tensor([[101, 1037, 44, 1012, 60, 1012, 102]])
    inputs = {"pixel_values": torch.rand(1, 3, 64, 96), "input_ids": ids}
    with torch.no_grad():
        want, got = module(**inputs), found.module(**inputs)
    torch.testing.assert_close(got.pred_boxes, want.pred_boxes, atol=1e-6, rtol=0)  # none is near an edge of the image
    assert found.spec.text.separators == (101, 102, 1012, 1029) and found.spec.family == "grounding_dino"
    assert "IDEA-Research Grounding DINO" in found.notes[0] and "queries 20" in found.notes[0]


def test_faults_of_the_authors_file(published, tiny, tmp_path, capsys):
    _, state = published
    (tmp_path / "tokenizer.json").write_bytes(tiny("grounding_dino").tokenizer)
    path = tmp_path / "g.pth"

    def loading(changed, **choices):
        torch.save({"model": changed}, path)
        return load_source(f"ckpt:{path}", **choices)

    with pytest.raises(SourceError, match="`tokenizer=FILE`"):
        loading(state)
    assert main(["export", f"ckpt:{path}", "-o", str(tmp_path / "out.onnx")]) == 2
    assert "--tokenizer FILE" in capsys.readouterr().err
    key = "transformer.encoder.fusion_layers.1.attn.l_proj.weight"
    half = {k: v for k, v in state.items() if k != key}
    with pytest.raises(SourceError, match=r"1 missing \(e.g. model.encoder.layers.1.fusion_layer.attn.text_proj"):
        loading(half, tokenizer=tmp_path)
    with pytest.raises(SourceError, match=r"1 unexpected \(e.g. transformer.more.weight\)"):
        loading({**state, "transformer.more.weight": torch.zeros(2)}, tokenizer=tmp_path)
    with pytest.raises(SourceError, match=r"1 misshapen \(e.g. transformer.encoder.fusion_layers.1"):
        loading({**state, key: torch.zeros(3, 3)}, tokenizer=tmp_path)
    with pytest.raises(SourceError, match="another family"):
        loading(state, family="deformable_detr")
    with pytest.raises(SourceError, match="NaN or infinite"):
        loading({**state, key: torch.full_like(state[key], float("nan"))}, tokenizer=tmp_path)


@pytest.mark.parametrize(
    ("name", "source", "family"),
    [
        ("groundingdino_swint_ogc", "IDEA-Research/GroundingDINO", "grounding_dino"),
        ("groundingdino_swinb_cogcoor", "IDEA-Research/GroundingDINO", "grounding_dino"),
        ("mm_grounding_dino_swin_t", "iSEE-Laboratory/LLMDet", "mm_grounding_dino"),
        ("mm_grounding_dino_swin_l", "iSEE-Laboratory/LLMDet", "mm_grounding_dino"),
    ],
)
def test_every_key_of_the_published_files_has_its_place(name, source, family):
    _, format_ = formats()[family]
    """Names and shapes alone: a list has no numbers."""
    data = json.loads((KEYS / f"{name}.json").read_text("utf-8"))
    assert data["source"].startswith(f"https://github.com/{source} @ ")
    state = meta_state(name)
    assert recognise(state) == family
    with torch.device("meta"):
        shapes, report = Shapes(state, name), LoadReport()
        module = original._build(BY_NAME[family], format_, format_.settings(shapes, Assumed({}, name), "", report), name)
    extra = format_.values(shapes)
    table = format_.table(shapes) if callable(format_.table) else format_.table
    renamed = rename({**state, **extra}, table, format_.skipped, report)
    assert set(report.used) | set(report.skipped) == set(state) | {key for key in extra if key not in state}
    wanted = {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
    # Where both classes have a head of each layer, the file has it once.
    wanted = {key: shape for key, shape in wanted.items() if key in renamed or key.removeprefix("model.decoder.") not in renamed}
    assert {key: tuple(tensor.shape) for key, tensor in renamed.items()} == wanted
    assert "labels of the denoising queries" in report.skipped.values()


# mmdetection's names, written from its code and apart from the map that is tested.
MMDET = [
    (r"^model\.backbone\.conv_encoder\.model\.swin\.embeddings\.patch_embeddings", "backbone.patch_embed"),
    (r"^model\.backbone\.conv_encoder\.model\.swin\.embeddings\.norm", "backbone.patch_embed.norm"),
    (r"^model\.backbone\.conv_encoder\.model\.swin\.encoder\.layers", "backbone.stages"),
    *((rf"^model\.backbone\.conv_encoder\.model\.hidden_states_norms\.stage{i + 1}", f"backbone.norm{i}") for i in range(4)),
    (r"\.attention\.relative_position_bias\.", ".attn.w_msa."),
    (r"\.attention\.o_proj\.", ".attn.w_msa.proj."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"(backbone\.stages.*)\.mlp\.fc1", r"\1.ffn.layers.0.0"),
    (r"(backbone\.stages.*)\.mlp\.fc2", r"\1.ffn.layers.1"),
    (r"^model\.text_backbone", "language_model.language_backbone.body.model"),
    (r"^model\.text_projection", "text_feat_map"),
    *((rf"^model\.input_proj_vision\.{i}\.0", f"neck.convs.{i}.conv") for i in range(3)),
    *((rf"^model\.input_proj_vision\.{i}\.1", f"neck.convs.{i}.gn") for i in range(3)),
    (r"^model\.input_proj_vision\.3\.0", "neck.extra_convs.0.conv"),
    (r"^model\.input_proj_vision\.3\.1", "neck.extra_convs.0.gn"),
    (r"^model\.query_position_embeddings", "query_embedding"),
    (r"^model\.enc_output_norm", "memory_trans_norm"),
    (r"^model\.enc_output", "memory_trans_fc"),
    (r"^model\.encoder_output_class_embed", "bbox_head.cls_branches.2"),
    (r"^model\.encoder_output_bbox_embed", "bbox_embed.2"),
    (r"^class_embed", "bbox_head.cls_branches"),
    *((rf"^bbox_embed\.(\d)\.layers\.{i}", rf"bbox_head.reg_branches.\1.{2 * i}") for i in range(3)),
    (r"^model\.decoder\.reference_points_head", "decoder.ref_point_head"),
    (r"^model\.decoder\.layer_norm", "decoder.norm"),
    (r"^model\.encoder\.layers\.(\d+)\.deformable_layer", r"encoder.layers.\1"),
    (r"^model\.encoder\.layers\.(\d+)\.text_enhancer_layer", r"encoder.text_layers.\1"),
    (r"^model\.encoder\.layers\.(\d+)\.fusion_layer", r"encoder.fusion_layers.\1"),
    (r"^model\.", ""),
    *FUSION,
    (r"(text_layers.*)layer_norm_before", r"\1norms.0"),
    (r"(text_layers.*)layer_norm_after", r"\1norms.1"),
    (r"^((?:encoder|decoder)\..*)\.fc1", r"\1.ffn.layers.0.0"),
    (r"^((?:encoder|decoder)\..*)\.fc2", r"\1.ffn.layers.1"),
    (r"^(encoder\.layers.*)self_attn_layer_norm", r"\1norms.0"),
    (r"^(encoder\.layers.*)final_layer_norm", r"\1norms.1"),
    (r"^(decoder\.layers.*)self_attn_layer_norm", r"\1norms.0"),
    (r"^(decoder\.layers.*)encoder_attn_text_layer_norm", r"\1norms.1"),
    (r"^(decoder\.layers.*)encoder_attn_layer_norm", r"\1norms.2"),
    (r"^(decoder\.layers.*)final_layer_norm", r"\1norms.3"),
    (r"^((?:encoder\.text|decoder\.)_?layers.*self_attn)\.", r"\1.attn."),
    (r"^(decoder\.layers.*)encoder_attn_text\.", r"\1cross_attn_text.attn."),
    (r"^(decoder\.layers.*)encoder_attn\.", r"\1cross_attn."),
]


def as_mmdetection(module):
    """The state of a transformers MM-Grounding-DINO as mmdetection saves it, with what LLMDet is trained with."""
    state, found = module.state_dict(), {}

    def rename(key):
        for pattern, new in MMDET:
            key = re.sub(pattern, new, key)
        return key

    for key, tensor in state.items():
        swin, attention = re.search(r"\.attention\.q_proj\.(\w+)$", key), re.match(ATTENTIONS, key)
        second = re.search(r"\.(k_proj|v_proj|key|value)\.\w+$", key) and ".text_backbone." not in key
        if (
            ".swin.layernorm." in key
            or second
            or (key.removeprefix("model.decoder.").startswith(("bbox_e", "class_e")) and "der" in key)
        ):
            continue
        if swin:
            parts = [state[key.replace(".q_proj.", f".{n}_proj.")] for n in "qkv"]
            found[rename(key).replace(".attention.q_proj.", ".attn.w_msa.qkv.")] = torch.cat(parts)
        elif attention:
            parts = [state[f"{attention[1]}.{n}.{attention[2]}"] for n in ("query", "key", "value")]
            found[rename(f"{attention[1]}.in_proj_{attention[2]}")] = torch.cat(parts)
        elif ".downsample." in key:
            # Neighbours (0,0), (1,0), (0,1), (1,1) of all channels become the four neighbours of each channel, row by row.
            parts = tensor.unflatten(-1, (4, -1))[..., [0, 2, 1, 3], :]
            found[rename(key)] = parts.transpose(-1, -2).flatten(-2)
        else:
            found[rename(key)] = tensor.reshape(1) if "class_embed" in key else tensor
    more = ("dn_query_generator.label_embedding.weight", "lmm.model.layers.0.weight", "connector.0.weight", "ref_point_head.x")
    return found | {key: torch.zeros(2, 2) for key in more}


def own_heads(module):
    """The module with other weights in the heads of each layer, as mmdetection trains them, in place."""
    for layer in range(len(module.bbox_embed)):
        for name in ("bbox_embed", "class_embed"):
            for leaf, parameter in list(getattr(module, name)[layer].named_parameters()):
                fresh = torch.nn.Parameter(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(layer)))
                for heads in (getattr(module, name), getattr(module.model.decoder, name)):
                    owner, _, last = leaf.rpartition(".")
                    setattr(heads[layer].get_submodule(owner), last, fresh)
    return module


@pytest.fixture(scope="module")
def multi_head():
    """A small MM-Grounding-DINO with a head of its own in each decoder layer."""
    from detrt.models.random import build

    heads = {"encoder_attention_heads": 8, "decoder_attention_heads": 8}
    words = {**TINY_BERT, "hidden_size": 64, "num_attention_heads": 1}
    return own_heads(build(BY_NAME["mm_grounding_dino"], {**TINY_GROUNDING, **heads, "text_config": words}))


def equal_outputs(want, got, logit=torch.special.logit):
    """logit: what the first of the models computes instead of the library's."""
    inputs = {"pixel_values": torch.rand(1, 3, 64, 96), "input_ids": torch.tensor([[101, 1037, 44, 1012, 60, 1012, 102]])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        got = got(**inputs)
        patch.setattr(torch.special, "logit", logit)
        want = want(**inputs)
    assert torch.equal(want.pred_boxes, got.pred_boxes) and torch.equal(want.logits, got.logits)


def test_mmdetections_file_gives_the_same_model(multi_head, tiny, tmp_path):
    torch.save({"meta": {"epoch": 3}, "state_dict": as_mmdetection(multi_head)}, tmp_path / "llmdet.pth")
    (tmp_path / "tokenizer.json").write_bytes(tiny("mm_grounding_dino").tokenizer)
    found = load_source(f"ckpt:{tmp_path}/llmdet.pth", tokenizer=tmp_path)
    loaded = found.module.state_dict()
    for key, tensor in multi_head.state_dict().items():
        if ".swin.layernorm." not in key:
            assert torch.equal(loaded[key], tensor), key
    equal_outputs(multi_head, found.module, AuthorsLogit(len(multi_head.model.decoder.layers), 1e-3, 1e-5))
    assert found.spec.family == "mm_grounding_dino"
    assert "iSEE-Laboratory LLMDet" in found.notes[0] and "queries 20" in found.notes[0]
    stock = {key: tensor for key, tensor in as_mmdetection(multi_head).items() if "cls_branches" not in key}
    torch.save(stock, tmp_path / "copy.pth")
    with pytest.raises(SourceError, match="mmdetection's copy of a Grounding DINO"):
        load_source(f"ckpt:{tmp_path}/copy.pth", tokenizer=tmp_path)


@pytest.mark.parametrize(
    "left_out", [r"(bbox|class)_embed\.1|model\.decoder\.(bbox|class)_embed\.0", r"model\.decoder\.(bbox|class)_embed"]
)
def test_heads_that_a_folder_stores_under_one_name(left_out, multi_head, tiny, tmp_path):
    """safetensors keeps one name of shared weights, and transformers then ties all layers to the first."""
    from safetensors.torch import save_file

    state = {k: t.clone() for k, t in multi_head.state_dict().items() if not re.match(left_out, k)}
    save_file(state, tmp_path / "model.safetensors")
    multi_head.config.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(tiny("mm_grounding_dino").tokenizer)
    equal_outputs(multi_head, load_source(str(tmp_path), preprocess="family-default").module)


def under_timms_names(module):
    """The state of a tiny OmDet-Turbo as the published checkpoint names it: timm's Swin, norms outside of it."""
    state, timm = module.state_dict(), {}
    head = "vision_backbone.vision_backbone."
    for key, tensor in state.items():
        if key.startswith("vision_backbone.layer_norms."):
            continue
        if not key.startswith(head):
            timm[key.replace("language_backbone.model.", "language_backbone.model.text_model.")] = tensor
            continue
        name = key.removeprefix(head).removeprefix("swin.")
        if "k_proj" in name or "v_proj" in name or name.startswith("layernorm."):
            continue
        norm = re.match(r"hidden_states_norms\.stage(\d)\.(\w+)", name)
        if norm:
            timm[f"vision_backbone.layer_norms.{int(norm[1]) - 2}.{norm[2]}"] = tensor
            continue
        if "q_proj" in name:
            tensor = torch.cat([state[key.replace("q_proj", f"{n}_proj")] for n in "qkv"])
        # timm counts the merging of patches to the stage after it.
        name = re.sub(r"^encoder\.layers\.(\d)\.down", lambda m: f"layers_{int(m[1]) + 1}.down", name)
        name = re.sub(r"^encoder\.layers\.(\d)", r"layers_\1", name)
        for old, new in (
            ("embeddings.patch_embeddings.projection", "patch_embed.proj"),
            ("embeddings.norm", "patch_embed.norm"),
            ("layernorm_before", "norm1"),
            ("layernorm_after", "norm2"),
            ("attention.q_proj", "attn.qkv"),
            ("attention.o_proj", "attn.proj"),
            ("attention.relative_position_bias", "attn"),
        ):
            name = name.replace(old, new)
        timm[f"{head}_backbone.{name}"] = tensor
    return timm


def test_omdet_turbo_with_timms_backbone(tiny, tmp_path, monkeypatch):
    """The published checkpoint asks for the timm package; its weights are read into the library's own Swin."""
    from safetensors.torch import save_file

    want = tiny("omdet_turbo")
    want.module.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"backbone_config": None, "backbone": "swin_test", "use_timm_backbone": True}
    config |= {"apply_layernorm_after_vision_backbone": True, "backbone_kwargs": {"out_indices": [1, 2, 3]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({k: t.contiguous() for k, t in under_timms_names(want.module).items()}, tmp_path / "model.safetensors")
    (tmp_path / "tokenizer.json").write_bytes(want.tokenizer)
    save_processor(want, tmp_path)
    with pytest.raises(SourceError, match=r"backbone of .* is timm's 'swin_test'; detrt reads swin_tiny_patch4"):
        load_source(str(tmp_path))
    monkeypatch.setitem(timm_swin.SWINS, "swin_test", TINY_SWIN)
    found = load_source(str(tmp_path))
    state = found.module.state_dict()
    for key, tensor in want.module.state_dict().items():
        if ".swin.layernorm." not in key and "vision_backbone.layer_norms." not in key:
            assert torch.equal(state[key], tensor), key
    with torch.no_grad():
        maps = [m.vision_backbone(torch.ones(1, 3, 64, 64)) for m in (want.module, found.module)]
    assert all(torch.equal(a, b) for a, b in zip(*maps, strict=True))


@pytest.mark.slow
def test_the_tokenizer_travels_from_every_command(published, tiny, tmp_path, capsys):
    """An authors' file is opened, built and verified with the tokenizer that is given once."""
    from PIL import Image

    from detrt import Detector, ExportConfig, build, verify
    from detrt.errors import SpecError

    _, state = published
    torch.save(state, tmp_path / "g.pth")
    (tmp_path / "tokenizer.json").write_bytes(tiny("grounding_dino").tokenizer)
    Image.new("RGB", (80, 60), "red").save(tmp_path / "red.png")
    ref, words = f"ckpt:{tmp_path}/g.pth", tmp_path / "tokenizer.json"
    choices = ExportConfig(height=64, width=96, msda="gridsample", check=False)
    build(ref, tmp_path / "bundle", export=choices, tokenizer=words)
    manifest = json.loads((tmp_path / "bundle" / "detrt.json").read_text())
    assert {f["kind"] for f in manifest["files"]} == {"onnx", "text", "tokenizer"}
    assert manifest["provenance"]["options"]["tokenizer"] == str(words)
    with Detector.open(ref, tokenizer=words, prompt="red cat.", threshold=0.0) as detector:
        assert set(detector([tmp_path / "red.png"])[0].labels) == {"red cat"}
    with pytest.raises(SpecError, match="`tokenizer=.*` says how a checkpoint is read"):
        Detector.open(tmp_path / "bundle", tokenizer=words, prompt="red cat.")
    # None: the checkpoint that the bundle was made from, with its tokenizer.
    report = verify(None, tmp_path / "bundle", [tmp_path / "red.png"], prompt="red cat. star.")
    assert report.worst_tensor < 1e-3
    arguments = ["detect", ref, str(tmp_path / "red.png"), "--prompt", "red cat.", "--threshold", "0"]
    assert main([*arguments, "--tokenizer", str(words)]) == 0
    assert main(arguments) == 2
    assert "--tokenizer FILE" in capsys.readouterr().err
