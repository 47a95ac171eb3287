"""Try the properties that hold control tokens to be the template's own, with many examples for each shape of template.

    python benchmarks/rollout/control_tokens.py --examples 10000 --out benchmarks/results/control_tokens.json

The properties are those of tests/trainer/rollout/test_control_tokens.py, which try a few examples in CI. What has been
tried is written behind each property of each template, with its commit; an interrupted run resumes behind it.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings

from rollgym.clients.measuring.revision import revision

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
PROPERTIES = (
    "test_any_contents_are_given_back_and_the_control_tokens_are_the_templates_own",
    "test_every_reader_takes_a_content_for_text",
    "test_texts_that_spell_no_control_token_are_encoded_as_ever",
)


def tried(proof: Callable[..., None], name: str, examples: int) -> dict[str, Any]:
    """Try a property with one template."""
    begun = time.process_time()
    failure = None
    try:
        proof(name=name)
    except AssertionError as error:
        failure = f"{error}"[:500] or "an assertion"
    seconds = round(time.process_time() - begun)
    return {"examples": examples, "failure": failure, "cpu_s": seconds, "commit": revision(short=True)}


def main() -> None:
    """Try what the file of results does not have yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    settings.register_profile(
        "many",
        max_examples=arguments.examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    settings.load_profile("many")
    from tests.trainer.rollout import test_control_tokens as proofs

    found: dict[str, Any] = {"templates": {}}
    if arguments.out.exists():
        found = json.loads(arguments.out.read_text())
    for name in proofs.RENDERERS:
        results = found["templates"].setdefault(name, {})
        for title in PROPERTIES:
            if results.get(title, {}).get("examples", 0) >= arguments.examples:
                continue
            results[title] = tried(getattr(proofs, title), name, arguments.examples)
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")
            print(name, title, results[title], flush=True)
    every = [each for results in found["templates"].values() for each in results.values()]
    sys.exit(any(each["failure"] for each in every))


if __name__ == "__main__":
    main()
