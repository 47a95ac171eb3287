"""A tiny Qwen3 that has learned to call one tool, with Qwen3's chat template as TRL ships it."""

from pathlib import Path
from typing import Any

import torch
import trl
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

_STEPS = 60


def calling_model(call: str) -> tuple[Any, Any]:
    """Return model and tokenizer; the model's reply is mostly this call, whatever it is asked."""
    body = f"\n{call}\n"
    reply = f"<tool_call>{body}</tool_call>"
    tokenizer = _tokenizer(body)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    start = tokenizer.encode("<|im_start|>assistant\n")
    ids = torch.tensor([start + tokenizer.encode(f"{reply}<|im_end|>")] * 8)
    noise = torch.randint(0, len(tokenizer), (8, 24))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(_STEPS):
        noise = torch.randint(0, len(tokenizer), noise.shape)
        labels = torch.cat([torch.full_like(noise, -100), ids], 1)
        labels[:, : noise.shape[1] + len(start)] = -100
        model(input_ids=torch.cat([noise, ids], 1), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer


def _tokenizer(body: str) -> Any:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    marks = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    calls = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
    # The whole of a call is one token: each token of the reply follows from the one before it, so that little is to be
    # learned.
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in (*calls, body)])
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template.read_text(),
    )
