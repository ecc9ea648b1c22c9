"""Training of the prompted demo detector: prompts, losses, files, and what the shipped model reaches."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from smoke_runs import run_smoke

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="needs the 'export' extra")
pytest.importorskip("scipy")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "src" / "detrt" / "models" / "embedded" / "phrases"


@pytest.fixture(scope="module", autouse=True)
def _training_modules():
    sys.path.insert(0, str(ROOT / "training"))
    yield
    sys.path.remove(str(ROOT / "training"))


@pytest.fixture(scope="module")
def scenes():
    from detrt.data.scenes.scene import draw_scene

    return [draw_scene(seed) for seed in range(24)]


@pytest.fixture(scope="module")
def model():
    from phrases_model import build_model

    return build_model(0)


@pytest.fixture(scope="module")
def batch():
    from phrases_data import PhrasePool

    pool = PhrasePool(64, 0, 0)
    pool.to(torch.device("cpu"), 0)
    return pool.batch(3, np.random.default_rng(4), scale=0.5)


def arrays(scenes):
    from phrases_captions import numbers

    from detrt.data.scenes.phrases import Phrase

    objects, counts = np.zeros((len(scenes), 12, 3), np.int64), np.array([len(s.objects) for s in scenes])
    for k, scene in enumerate(scenes):
        for j, item in enumerate(scene.objects):
            objects[k, j] = numbers(Phrase(item.color, item.fill, item.label))
    return objects, counts


def test_vocabulary_keeps_the_ids_that_stock_code_relies_on():
    from phrases_model import build_tokenizer

    tokenizer = build_tokenizer()
    known = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103, ".": 1012, "?": 1029}
    assert {piece: tokenizer.token_to_id(piece) for piece in known} == known
    assert tokenizer.encode("A RED letter A.").tokens == ["[CLS]", "a", "red", "letter", "a", ".", "[SEP]"]
    assert tokenizer.encode("zebra é 漢").tokens == [
        "[CLS]",
        "z",
        "##e",
        "##b",
        "##r",
        "##a",
        "e",
        "[UNK]",
        "[SEP]",
    ]
    assert tokenizer.to_str() == build_tokenizer().to_str()
    assert json.loads((FOLDER / "tokenizer.json").read_text("utf-8")) == json.loads(tokenizer.to_str())


def test_prompts_of_batches_are_those_of_the_package(scenes):
    from phrases_captions import matches, numbers, token_targets, write
    from phrases_model import build_tokenizer

    from detrt.data.scenes.phrases import caption_scene, find

    objects, counts = arrays(scenes)
    captions = [caption_scene(scene, k, phrases=7, held_out=True) for k, scene in enumerate(scenes)]
    phrases = np.array([[numbers(p) for p in caption.phrases] for caption in captions])
    prompts = write(phrases, np.ones(phrases.shape[:2], bool))
    named, tokens = matches(phrases, objects), token_targets(prompts, objects, counts)
    tokenizer = build_tokenizer()
    for k, (scene, caption) in enumerate(zip(scenes, captions, strict=True)):
        plain = " ".join(f"{p.text()}." for p in caption.phrases)
        ids = tokenizer.encode(plain).ids
        assert prompts.input_ids[k][prompts.attention_mask[k] == 1].tolist() == ids
        found = find(scene, caption.phrases)
        for p, wanted in enumerate(found):
            assert tuple(np.flatnonzero(named[k, p, : counts[k]])) == wanted
            for m in range(counts[k]):
                assert (tokens[k, m, prompts.owner[k] == p] == (m in wanted)).all()
        stops = prompts.owner[k] == -1
        assert not tokens[k][:, stops].any()


def test_no_training_prompt_holds_a_held_out_pair(scenes):
    from phrases_captions import draw_phrases, held_out, write
    from phrases_model import build_tokenizer

    from detrt.data.scenes.phrases import HELD_OUT_COLORS, HELD_OUT_FILLS

    objects, counts = arrays(scenes)
    rng, tokenizer = np.random.default_rng(0), build_tokenizer()
    pairs = [(p.color or p.fill, p.shape.lower()) for p in (*HELD_OUT_COLORS, *HELD_OUT_FILLS)]
    assert np.logical_or(*held_out(objects)).any()  # such objects are in the images
    seen = set()
    for _ in range(60):
        phrases, asked = draw_phrases(objects, counts, rng, simple=0.3)
        assert not np.logical_or(*held_out(phrases)).any()
        for row in write(phrases, asked, rng, multiple=16).input_ids:
            for words in tokenizer.decode(row.tolist()).split("."):
                seen.update(words.split())
                assert not [pair for pair in pairs if pair[0] in words.split() and f" {pair[1]}" in f" {words}"]
    assert {"red", "striped", "hexagon", "thing", "an", "the"} <= seen


def test_forward_is_that_of_the_stock_class(model, batch):
    from phrases_model import forward, sub_sentences
    from transformers.models.grounding_dino import modeling_grounding_dino as stock

    with torch.no_grad():
        ours = forward(model, batch.pixels, batch.mask, batch.input_ids, batch.attention_mask)
        theirs = model(
            pixel_values=batch.pixels,
            pixel_mask=batch.mask,
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
        )
    tokens = batch.input_ids.shape[1]
    real = batch.attention_mask.bool()[:, None].expand(-1, ours.logits.shape[2], -1)
    torch.testing.assert_close(ours.logits[-1][real], theirs.logits[..., :tokens][real])
    torch.testing.assert_close(ours.boxes[-1], theirs.pred_boxes)
    see, places = sub_sentences(batch.input_ids, model.model.special_tokens)
    wanted = stock.generate_masks_with_special_tokens_and_transfer_map(batch.input_ids, model.model.special_tokens)
    assert torch.equal(see, wanted[0]) and torch.equal(places, wanted[1])


def test_matching_is_one_to_one_and_seldom_dearer_than_the_best(model, batch):
    from phrases_loss import _costs, match
    from phrases_model import forward
    from scipy.optimize import linear_sum_assignment

    with torch.no_grad():
        out = forward(model, batch.pixels, batch.mask, batch.input_ids, batch.attention_mask)
    found, costs = match(out.logits, out.boxes, batch.targets), _costs(out.logits, out.boxes, batch.targets)
    ours = best = 0.0
    for layer in range(len(found)):
        for image, valid in enumerate(batch.targets.valid):
            queries = found[layer, image][valid]
            assert len(set(queries.tolist())) == int(valid.sum())
            table = costs[layer, image][valid].numpy()
            rows, columns = linear_sum_assignment(table)
            ours += float(table[range(len(queries)), queries.numpy()].sum())
            best += float(table[rows, columns].sum())
    assert best <= ours + 1e-4 and ours <= best + 0.05 * abs(best)


@pytest.mark.slow
def test_a_few_steps_lower_the_loss_of_one_batch(batch):
    from phrases_loss import AttributeHeads, detection_loss, noised_boxes
    from phrases_model import build_model, forward

    model = build_model(1)
    heads = AttributeHeads(model.config.d_model, (12, 6, 12))
    optimizer = torch.optim.AdamW([*model.parameters(), *heads.parameters()], lr=3e-4)
    totals = []
    for step in range(9):
        torch.manual_seed(0)  # the same noise in every step
        noise = noised_boxes(batch.targets, model.config.num_queries)
        out = forward(model, batch.pixels, batch.mask, batch.input_ids, batch.attention_mask, noise.boxes, noise.hidden)
        losses = detection_loss(out, batch.targets, noise, batch.attention_mask.float(), heads)
        total = torch.stack(list(losses.values())).sum()
        totals.append(float(total.detach()))
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step == 0:
            without = {n for n, p in model.named_parameters() if p.grad is None}
            assert without == {f"model.backbone.conv_encoder.model.swin.layernorm.{n}" for n in ("weight", "bias")}
    assert all(np.isfinite(totals)) and totals[-1] < 0.9 * totals[0], totals


def test_the_shipped_model_finds_what_it_is_asked_for():
    pytest.importorskip("pycocotools")
    from evaluate_phrases import average_precision, predict, ways
    from transformers import AutoModelForZeroShotObjectDetection

    from detrt.data.scenes.scene import draw_scene

    assert (FOLDER / "model.safetensors").stat().st_size <= 15_000_000
    model = AutoModelForZeroShotObjectDetection.from_pretrained(FOLDER).eval()
    assert model.dtype == torch.float32

    def forward(pixels, mask, ids, attention):
        out = model(pixel_values=pixels, pixel_mask=mask, input_ids=ids, attention_mask=attention)
        return out.logits, out.pred_boxes

    drawn = [draw_scene(2**38 + k) for k in range(8)]
    for name, least in (("shapes", 0.65), ("held_out", 0.5)):  # 0.77 and 0.73 on 500 scenes
        categories, prompts = ways(drawn)[name]
        found = predict(forward, drawn, prompts, categories, torch.device("cpu"), batch=8)
        assert average_precision(drawn, categories, found)["ap"] >= least


def test_the_record_holds_the_run_and_the_targets():
    record = json.loads((ROOT / "training" / "demo_phrases.json").read_text("utf-8"))
    scores = record["held_out_scenes"]
    assert scores["scenes"] == 500
    assert scores["shapes"]["ap"] >= 0.70 and scores["held_out"]["ap"] >= 0.50
    assert scores["held_out"]["ap_colors"] >= 0.50 and scores["held_out"]["ap_fills"] >= 0.50
    assert record["versions"]["transformers"] and record["steps"] > 0 and len(record["loss_curve"]) > 50


def test_embedded_phrases_loads_as_any_folder():
    from detrt.models.load import load_source

    source = load_source("embedded:phrases")
    assert source.spec.family == "grounding_dino" and source.spec.text is not None
    assert source.spec.text.separators == (101, 102, 1012, 1029)
    assert source.spec.input.shortest_edge == 240 and source.spec.input.longest_edge == 320
    assert source.tokenizer


@pytest.mark.slow
def test_smoke_run_leaves_a_loadable_model_a_record_and_resumes(tmp_path):
    pytest.importorskip("pycocotools")

    done = run_smoke("train_phrases.py", tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    record = json.loads((tmp_path / "demo_phrases.json").read_text("utf-8"))
    assert record["steps"] == 2 and [point["step"] for point in record["loss_curve"]] == [1, 2]
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {path.name for path in FOLDER.iterdir()} - {"README.md"}

    from detrt.models.load import load_source

    assert load_source(str(tmp_path / "model")).spec.text is not None
    again = run_smoke("train_phrases.py", tmp_path, "--steps", "3")
    assert again.returncode == 0 and "resumed at step 2" in again.stdout, again.stderr[-2000:]
    other = run_smoke("train_phrases.py", tmp_path, "--seed", "1")
    assert other.returncode != 0 and "give the same arguments or another --checkpoint" in other.stderr
