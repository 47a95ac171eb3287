"""ScaffoldName-v0: tasks on a database, solved by calling tools."""

import sqlite3
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field
from rollgym import (
    Tool,
    Toolbox,
    ToolCall,
    ToolEnv,
    ToolError,
    TurnResult,
    tool_parameters,
)

ITEMS = ("lamps", "chairs", "tables", "shelves")


class ScaffoldName(ToolEnv):
    """Items of a stockroom have to be ordered. Put your own tools and tasks here.

    The base class reads the calls of a reply, checks them against the schemas and runs
    them; text without a call goes to `on_message`.
    """

    metadata: dict[str, Any] = {
        "description": "Order what is missing in a stockroom.",
        "reward": "1 if exactly what was asked for is ordered, else 0.",
        # Increase it whenever the same actions lead to other results.
        "version": "0",
    }

    # Clients, and the configurations of runs, may set a parameter that has a `Field`.
    def __init__(
        self,
        *,
        max_episode_steps: Annotated[int, Field(ge=1, description="Turns.")] = 6,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(
            Toolbox([self._stock_tool(), self._order_tool()]),
            max_calls_per_turn=1,
            max_episode_steps=max_episode_steps,
            render_mode=render_mode,
        )
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._item = ITEMS[0]
        self._wanted = 0

    def close(self) -> None:
        """Close the database of the environment."""
        self._database.close()

    # -- tools -------------------------------------------------------------------------

    def _stock_tool(self) -> Tool:
        parameters = tool_parameters(["item"], item={"type": "string"})
        return Tool("stock", "Look up how many there are.", parameters, self._stock)

    def _order_tool(self) -> Tool:
        parameters = tool_parameters(
            ["item", "count"],
            item={"type": "string"},
            count={"type": "integer", "minimum": 1},
        )
        return Tool("order", "Order a number of an item.", parameters, self._order)

    def _stock(self, item: str) -> int:
        rows = "SELECT count FROM stock WHERE item = ?"
        # Parameters of the statement, never its text: a model may write any SQL.
        row = self._database.execute(rows, (item,)).fetchone()
        if row is None:
            raise ToolError(f"no such item; the items are {', '.join(ITEMS)}")
        return row[0]

    def _order(self, item: str, count: int) -> str:
        self._stock(item)
        if count > 1000:
            raise ToolError("an order is for at most 1000")
        order = "INSERT INTO orders VALUES (?, ?)"
        self._database.execute(order, (item, count))
        return "ordered"

    # -- an episode --------------------------------------------------------------------

    def start_episode(self, options: Mapping[str, Any]) -> str:
        """Fill the database, and choose a question."""
        for table in ("stock", "orders"):
            self._database.execute(f"DROP TABLE IF EXISTS {table}")
            self._database.execute(f"CREATE TABLE {table} (item TEXT, count INTEGER)")
        # self.np_random is seeded with the episode: the only source of chance.
        counts = [int(count) for count in self.np_random.integers(1, 20, len(ITEMS))]
        rows = zip(ITEMS, counts, strict=True)
        self._database.executemany("INSERT INTO stock VALUES (?, ?)", rows)
        self._item = ITEMS[int(self.np_random.integers(len(ITEMS)))]
        self._wanted = self._stock(self._item) + int(self.np_random.integers(1, 10))
        return f"We need {self._wanted} {self._item}. Order what is missing."

    def describe_rules(self) -> str:
        """Return the instruction; the base class adds the tools and the call format."""
        return "You keep a stockroom. Use the tools, then reply `done` without a call."

    def on_message(self, text: str) -> TurnResult | str:
        """Take a reply without a call: it ends the episode."""
        if text.strip().lower().strip("`.") != "done":
            return "Call a tool, or reply `done`."
        solved = self._orders() == [(self._item, self._missing())]
        says = "That is right." if solved else "That is not what was needed."
        return TurnResult(says, float(solved), terminated=True, success=solved)

    def state_info(self) -> dict[str, Any]:
        """Return the state that clients may see: never the solution."""
        return {"state": {"orders": [list(order) for order in self._orders()]}}

    def expert_turn(self) -> ToolCall | str:
        """Return an expert's next turn. Remove it if there is none."""
        if self._orders():
            return "done"
        return ToolCall("order", {"item": self._item, "count": self._missing()})

    def _missing(self) -> int:
        return self._wanted - self._stock(self._item)

    def _orders(self) -> list[tuple[str, int]]:
        return self._database.execute("SELECT item, count FROM orders").fetchall()
