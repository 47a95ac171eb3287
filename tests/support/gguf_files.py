"""GGUF files of a small policy, as llama.cpp's converter writes them: Llama's tensors and a byte-level tokenizer."""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rollgym.trainer.models.tiny import build_tiny_tokenizer

CONTROL, NORMAL = 3, 1
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def small_llama(seed: int = 0) -> LlamaForCausalLM:
    """A Llama of two layers over the tiny policy's tokens; a row of its weights fills one block of a quantized type."""
    tokenizer = build_tiny_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    quantized: str | None = None,
    pre: str = "gpt-2",
    template: bool = True,
) -> Path:
    """Write a model and the tiny policy's tokenizer.

    Args:
        path: The file.
        model: The model.
        quantized: Type of its matrices by GGUF's name; None: 32-bit floats.
        pre: How texts are cut, by llama.cpp's name.
        template: Whether the file holds the chat template.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    config, tokenizer = model.config, build_tiny_tokenizer()
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    core = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(core["vocab"], key=core["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if each in tokenizer.all_special_tokens else NORMAL for each in tokens])
    writer.add_token_merges([" ".join(pair) for pair in core["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(False)
    if template:
        writer.add_chat_template(tokenizer.chat_template)
    for name, weight in model.state_dict().items():
        values = weight.float().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            of_queries = name.endswith("q_proj.weight")
            heads = config.num_attention_heads if of_queries else config.num_key_value_heads
            values = _interleaved(values, heads)
        if quantized is None or values.ndim == 1:
            writer.add_tensor(_name(name), values)
        else:
            kind = GGMLQuantizationType[quantized]
            writer.add_tensor(_name(name), quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _name(name: str) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_PARTS[part]}.weight"


def _interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """Rotary halves of each head side by side, as llama.cpp has them."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, values.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
