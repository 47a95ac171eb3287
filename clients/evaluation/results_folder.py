"""The folder of an evaluation. `roll-train report` reads it as it reads a run's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import orjson

from rollgym.clients.evaluation.summary import EvaluatedEpisode, EvaluatedTurn, Summary
from rollgym.clients.protocol.yaml_text import write_yaml

CONFIG_FILE = "config.yaml"
EPISODES_FILE = "episodes.jsonl"
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
TRANSCRIPTS_FILE = "transcripts.jsonl"

_EPISODE_FORMAT = 1
"""The version of the records' form, which `rollgym.trainer.records.schema` describes; a test reads one there."""


class ResultsFolder:
    """Writes each episode when it ends, so that an interrupted evaluation keeps its results.

    Args:
        directory: A folder that does not exist yet, or is empty.
        config: The settings of the evaluation, for people; without secrets.
        env_id: The environment's name in the records.
        env_kwargs: The kwargs that it was made with.

    Raises:
        FileExistsError: The folder holds files.
        OSError: It cannot be written.
    """

    def __init__(
        self, directory: Path, config: Mapping[str, Any], env_id: str, env_kwargs: Mapping[str, Any]
    ) -> None:
        self.directory = directory
        self._env_id = env_id
        self._env_kwargs = dict(env_kwargs)
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise FileExistsError(f"{directory} holds files already")
        # `x`: of two processes that want one folder, the second is refused here.
        with (directory / CONFIG_FILE).open("x", encoding="utf-8") as file:
            file.write(write_yaml(dict(config)))
        self._episodes = (directory / EPISODES_FILE).open("xb")
        self._transcripts = (directory / TRANSCRIPTS_FILE).open("xb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._episodes.close()
        self._transcripts.close()

    def add(self, episode: EvaluatedEpisode) -> None:
        """Write an episode.

        Raises:
            OSError: The disk does not take it.
        """
        _write_line(self._transcripts, _transcript(episode, self._env_id))
        _write_line(self._episodes, self._record(episode))

    def discard(self) -> None:
        """Remove the folder, in which no episode is, so that the command can be typed again as it was."""
        for name in (CONFIG_FILE, EPISODES_FILE, TRANSCRIPTS_FILE):
            (self.directory / name).unlink(missing_ok=True)
        with suppress(OSError):
            self.directory.rmdir()

    def finish(self, summary: Summary) -> None:
        """Write the summary.

        Raises:
            OSError: The disk does not take it.
        """
        data = orjson.dumps(summary.as_dict(), option=orjson.OPT_INDENT_2) + b"\n"
        (self.directory / SUMMARY_FILE).write_bytes(data)
        if summary.success is not None:
            key = f"evaluate/{self._env_id.replace('/', '-')}/sampled"
            row = {
                "step": 0,
                f"{key}/success": summary.success.value,
                f"{key}/success_low": summary.success.low,
                f"{key}/success_high": summary.success.high,
                f"{key}/episodes": summary.results,
            }
            (self.directory / METRICS_FILE).write_bytes(orjson.dumps(row) + b"\n")

    def _record(self, episode: EvaluatedEpisode) -> dict[str, Any]:
        """Return the episode in the form of a training run's records; of a model behind an API no token is known."""
        return {
            "format": _EPISODE_FORMAT,
            "step": 0,
            "group": {"decision": "kept"},
            "task": {
                "index": episode.index,
                "env_id": self._env_id,
                "kwargs": self._env_kwargs,
                "seed": episode.seed,
                "options": None,
                "domain": self._env_id,
                "url": None,
            },
            "member": 0,
            "attempt": 0,
            "outcome": episode.outcome.value,
            "detail": episode.detail,
            "reward": episode.reward,
            "forks": 0,
            "metrics": episode.metrics | _reply_metrics(episode),
            "seconds": {},
            "turns": [_turn_record(turn) for turn in episode.turns],
            "segments": [],
        }


def _turn_record(turn: EvaluatedTurn) -> dict[str, Any]:
    reply = turn.reply
    ended = "stop" if reply.finish_reason in ("tool_calls", "function_call") else reply.finish_reason
    calls = [f"{call.name}({call.arguments})" for call in reply.calls]
    return {
        "observation": turn.observation,
        "reply": "\n".join(filter(None, [reply.content, reply.refusal, *calls])),
        "reward": turn.reward,
        "valid": turn.valid,
        "format_penalty": turn.format_penalty,
        "anchor": turn.anchor,
        "finish_reason": ended,
        "tokens": [0, 0, 0],
        "advantages": [],
    }


def _reply_metrics(episode: EvaluatedEpisode) -> dict[str, float]:
    """Return the time and the tokens of the replies, as far as known of all of them."""
    replies = [turn.reply for turn in episode.turns]
    found = {"reply_seconds": sum(reply.seconds for reply in replies)}
    for name in ("prompt_tokens", "completion_tokens"):
        counts = [getattr(reply, name) for reply in replies]
        if None not in counts:
            found[name] = float(sum(counts))
    return found


def _transcript(episode: EvaluatedEpisode, env_id: str) -> dict[str, Any]:
    """Return the conversation as a chat API has it, with the environment's response to each reply."""
    return {
        "env_id": env_id,
        "seed": episode.seed,
        "outcome": episode.outcome.value,
        "success": episode.success,
        "reward": episode.reward,
        "detail": episode.detail,
        "seconds": round(episode.seconds, 3),
        "metrics": episode.metrics,
        "messages": episode.messages,
        "turns": [
            {
                "action": turn.action,
                "reward": turn.reward,
                "valid": turn.valid,
                "finish_reason": turn.reply.finish_reason,
                "refusal": turn.reply.refusal or None,
                "reasoning": turn.reply.reasoning or None,
                "prompt_tokens": turn.reply.prompt_tokens,
                "completion_tokens": turn.reply.completion_tokens,
                "cost": turn.reply.cost,
                "seconds": round(turn.reply.seconds, 3),
            }
            for turn in episode.turns
        ],
    }


def _write_line(file: IO[bytes], record: Mapping[str, Any]) -> None:
    # `json` writes lone surrogates as escapes, while orjson refuses them.
    file.write(json.dumps(record).encode() + b"\n")
    file.flush()
