"""Chat templates in the shapes of published ones, written for these tests, and tokenizers that know their marks."""

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from rollgym.trainer.models.tiny import build_tiny_tokenizer

QWEN25 = (
    "{%- if messages[0].role == 'system' -%}<|im_start|>system{{ '\n' }}{{ messages[0].content }}<|im_end|>{{ '\n' }}"
    "{%- else -%}<|im_start|>system{{ '\n' }}You are a helpful assistant.<|im_end|>{{ '\n' }}{%- endif -%}"
    "{%- for message in messages -%}{%- if not (loop.first and message.role == 'system') -%}"
    "<|im_start|>{{ message.role }}{{ '\n' }}{{ message.content }}<|im_end|>{{ '\n' }}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\n' }}{%- endif -%}"
)
# Thoughts of earlier turns are taken away; without thinking the turn opens with an empty thought.
QWEN3 = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}{{ '\n' }}"
    "{%- if message.role == 'assistant' -%}"
    "{{ message.content.split('</think>')[-1].lstrip('\n') if not loop.last else message.content }}"
    "{%- else -%}{{ message.content }}{%- endif -%}<|im_end|>{{ '\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant{{ '\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "<think>{{ '\n\n' }}</think>{{ '\n\n' }}{%- endif -%}{%- endif -%}"
)
LLAMA3 = (
    "{{- bos_token -}}{%- for message in messages -%}"
    "<|start_header_id|>{{ message.role }}<|end_header_id|>{{ '\n\n' }}{{ message.content | trim }}<|eot_id|>"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|start_header_id|>assistant<|end_header_id|>{{ '\n\n' }}{%- endif -%}"
)
GEMMA = (
    "{{- bos_token -}}{%- if messages[0].role == 'system' -%}{{ raise_exception('System role not supported') }}"
    "{%- endif -%}{%- for message in messages -%}"
    "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif -%}"
    "<start_of_turn>{{ 'model' if message.role == 'assistant' else message.role }}{{ '\n' }}"
    "{{ message.content | trim }}<end_of_turn>{{ '\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<start_of_turn>model{{ '\n' }}{%- endif -%}"
)
# The system message is written into the last user message, and so moves with every turn.
MISTRAL = (
    "{{- bos_token -}}{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}"
    "{%- set turns = messages[1:] if messages[0].role == 'system' else messages -%}"
    "{%- for message in turns -%}"
    "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('After the optional system message, roles must alternate user/assistant') }}{%- endif -%}"
    "{%- if message.role == 'user' -%}"
    "[INST] {{ system + '\n\n' if loop.last and system else '' }}{{ message.content }}[/INST]"
    "{%- else -%}{{ message.content }}{{ eos_token }}{%- endif -%}{%- endfor -%}"
)
GRANITE = (
    "{%- for message in messages -%}<|start_of_role|>{{ message.role }}<|end_of_role|>{{ message.content }}"
    "<|end_of_text|>{{ '\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|start_of_role|>assistant<|end_of_role|>{%- endif -%}"
)

SMOLLM2 = QWEN25.replace(
    "You are a helpful assistant.", "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
)
# The marks of roles are added tokens that the tokenizer does not call special.
DEEPSEEK = (
    "{{- bos_token -}}{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}{{ message.content }}"
    "{%- elif message.role == 'user' -%}<｜User｜>{{ message.content }}"
    "{%- else -%}<｜Assistant｜>{{ message.content.split('</think>')[-1] if not loop.last else message.content }}"
    "{{ eos_token }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<｜Assistant｜>{%- endif -%}"
)

FAMILIES = {
    "qwen2.5": (QWEN25, None, "<|im_end|>"),
    "qwen3": (QWEN3, None, "<|im_end|>"),
    "llama-3": (LLAMA3, "<|begin_of_text|>", "<|eot_id|>"),
    "gemma": (GEMMA, "<bos>", "<end_of_turn>"),
    "mistral": (MISTRAL, "<s>", "</s>"),
    "granite": (GRANITE, None, "<|end_of_text|>"),
    "smollm2": (SMOLLM2, None, "<|im_end|>"),
    "deepseek": (DEEPSEEK, "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
}
_MARKS = (
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|begin_of_text|>",
    ),
    *("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    *("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<s>", "</s>", "[INST]", "[/INST]"),
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
)
_NOT_SPECIAL = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")


def tokenizer_of(family: str):
    """A tokenizer with a family's template and marks."""
    template, bos, closing = FAMILIES[family]
    tokenizer = build_tiny_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(mark, special=True, normalized=False) for mark in _MARKS]}
    )
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in _NOT_SPECIAL])
    tokenizer.chat_template = template
    if bos is not None:
        tokenizer.bos_token = bos
    tokenizer.eos_token = "<eos>" if family == "gemma" else closing
    return tokenizer


_CORPUS = (
    "Left Right Up Down. You stand on a frozen lake; reach the goal and avoid holes. Reply with one move only.",
    "S F H G P _ O X\n_ O _ _\nS_OG\nP___ the player moves up, moves down, moves left, moves right, and the game ends.",
    "What is 12 + 30? The answer is 42. Think step by step, then answer with a number only.",
)


def trained_tokenizer(family: str, vocabulary: int = 400):
    """A byte-level tokenizer trained here on a few sentences, with a family's template and marks.

    A policy that has learnt nothing says tokens in orders that no text is ever cut into: to encode its replies once
    more gives other ids.
    """
    core = Tokenizer(BPE())
    core.pre_tokenizer = ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=ByteLevel.alphabet(),
        special_tokens=["<|pad|>", *_MARKS],
        show_progress=False,
    )
    core.train_from_iterator(_CORPUS, trainer)
    template, bos, closing = FAMILIES[family]
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<|pad|>",
        bos_token=bos,
        eos_token="<eos>" if family == "gemma" else closing,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
