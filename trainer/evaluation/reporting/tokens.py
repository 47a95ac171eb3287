"""The text of single tokens, for people who look at an episode."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.core.run_files import write_errors

TOKENIZER_FILE = "tokenizer.json"
"""The name of a run's tokenizer in its directory, and in a model's folder."""

TokenText = Callable[[int], str]


def token_text(directory: Path) -> TokenText | None:
    """Return what gives the text of a token id in a run; None where the run left no tokenizer that can be read."""
    for path in (directory / TOKENIZER_FILE, directory / "model" / TOKENIZER_FILE):
        if path.is_file():
            return _reader(path)
    return None


def keep_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Write a run's tokenizer to its directory; one that is Python all through has no such file.

    Raises:
        WriteError: If the disk does not take it.
    """
    if (fast := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        path = directory / TOKENIZER_FILE
        with write_errors(path):
            path.write_text(fast.to_str(), encoding="utf-8")


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
