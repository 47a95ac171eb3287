"""Text for the double's OpenAI routes: bytes as tokens for the hash model, a folder's own tokenizer otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tests.support.inference_server.models import END_ID, START_ID


class Tokens(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def chat(self, messages: list[dict[str, Any]], tools: list[Any] | None, **kwargs: Any) -> list[int]: ...


class ByteTokens:
    """Bytes are tokens; messages stand between a start and an end."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def chat(self, messages: list[dict[str, Any]], tools: list[Any] | None, **kwargs: Any) -> list[int]:
        ids: list[int] = []
        for message in messages:
            ids += [START_ID, *self.encode(f"{message['role']}\n{_content(message)}"), END_ID, 10]
        return [*ids, START_ID, *self.encode("assistant\n")]


class FolderTokens:
    """The tokenizer of a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def chat(self, messages: list[dict[str, Any]], tools: list[Any] | None, **kwargs: Any) -> list[int]:
        return list(
            self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, return_dict=False, **kwargs
            )
        )


def tokens_of(folder: Path | None) -> Tokens:
    """The folder's tokenizer where it has one."""
    names = ("tokenizer.json", "tokenizer_config.json", "vocab.json")
    if folder is not None and any((folder / name).exists() for name in names):
        return FolderTokens(folder)
    return ByteTokens()


def _content(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)
