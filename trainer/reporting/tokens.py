"""The text of single tokens, for people who look at an episode."""

from collections.abc import Callable
from pathlib import Path

TOKENIZER_FOLDER = "tokenizer"
"""The folder of a run's directory that holds its tokenizer."""

TokenText = Callable[[int], str]


def token_text(directory: Path) -> TokenText | None:
    """Return what gives the text of a token id in a run; None where the run left no tokenizer that can be read."""
    for folder in (TOKENIZER_FOLDER, "model"):
        path = directory / folder / "tokenizer.json"
        if path.is_file():
            return _reader(path)
    return None


def _reader(path: Path) -> TokenText | None:
    from tokenizers import Tokenizer  # Imported late: who reads a page of curves may not have it.

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception:  # noqa: BLE001 - the library raises no type of its own for a file that it cannot read
        return None

    def text(token: int) -> str:
        # The engine of some models knows ids that their tokenizer has no word for.
        name = tokenizer.id_to_token(token) if 0 <= token < 2**32 else None
        if name is None:
            return f"[{token}]"
        if name.startswith("▁"):
            return name.replace("▁", " ")
        return tokenizer.decode([token], skip_special_tokens=False) or name

    return text
