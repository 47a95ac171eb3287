"""Starts an agent on an episode: as a program, or as a service elsewhere."""

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from rollgym.trainer.rollout.agents import process_reaper
from rollgym.trainer.rollout.agents.http import packed
from rollgym.trainer.rollout.agents.session import AgentSession

_LARGEST_VARIABLE = 100_000
"""Bytes of an environment variable; the kernel accepts at most 128 KiB."""
_KEPT_OUTPUT = 2000
_CHUNK = 1 << 16
_JSON = {"content-type": "application/json"}
_LARGEST_ANSWER = 1 << 20
_MOST_OUTPUT = 64 << 20
"""Bytes that a program may print; reading them takes the trainer's time."""


@dataclass(frozen=True, slots=True)
class AgentTask:
    """The task of one episode, as an agent receives it.

    Attributes:
        url: Address of its session at the endpoint.
        key: The session's key.
        model: The policy's name.
        task: The episode as plain data: what it is about, and what the environment shows first.
    """

    url: str
    key: str
    model: str
    task: Mapping[str, Any]

    def variables(self) -> dict[str, str]:
        """Return it as environment variables of a program."""
        text = self.as_text()
        variables = {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_BASE": f"{self.url}/v1",
            "OPENAI_API_KEY": self.key,
            "OPENAI_MODEL": self.model,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.key,
            "ANTHROPIC_MODEL": self.model,
            "ROLLGYM_ENV_URL": f"{self.url}/env",
            "ROLLGYM_MCP_URL": f"{self.url}/mcp",
            "ROLLGYM_REWARD_URL": f"{self.url}/reward",
        }
        return variables | ({"ROLLGYM_TASK": text} if len(text) <= _LARGEST_VARIABLE else {})

    def as_text(self) -> str:
        """Return the episode's task as JSON, for any content of its environment's messages and tools."""
        return json.dumps(self.task, default=str)

    def as_body(self) -> dict[str, Any]:
        """Return it as the body of a request to a service."""
        return {
            "task": dict(self.task),
            "model": self.model,
            "base_url": f"{self.url}/v1",
            "api_key": self.key,
            "env_url": f"{self.url}/env",
            "mcp_url": f"{self.url}/mcp",
            "reward_url": f"{self.url}/reward",
            "end_url": f"{self.url}/end",
        }


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """How an agent's work ended.

    Attributes:
        failure: The failure, for people; empty without one.
        posted: What the agent answered, if it is a service: a reward, and whether it solved the task.
    """

    failure: str = ""
    posted: Mapping[str, Any] | None = None


class AgentRunner(Protocol):
    """Starts an agent on an episode and waits for its end."""

    async def run(self, task: AgentTask, session: AgentSession) -> AgentEnd:
        """Return once the agent is done; when cancelled, it is ended first."""
        ...

    async def close(self) -> None:
        """Release the resources of the runner."""
        ...


class ProgramRunner:
    """Runs a program for each episode. It and all its descendants end with the episode, and with this process.

    Args:
        words: The command line.
        concurrency: Programs at one time.
        variables: Further environment variables.
        grace_s: How long it may keep running after it has reported its result.
    """

    def __init__(
        self, words: Sequence[str], concurrency: int, variables: Mapping[str, str], grace_s: float
    ) -> None:
        self._words = list(words)
        self._places = asyncio.Semaphore(concurrency)
        self._variables = dict(variables)
        self._grace_s = grace_s

    async def run(self, task: AgentTask, session: AgentSession) -> AgentEnd:
        """Run the program for one episode; see `AgentRunner`."""
        async with self._places:
            held, wanted = os.pipe()
            try:
                process = await self._start(task, held)
            except BaseException:
                os.close(wanted)
                raise
            finally:
                os.close(held)
            return await self._ended(process, wanted, task, session)

    async def _start(self, task: AgentTask, held: int) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            # Nothing but the standard library, regardless of the current directory and the environment.
            "-IS",
            process_reaper.__file__,
            str(held),
            *self._words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ | self._variables | task.variables(),
            pass_fds=(held,),
            # A Ctrl-C goes to all processes of the terminal's group; running episodes may still end in order.
            start_new_session=True,
        )

    async def _ended(
        self, process: asyncio.subprocess.Process, wanted: int, task: AgentTask, session: AgentSession
    ) -> AgentEnd:
        reading = asyncio.create_task(_output(process, task.as_text().encode()))
        try:
            finished = await ended_or_patient(reading, session, self._grace_s)
        finally:
            # The reaper ends the program and everything below it, and then itself.
            os.close(wanted)
            said, code = await asyncio.shield(_settled(reading, process))
        if said is None:
            return AgentEnd(f"the agent's program printed more than {_MOST_OUTPUT >> 20} MiB, and was ended")
        if code == 0 or not finished:
            return AgentEnd()
        return AgentEnd(f"the agent's program ended with code {code}: {said or 'it printed nothing'}")

    async def close(self) -> None:
        """Do nothing: no resources are kept between episodes."""


async def ended_or_patient(running: "asyncio.Future[Any]", session: AgentSession, grace_s: float) -> bool:
    """Wait until a program ends, or for so long after it has said that it is done; return whether it ended."""
    patience = asyncio.create_task(_patience(session, grace_s))
    try:
        await asyncio.wait({running, patience}, return_when=asyncio.FIRST_COMPLETED)
        return running.done()
    finally:
        patience.cancel()


async def _patience(session: AgentSession, grace_s: float) -> None:
    await session.ended.wait()
    await asyncio.sleep(grace_s)


async def _settled(
    reading: "asyncio.Task[str | None]", process: asyncio.subprocess.Process
) -> tuple[str | None, int]:
    said = await reading
    # The pipe may contain more than is kept, and a process counts as ended only once its pipe is read to the end.
    assert process.stdout is not None
    while await process.stdout.read(_CHUNK):
        pass
    return said, await process.wait()


async def _output(process: asyncio.subprocess.Process, given: bytes) -> str | None:
    """Give a program its input, read all that it prints, and return the end of that; None if it is too much."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(given)
    process.stdin.write_eof()
    kept, total = b"", 0
    while chunk := await process.stdout.read(_CHUNK):
        kept, total = (kept + chunk)[-_KEPT_OUTPUT:], total + len(chunk)
        if total > _MOST_OUTPUT:
            return None
    return last_words(kept)


def last_words(output: bytes) -> str:
    """Return the end of what a program printed, in one line."""
    return " ".join(output[-_KEPT_OUTPUT:].decode(errors="replace").split())[-_KEPT_OUTPUT // 2 :]


async def _content(response: httpx.Response) -> bytes | None:
    """Read the body of an answer; None if it exceeds the size limit."""
    content = b""
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > _LARGEST_ANSWER:
            return None
    return content


class ServiceRunner:
    """Asks a service to play each episode.

    It answers 200 when it is done, with a `reward` and `success` if it likes, or 202 at once: then the episode ends
    when it posts to `end_url`.

    Args:
        url: The URL to which tasks are posted.
        concurrency: Episodes at one time.
    """

    def __init__(self, url: str, concurrency: int) -> None:
        self._url = url
        self._places = asyncio.Semaphore(concurrency)
        # The episode has a time-out; a service may think as long.
        # A connection for each episode: one that was kept may be closed by the service at the moment of its use.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=15.0), limits=limits, trust_env=False
        )

    async def run(self, task: AgentTask, session: AgentSession) -> AgentEnd:
        """Post the task to the service; see `AgentRunner`."""
        async with self._places:
            asking = asyncio.create_task(self._asked(task))
            ended = asyncio.create_task(session.ended.wait())
            try:
                await asyncio.wait({asking, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not asking.done():
                    return AgentEnd()  # it has said that it is done, and its answer is only a courtesy
                end = asking.result()
                if end is None:
                    await ended
                    return AgentEnd()
                return end
            finally:
                for each in (asking, ended):
                    each.cancel()
                await asyncio.gather(asking, ended, return_exceptions=True)

    async def _asked(self, task: AgentTask) -> AgentEnd | None:
        """Return how it ended, or None if the service will report it."""
        body = packed(task.as_body())
        try:
            async with self._http.stream("POST", self._url, content=body, headers=_JSON) as response:
                if response.status_code == 202:
                    return None
                content = await _content(response)
        except httpx.HTTPError as error:
            return AgentEnd(
                f"the agent's service {self._url} cannot be reached: {type(error).__name__}: {error}"
            )
        if content is None:
            return AgentEnd(
                f"the agent's service {self._url} answered with more than {_LARGEST_ANSWER >> 10} KiB"
            )
        if not response.is_success:
            text = last_words(content[:_KEPT_OUTPUT])
            return AgentEnd(f"the agent's service {self._url} answered {response.status_code}: {text}")
        try:
            posted = json.loads(content) if content else {}
        except (ValueError, RecursionError):
            posted = {}
        return AgentEnd(posted=posted if isinstance(posted, dict) else {})

    async def close(self) -> None:
        """Close the connections to the agent's service."""
        await self._http.aclose()
