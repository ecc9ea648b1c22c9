"""Sub-sentences as tensor algebra, against the published rule token by token and against the library's function."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the 'export' extra")
pytest.importorskip("transformers", reason="needs the 'export' extra")

from transformers import BertConfig, BertModel
from transformers.models.grounding_dino import modeling_grounding_dino as library

from detrt.models.layers.grounding_dino import _bert_layer, additive, sub_sentences

CLS, SEP, DOT, ASK = SEPARATORS = [101, 102, 1012, 1029]
PROMPTS = {
    "one phrase": [CLS, 7, DOT, SEP],
    "words of different counts": [CLS, 7, 8, DOT, 9, DOT, 10, 11, 12, DOT, SEP],
    "a question": [CLS, 7, 8, ASK, 9, DOT, SEP],
    "two stops in a row": [CLS, 7, DOT, DOT, 8, DOT, SEP],
    "starts with a stop": [CLS, DOT, 8, 9, DOT, SEP],
    "no final stop": [CLS, 7, 8, DOT, 9, 10, SEP],
    "no stop at all": [CLS, 7, 8, 9, SEP],
    "nothing but the frame": [CLS, SEP],
    "only stops": [CLS, DOT, ASK, DOT, SEP],
}


def published(rows):
    """The authors' rule: go from separator to separator, and open the square of tokens between the two.

    A separator at the first or the last place of a row closes nothing.
    """
    batch, length = rows.shape
    mask = np.repeat(np.eye(length, dtype=bool)[None], batch, 0)
    positions = np.zeros((batch, length), np.int64)
    for row in range(batch):
        before = 0
        for place in np.flatnonzero(np.isin(rows[row], SEPARATORS)):
            if place not in (0, length - 1):
                mask[row, before + 1 : place + 1, before + 1 : place + 1] = True
                positions[row, before + 1 : place + 1] = np.arange(place - before)
            before = place
    return mask, positions


def batch_of(prompts, padding=0):
    length = max(map(len, prompts)) + padding
    return np.array([[*prompt, *[0] * (length - len(prompt))] for prompt in prompts])


@pytest.mark.parametrize("padding", [0, 1, 5])
@pytest.mark.parametrize("name", PROMPTS)
def test_one_prompt(name, padding):
    rows = batch_of([PROMPTS[name]], padding)
    mask, positions = sub_sentences(torch.from_numpy(rows), torch.tensor(SEPARATORS))
    want_mask, want_positions = published(rows)
    assert np.array_equal(mask.numpy(), want_mask)
    assert np.array_equal(positions.numpy(), want_positions)


def test_a_batch_of_all_prompts_and_long_random_ones():
    rng = np.random.default_rng(3)
    rows = [batch_of(list(PROMPTS.values()))]
    for length in (2, 3, 64, 256):
        inner = rng.choice([7, 8, 9, 10, DOT, ASK], (4, length - 2))
        rows.append(np.concatenate([np.full((4, 1), CLS), inner, np.full((4, 1), SEP)], 1))
    for batch in rows:
        found = sub_sentences(torch.from_numpy(batch), torch.tensor(SEPARATORS))
        stock = library.generate_masks_with_special_tokens_and_transfer_map(
            torch.from_numpy(batch), special_tokens=torch.tensor(SEPARATORS)
        )
        for mine, theirs, rule in zip(found, stock, published(batch), strict=True):
            assert torch.equal(mine, theirs)
            assert np.array_equal(mine.numpy(), rule)


def test_a_prompt_with_its_final_stop_does_not_depend_on_padding():
    for name, prompt in PROMPTS.items():
        mask, positions = sub_sentences(torch.tensor([prompt]), torch.tensor(SEPARATORS))
        padded_mask, padded = sub_sentences(torch.from_numpy(batch_of([prompt], 4)), torch.tensor(SEPARATORS))
        n = len(prompt)
        same = torch.equal(mask, padded_mask[:, :n, :n]) and torch.equal(positions, padded[:, :n])
        assert same is (name not in ("no final stop", "no stop at all"))


def test_the_library_must_not_add_the_mask_to_the_scores():
    """Why the loader chooses BERT's attention: transformers' eager one adds True as 1 and hides nothing."""
    torch.manual_seed(0)
    config = BertConfig(vocab_size=1100, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
    bert = BertModel(config, add_pooling_layer=False).eval()
    for layer in bert.encoder.layer:  # scores of the size that trained models have
        layer.attention.self.query.weight.data.normal_()
        layer.attention.self.key.weight.data.normal_()
    ids = torch.from_numpy(batch_of([PROMPTS["words of different counts"]]))
    mask, positions = sub_sentences(ids, torch.tensor(SEPARATORS))
    found = {}
    with torch.no_grad():
        for kind in ("eager", "sdpa"):
            bert.set_attn_implementation(kind)
            found[kind] = bert(ids, mask[:, None], torch.zeros_like(ids), positions).last_hidden_state
        x = bert.embeddings(input_ids=ids, position_ids=positions)
        for layer in bert.encoder.layer:
            x = _bert_layer(layer, x, additive(mask)[:, None])
    torch.testing.assert_close(x, found["sdpa"], atol=1e-5, rtol=1e-5)
    assert (found["eager"] - found["sdpa"]).abs().max() > 1e-3
