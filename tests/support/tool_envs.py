"""Environments over a database, one of them with a defect in each tool."""

import sqlite3
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rollgym.envs.tools.base import ToolEnv, TurnResult
from rollgym.envs.tools.tool import Tool, Toolbox, ToolError, tool_parameters

SQL = tool_parameters(["sql"], sql={"type": "string"})


class Orders(ToolEnv):
    """A sound one: SQL that cannot be run is an error of the tool."""

    metadata = {"description": "Count orders.", "max_episode_steps": 8}

    def __init__(self, *, render_mode: str | None = None) -> None:
        toolbox = Toolbox(self.tools())
        super().__init__(toolbox, max_calls_per_turn=2, max_episode_steps=8, render_mode=render_mode)

    def tools(self) -> Sequence[Tool]:
        return [Tool("query", "Run SQL.", SQL, self.query)]

    def query(self, sql: str) -> list[Any]:
        try:
            return self.run(sql)
        except sqlite3.Error as error:
            raise ToolError(str(error)) from error

    def run(self, sql: str) -> list[Any]:
        return self._database.execute(sql).fetchall()

    def start_episode(self, options: Mapping[str, Any]) -> str:
        self._database = sqlite3.connect(":memory:")
        self._count = int(self.np_random.integers(10, 1_000))
        self._database.execute("create table orders (id integer)")
        self._database.executemany("insert into orders values (?)", [(each,) for each in range(self._count)])
        return "How many orders are there?"

    def on_message(self, text: str) -> TurnResult | str:
        solved = text.strip() == str(self._count)
        return TurnResult("Over.", float(solved), terminated=True, success=solved)

    def describe_rules(self) -> str:
        return "Answer with the number alone."


class Raising(Orders):
    """Its tools raise what is no `ToolError`, each for a reason of its own."""

    def tools(self) -> Sequence[Tool]:
        return [
            Tool("query", "Run SQL.", SQL, self.run),
            Tool(
                "bare", "Needs what its schema does not.", tool_parameters(n={"type": "integer"}), lambda n: n
            ),
            Tool("open", "Its schema allows more.", {"type": "object"}, lambda: "ok"),
            Tool("bytes", "Returns no JSON.", tool_parameters(), lambda: b"1"),
        ]


class Sleeping(Orders):
    """A tool of it waits for as long as it is told to."""

    def tools(self) -> Sequence[Tool]:
        schema = tool_parameters(["seconds"], seconds={"type": "number", "minimum": 11})
        return [Tool("wait", "Wait.", schema, lambda seconds: time.sleep(seconds))]


class Deaf(Orders):
    """It reads calls in a format that it does not name."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return super().step(action.replace("tool_call", "call"))

    def on_message(self, text: str) -> TurnResult | str:
        return "error: there is no call."
