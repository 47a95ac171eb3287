"""Runs the agent libraries against the endpoint, and writes which versions were compared.

    python -m venv agents && agents/bin/pip install -e '.[dev]' openai-agents pydantic-ai smolagents langgraph \
        langchain-openai litellm
    agents/bin/python benchmarks/agents/libraries.py [--output benchmarks/results/agent_libraries.json]

Each library's agent plays with prepared replies (tools in parallel, streams, sub-agents, shortened histories) and on a
real engine; every call's ids and log-probabilities in the record must be those of the engine's own log. A library that
is missing fails.
"""

import argparse
import asyncio
import json
import sys
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from rollgym.trainer.inference.torch_engine import TorchEngine  # noqa: E402
from rollgym.trainer.models.tiny import TinyPolicySettings, build_tiny_model  # noqa: E402
from tests.support.agent_libraries import LIBRARIES, adder  # noqa: E402
from tests.support.agent_policy import (  # noqa: E402
    LoggedClient,
    ScriptedPolicy,
    assert_recorded,
    endpoint_of,
    service_of,
    short_sampling,
    tool_tokenizer,
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", choices=tuple(LIBRARIES), action="append")
    options = parser.parse_args()
    results = {name: asyncio.run(_compared(name)) for name in options.only or LIBRARIES}
    text = json.dumps(results, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")
    return 0 if all("failed" not in result for result in results.values()) else 1


async def _compared(name: str) -> dict:
    try:
        found = {"version": version(name)}
    except PackageNotFoundError:
        return {"failed": f"{name} is not installed"}
    try:
        found["scripted"] = await _scripted(LIBRARIES[name][0])
        found["engine"] = await _on_engine(LIBRARIES[name][0])
    except Exception as error:  # noqa: BLE001 - a library that fails is a line of the result
        traceback.print_exc()
        found["failed"] = f"{type(error).__name__}: {error}"
    return found


async def _scripted(play) -> dict:
    tokenizer = tool_tokenizer()
    policy = ScriptedPolicy(tokenizer, adder)
    return await _played(play, policy, service_of(policy, tokenizer))


async def _on_engine(play) -> dict:
    tokenizer = tool_tokenizer()
    shape = TinyPolicySettings(len(tokenizer), hidden_size=16, layers=1, heads=2, max_length=16_384)
    async with TorchEngine(build_tiny_model(shape, 0), max_rows=4, max_length=16_384) as engine:
        client = LoggedClient(engine)
        sampling = short_sampling(tokenizer)
        return await _played(
            play, client, service_of(client, tokenizer, max_length=16_384, sampling=sampling)
        )


async def _played(play, client, service) -> dict:
    async with endpoint_of(service) as endpoint:
        key, session = endpoint.open()
        await play(f"{endpoint.url}/s/{key}/v1", "any")
    assert_recorded(session.trajectory, client.log)
    segments = session.trajectory.segments
    return {
        "calls": len(client.log.calls),
        "tokens": sum(len(result.token_ids) for _, result in client.log.calls),
        "segments": len(segments),
        "forks": sorted(str(segment.prefix_break) for segment in segments if segment.prefix_break),
        "all_equal": True,
    }


if __name__ == "__main__":
    sys.exit(main())
