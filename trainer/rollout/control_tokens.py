"""Control tokens: what a chat template writes is one, what a message says is text.

A tokenizer takes every spelling of a control token for the token, so an observation that says `<|im_end|>` would end
a turn. Here the texts of messages are quoted before the template sees them: each spelling of a control token is
replaced by a stand-in, a random word that no message holds. A rendered conversation then spells only control tokens
that the template itself wrote. `ControlTokens.encode` gives those their ids and encodes everything else as text, in one
pass, so that merges are those of the whole text.

Chat endpoints of vLLM, SGLang and transformers do not do this: they take control tokens from the texts of messages.
"""

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rollgym.trainer.core.errors import UnplayableTaskError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class ControlTokens:
    """Keeps the control tokens of a tokenizer apart from texts that spell them.

    Quoted texts can be cut, joined and compared like any others. They hold for this object alone.

    Args:
        tokenizer: A Hugging Face tokenizer.
        marks: Spellings of control tokens beside those that the tokenizer itself calls special: what the template
            writes around turns, and what stands for a picture.

    Attributes:
        ids: Their ids.
        place: A word that no message holds, to find a place in a rendered conversation by.
    """

    def __init__(self, tokenizer: Any, marks: Iterable[str] = ()) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = (str(token) for token in added.values() if token.special)
        spellings = sorted({mark for mark in (*special, *marks) if mark})
        self.ids = frozenset(id_ for id_, token in added.items() if str(token) in spellings)
        word = self._word = f"q{secrets.token_hex(16)}"
        self.place = f"{word}rz"
        self._nothing = f"{word}z"
        self._stand_ins = {mark: f"{word}{index}z" for index, mark in enumerate(spellings)}
        self._spelt = {stand_in: mark for mark, stand_in in self._stand_ins.items()} | {self._nothing: ""}
        self._names = {mark: f"{word}t{index}z" for index, mark in enumerate(spellings)}
        self._stand_in = re.compile(f"{word}[0-9]*z")
        self._mark = re.compile(_any_of(spellings) if spellings else r"(?!)")
        beginnings = {mark[:length] for mark in spellings for length in range(1, len(mark))}
        self._begun = re.compile(f"(?:{_any_of(beginnings)})\\Z" if beginnings else r"(?!)")
        self._first_characters = sorted({mark[0] for mark in spellings})
        self._longest = max(map(len, spellings), default=1)
        self._literal: Tokenizer | None = None

    def quote(self, text: str) -> str:
        """Return a text in which no control token is spelt, and none together with what may follow it."""
        for character in self._first_characters:
            if character in text:
                break
        else:
            return text  # This is the way of nearly all texts.
        if self._mark.search(text) is not None:
            text = self._mark.sub(lambda found: self._stand_ins[found[0]], text)
        # A text in parts may spell one across them.
        return f"{text}{self._nothing}" if self._begun.search(text[-self._longest :]) else text

    def quoted(self, value: Any) -> Any:
        """Return plain data with all texts in it quoted; the same object if nothing needs quoting."""
        if isinstance(value, str):
            return self.quote(value)
        if isinstance(value, Mapping):
            pairs = [(self.quoted(key), self.quoted(each)) for key, each in value.items()]
            same = all(new[0] is key and new[1] is value[key] for new, key in zip(pairs, value, strict=True))
            return value if same else dict(pairs)
        if isinstance(value, list | tuple):
            parts = [self.quoted(each) for each in value]
            return value if all(new is old for new, old in zip(parts, value, strict=True)) else parts
        return value

    def unquote(self, text: str) -> str:
        """Return a quoted text as it reads."""
        return self._stand_in.sub(lambda found: self._spelt[found[0]], text) if self._word in text else text

    def encode(self, text: str) -> list[int]:
        """Return the ids of a rendered conversation, or of a piece of one.

        Control tokens that it spells get their ids; quoted ones are encoded as text.

        Raises:
            UnplayableTaskError: If it quotes some, and the tokenizer cannot encode them as text.
        """
        if self._word not in text:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        if self._literal is None:
            self._literal = _renamed(self._tokenizer, self._names)
        text = self._mark.sub(lambda found: self._names[found[0]], text)
        return list(self._literal.encode(self.unquote(text), add_special_tokens=False).ids)


def _renamed(tokenizer: Any, names: Mapping[str, str]) -> "Tokenizer":
    """Return a tokenizer with the same ids in which control tokens have other names: their spellings are text."""
    from tokenizers import Tokenizer  # An extra brings it, and what plays without a model does without.

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnplayableTaskError(
            f"a text spells a control token, and {type(tokenizer).__name__} cannot encode it as text: take a model "
            "with a fast tokenizer (tokenizer.json), or keep it out of texts"
        )
    core = json.loads(backend.to_str())
    for token in core["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = core["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(token, token): id_ for token, id_ in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    core["post_processor"] = None  # It adds control tokens around texts, which is never asked for here.
    return Tokenizer.from_str(json.dumps(core))


def _any_of(words: Iterable[str]) -> str:
    """Return a pattern of the longest of some words: a trie, so that other text is refused after a few characters."""
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _pattern(trie)


def _pattern(trie: Mapping[str, Any]) -> str:
    branches = [re.escape(character) + _pattern(rest) for character, rest in trie.items() if character]
    if not branches:
        return ""
    pattern = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
    return f"(?:{pattern})?" if "" in trie else pattern
