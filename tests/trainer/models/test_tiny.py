"""The tiny policy and its tokenizer are built alike everywhere."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rollgym.trainer.models.load import load_model, load_tokenizer, save_model
from rollgym.trainer.models.tiny import TinyPolicySettings, build_tiny_model, build_tiny_tokenizer

TOKENIZER = build_tiny_tokenizer()


@given(text=st.text(max_size=40))
def test_any_text_comes_back(text):
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids) == text


def test_a_board_has_one_token_a_cell():
    board = "P__O\n_O__\n___O\n#$.G"
    assert len(TOKENIZER.encode(board, add_special_tokens=False)) == len(board)


def test_actions_are_one_token():
    for action in ("Left", "Down", "Right", "Up"):
        assert len(TOKENIZER.encode(action, add_special_tokens=False)) == 1


def test_equal_seeds_give_equal_weights_and_touch_no_other_stream():
    settings = TinyPolicySettings(len(TOKENIZER), hidden_size=16, layers=1, heads=2)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second = build_tiny_model(settings, 7), build_tiny_model(settings, 7)
    assert torch.equal(torch.rand(3), expected)
    other = build_tiny_model(settings, 8)
    for a, b, c in zip(first.parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.dim() == 1 or not torch.equal(a, c)


def test_saved_and_loaded(tmp_path):
    settings = TinyPolicySettings(len(TOKENIZER), hidden_size=16, layers=1, heads=2)
    model = build_tiny_model(settings, 7)
    save_model(model, TOKENIZER, tmp_path)
    loaded, tokenizer = load_model(tmp_path), load_tokenizer(tmp_path)
    ids = torch.tensor([[3, 50, 60, 4]])
    assert torch.equal(model(ids).logits, loaded(ids).logits)
    messages = [{"role": "user", "content": "P__\n√O_"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == TOKENIZER.apply_chat_template(
        messages, tokenize=False
    )
    assert tokenizer.encode("P_O Left", add_special_tokens=False) == TOKENIZER.encode(
        "P_O Left", add_special_tokens=False
    )
