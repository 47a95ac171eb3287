"""The loop of `verifiers` (PyPI, `pip install "verifiers<0.2"`) against an OpenAI-compatible server; see overhead.py.

Its environment answers in its own process: no socket, no server. Prints a line of JSON.
"""

import asyncio
import json
import resource
import sys
import time

import verifiers as vf
from datasets import Dataset
from verifiers.types import ClientConfig


class Turns(vf.MultiTurnEnv):
    """Says the same after each reply."""

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "You moved. Where to?"}]


def cpu_s():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def main(url, episodes, turns, tokens):
    rows = [{"question": "Where to?", "answer": ""} for _ in range(episodes)]
    env = Turns(dataset=Dataset.from_list(rows), rubric=vf.Rubric(), max_turns=turns)
    inputs = env.get_dataset().to_list()
    client = ClientConfig(api_base_url=f"{url}/v1", api_key_var="NO_KEY", timeout=3600)
    sampling = {
        "max_tokens": tokens,
        "temperature": 1.0,
        "logprobs": True,
        "extra_body": {"return_token_ids": True},
    }
    began, used = time.monotonic(), cpu_s()
    played = await env.generate(inputs, client, "policy", sampling, state_columns=["trajectory"])
    used, took = cpu_s() - used, time.monotonic() - began
    steps = [step for output in played["outputs"] for step in output["trajectory"]]
    with_ids = sum(bool(step["tokens"] and step["tokens"]["completion_ids"]) for step in steps)
    print(
        json.dumps(
            {
                "turns": len(steps),
                "with_ids": with_ids,
                "cpu_s": used,
                "wall_s": took,
                "version": vf.__version__,
            }
        )
    )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:5])))
