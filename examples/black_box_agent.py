"""An agent on the plain `openai` package that walks over frozen lakes; it knows nothing of the trainer.

As a program it plays one episode, which it is given on its standard input:

    roll-train --config examples/black_box_agent.yaml rollout.agent="python examples/black_box_agent.py"

As a service it plays as many at a time as it is asked to, without a start for each:

    python examples/black_box_agent.py --serve 8050 &
    roll-train --config examples/black_box_agent.yaml
"""

import argparse
import asyncio
import json
import os
import sys

import httpx
from openai import AsyncOpenAI


async def play(policy: AsyncOpenAI, http: httpx.AsyncClient, model: str, env_url: str, seen: dict) -> None:
    """Ask the policy for a move and make it, until the lake says that it is over."""
    while not (seen.get("terminated") or seen.get("truncated")):
        # The board says everything, so the agent sends no history.
        answer = await policy.chat.completions.create(
            model=model, messages=[{"role": "user", "content": seen["observation"]}]
        )
        move = {"action": answer.choices[0].message.content}
        seen = (await http.post(f"{env_url}/step", json=move)).raise_for_status().json()


async def run_once() -> None:
    """Play the episode that the environment variables and the standard input name."""
    task = json.load(sys.stdin)
    # AsyncOpenAI reads OPENAI_BASE_URL and OPENAI_API_KEY by itself.
    async with AsyncOpenAI() as policy, httpx.AsyncClient() as http:
        await play(policy, http, os.environ["OPENAI_MODEL"], os.environ["ROLLGYM_ENV_URL"], task)


def service():
    """Return a web application that plays the episode that is posted to it."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    http = httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None))
    # One client for all: its connections are used again, and each episode has a base URL of its own.
    shared = AsyncOpenAI(base_url="http://unused", api_key="unused", timeout=300)

    async def answer(request):
        job = await request.json()
        policy = shared.with_options(base_url=job["base_url"], api_key=job["api_key"])
        await play(policy, http, job["model"], job["env_url"], job["task"])
        return JSONResponse({})

    return Starlette(routes=[Route("/play", answer, methods=["POST"])])


def main() -> None:
    """Play one episode, or serve."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--serve", type=int, metavar="PORT", help="play the episodes that are posted to /play"
    )
    port = parser.parse_args().serve
    if port is None:
        asyncio.run(run_once())
    else:
        import uvicorn

        uvicorn.run(service(), host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
