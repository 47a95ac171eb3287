"""Tries a structured output in this process, which may be killed: some take minutes, and some crash the compiler.

Run as a program: `{"kind": ..., "text": ...}` is read from the standard input, and `{"error": ...}` written, empty
without an error. It imports nothing of ours, so that it starts at once.
"""

import json
import random
import resource
import sys
from typing import Any

SECONDS = 5
"""Of processor time, after which the program is ended."""
_BYTES = 2 << 30
_STEPS = 48


def tried(kind: str, text: str) -> str:
    """Return what is wrong with a structured output; empty where replies begin well with it."""
    import llguidance

    library: Any = llguidance  # its kinds are texts that it looks at itself

    try:
        grammar = library.grammar_from(kind, text)
    except ValueError as error:
        return str(error)
    limits = library.LLParserLimits(verbose_errors=False)
    matcher = library.LLMatcher(library.LLTokenizer("byte"), grammar, log_level=0, limits=limits)
    choice = random.Random(0)
    for _ in range(_STEPS):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = matcher.compute_bitmask()
        allowed = [index for index in range(len(mask) * 8) if mask[index // 8] >> (index % 8) & 1]
        if matcher.is_error() or not allowed:
            break
        matcher.consume_token(choice.choice(allowed))
    return str(matcher.get_error())


def main() -> None:
    """Read a grammar from stdin, try it within the limits, and write the error to stdout as JSON."""
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    if sys.platform == "linux":  # other systems do not keep to it
        resource.setrlimit(resource.RLIMIT_AS, (_BYTES, _BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    asked = json.loads(sys.stdin.buffer.read())
    sys.stdout.write(json.dumps({"error": tried(asked["kind"], asked["text"])}))


if __name__ == "__main__":
    main()
