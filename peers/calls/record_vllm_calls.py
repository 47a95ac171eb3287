"""Records what vLLM's parsers of calls and of thinking read in the texts of `call_texts`.

Runs in an interpreter that has vLLM; no device is needed, and no model. Each parser is asked as vLLM's server asks it
for a whole reply, with a tokenizer that has the marks of all families as tokens of their own.

    PYTHONPATH=. PYTHON -m peers.calls.record_vllm_calls --out CASES
"""

import argparse
import json
import logging
from pathlib import Path
from typing import Any

import vllm
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from peers.calls.call_texts import REPLIES, TOOLS, texts

PARSERS = {
    "hermes": "hermes",
    "qwen-xml": "qwen3_coder",
    "llama": "llama3_json",
    "mistral": "mistral",
    "mistral-named": "mistral",
    "python": "pythonic",
}
"""vLLM's parser of each family."""
REASONING = "deepseek_r1"
"""vLLM's parser of replies whose thinking the prompt may have opened."""
_MARKS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *("[THINK]", "[/THINK]", "<|python_tag|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>"),
]


def main() -> None:
    """Write what is read."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("--out", type=Path, required=True)
    out = arguments.parse_args().out
    logging.disable(logging.CRITICAL)
    tokenizer = _tokenizer(_MARKS)
    # By the second mark vLLM's parser knows which of the two forms a tokenizer is made for.
    tokenizers = {"mistral": _tokenizer([mark for mark in _MARKS if mark != "[ARGS]"])}
    request = _request()
    found: list[dict[str, Any]] = [
        {
            "family": each.family,
            "name": each.name,
            "text": each.text,
            **_called(PARSERS[each.family], each.text, tokenizers.get(each.family, tokenizer), request),
        }
        for each in texts()
    ]
    found += [
        {"family": "thinking", "name": name, "text": text, **_thought(text, tokenizer, request)}
        for name, text in REPLIES.items()
    ]
    record = {"vllm": vllm.__version__, "parsers": {**PARSERS, "thinking": REASONING}, "texts": found}
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _called(parser: str, text: str, tokenizer: Any, request: Any) -> dict[str, Any]:
    reader = ToolParserManager.get_tool_parser(parser)(tokenizer, request.tools)
    said = reader.extract_tool_calls(text, request)
    calls = [[each.function.name, each.function.arguments] for each in said.tool_calls]
    return {"calls": calls, "content": said.content or ""}


def _thought(text: str, tokenizer: Any, request: Any) -> dict[str, Any]:
    reader = ReasoningParserManager.get_reasoning_parser(REASONING)(tokenizer)
    thought, said = reader.extract_reasoning(text, request)
    return {"thought": thought or "", "content": said or ""}


def _request() -> Any:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in TOOLS.items()
    ]
    return ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], model="m", tools=tools)


def _tokenizer(marks: list[str]) -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.add_tokens(marks)
    return fast


if __name__ == "__main__":
    main()
