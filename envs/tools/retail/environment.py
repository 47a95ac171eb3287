"""Retail-v0: customer service by tools and words, scored by what the shop's database holds in the end."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Unpack

import orjson
from pydantic import Field

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.envs.core.kwargs import SomeOf
from rollgym.envs.core.splits import TaskSplit, checked_split, split_of_text
from rollgym.envs.tools.base import CallsPerTurn, StepLimit, ToolEnv, ToolKwargs, TurnResult, state_digest
from rollgym.envs.tools.retail.requests import (
    MOST_HEARD,
    REQUEST_KINDS,
    Customer,
    CustomerRequest,
    Identity,
    draw_request,
    usable_orders,
)
from rollgym.envs.tools.retail.shop import WRITES, Database, Shop, draw_database
from rollgym.envs.tools.tool import Tool, Toolbox, ToolResult, tool_parameters

MOST_REQUESTS = 3
_TRIES = 500
_QUESTIONS: Mapping[str, str] = {
    "order": "Which order do you mean? Please tell me the order number.",
    "reason": "What is the reason for that?",
}
# So many different numbers may be said in a conversation: of orders, prices and dates.
_MOST_NUMBERS = 100


class RetailEnv(ToolEnv):
    """Serve a customer of an online shop, who has requests, under the shop's rules.

    A reply calls tools, or is said to the customer. The episode ends when the customer does, or with a transfer to a
    human: reward 1 if the database equals the state after the correct actions, if the customer received the information
    that it asked for, and if the orders in question were looked up; else 0. The reward is 0, too, if the customer has
    left because its request was not attended to.

    Raises:
        ValueError: If an argument is invalid.
    """

    metadata: dict[str, Any] = ToolEnv.metadata | {
        "reset_options": ["expert", "split"],
        "description": "Serve a customer of an online shop by tools and by the shop's rules.",
        "observation": "What the customer says, or the results of the calls.",
        "actions": "Calls of tools in the `call_format`, or what is said to the customer.",
        "reward": (
            "1 at the end where the database is as it should be, what was asked for was told, "
            "the orders in question were looked at and the customer did not give up, else 0."
        ),
        "max_episode_steps": 40,
        "metrics": {**ToolEnv.metadata["metrics"], "policy_violations": "last"},
        "baselines": {"random": 0, "constant action": 0, "blind": 0, "expert": 1},
    }

    def __init__(
        self,
        *,
        requests: Annotated[
            int,
            Field(ge=1, le=MOST_REQUESTS, description="Things that the customer wants, one after another."),
        ] = 1,
        kinds: Annotated[
            Sequence[str] | None,
            SomeOf(*REQUEST_KINDS),
            Field(description="Kinds of requests that are drawn; null for all."),
        ] = None,
        strict_policy: Annotated[
            bool,
            Field(
                description=(
                    "Whether an episode in which something was changed without knowing the customer, or "
                    "without a clear yes, counts as failed; it is counted in the metrics in any case."
                )
            ),
        ] = False,
        split: TaskSplit = None,
        max_calls_per_turn: CallsPerTurn = 4,
        max_episode_steps: StepLimit = 40,
        **common: Unpack[ToolKwargs],
    ) -> None:
        chosen = REQUEST_KINDS if kinds is None else tuple(kinds)
        if requests > (most := usable_orders(chosen)):
            raise ValueError(
                f"a customer has {most} orders for requests of these kinds; requests must be at most {most}"
            )
        self._shop = Shop()
        # What the database should become is found out in a shop of its own, by the same tools.
        self._other_shop = Shop()
        self._other_tools = Toolbox(self._other_shop.tools())
        super().__init__(
            Toolbox([*self._shop.tools(), self._transfer_tool()]),
            max_calls_per_turn=max_calls_per_turn,
            max_episode_steps=max_episode_steps,
            **common,
        )
        self._count = requests
        self._kinds = chosen
        self._strict = strict_policy
        self._split = checked_split(split)
        self._user_id = ""
        self._requests: tuple[CustomerRequest, ...] = ()
        self._customer = Customer(Identity(""), ())
        self._goal = ""
        self._clear()

    def _transfer_tool(self) -> Tool:
        def transfer(summary: str) -> str:
            self._transferred = True
            return "the conversation is transferred"

        return Tool(
            "transfer_to_human",
            "Hand the conversation over to a human and end it.",
            tool_parameters(["summary"], summary={"type": "string"}),
            transfer,
        )

    def _clear(self) -> None:
        self._made: list[ToolCall] = []
        # A turn costs what is new in it, however long the conversation is.
        self._made_names: set[str] = set()
        self._known_user = ""
        self._said = ""
        self._violations = 0
        self._transferred = False

    # -- the episode -----------------------------------------------------------------------------------------------

    def start_episode(self, options: Mapping[str, Any]) -> str:
        split = checked_split(options.get("split", self._split))
        database = draw_database(self.np_random)
        user_ids = list(database["users"])
        for _ in range(_TRIES):
            user_id = user_ids[int(self.np_random.integers(len(user_ids)))]
            requests = self._draw_requests(database, user_id)
            content = "\n".join([user_id, *(request.opening for request in requests)])
            if requests and (split is None or split_of_text(content) == split):
                break
        else:
            raise ValueError(
                f"no task of split {split} in {_TRIES} tries: allow more kinds or fewer requests"
            )
        user = database["users"][user_id]
        by_email = self.np_random.random() < 0.5
        known = f"My e-mail address is {user['email']}."
        if not by_email:
            known = f"I am {user['first_name']} {user['last_name']}, zip code {user['address']['zip']}."
        self._user_id = user_id
        self._requests = requests
        self._find = _finding(user, by_email=bool(by_email))
        self._customer = Customer(Identity(known), requests)
        self._goal = self._goal_of(database, requests)
        self._shop.open(database)
        self._clear()
        return self._customer.opening()

    def _draw_requests(self, database: Database, user_id: str) -> tuple[CustomerRequest, ...]:
        """Draw requests about different orders of a customer; empty if there are too few orders."""
        orders = list(database["users"][user_id]["orders"])
        found: list[CustomerRequest] = []
        for index in self.np_random.permutation(len(orders)):
            kind = self._kinds[int(self.np_random.integers(len(self._kinds)))]
            request = draw_request(self.np_random, database, orders[int(index)], kind)
            if request is not None:
                found.append(request)
            if len(found) == self._count:
                return tuple(found)
        return ()

    def _goal_of(self, database: Database, requests: Sequence[CustomerRequest]) -> str:
        """Return the digest of the database once everything is done as it should be."""
        self._other_shop.open(orjson.loads(orjson.dumps(database)))
        for request in requests:
            if request.write is not None:
                result = self._other_tools.run(request.write)
                assert not result.error, result.text
        return self._other_shop.digest

    def run_call(self, call: ToolCall) -> ToolResult:
        if call.name in WRITES and not (self._known_user and self._customer.agreed):
            self._violations += 1
        result = self.toolbox.run(call)
        if not result.error:
            # What a policy calls its calls makes no difference.
            self._made.append(replace(call, id=""))
            self._made_names.add(state_digest([call.name, dict(call.arguments)]))
            if call.name.startswith("find_user"):
                self._known_user = result.text
        return result

    def after_calls(self) -> TurnResult | None:
        return self._ending("") if self._transferred else None

    def on_message(self, text: str) -> TurnResult | str:
        if not text.strip():
            return "error: there is neither a call of a tool nor a word to the customer."
        self._said += f"\n{text[:MOST_HEARD]}"
        answer = self._customer.answer(text)
        return self._ending(answer) if self._customer.gone else TurnResult(answer)

    def _ending(self, text: str) -> TurnResult:
        solved = self._solved()
        return TurnResult(text, float(solved), terminated=True, success=solved)

    def _solved(self) -> bool:
        if self._shop.digest != self._goal or (self._strict and self._violations):
            return False
        if not self._transferred and self._customer.request is not None:
            # The customer gave up: no reply reported that the request was done, or cannot be done.
            return False
        said = set(re.findall(r"\d+", self._said.replace(",", "")))
        if len(said) > _MOST_NUMBERS:
            # An agent that lists every number has not answered.
            said = set()
        looked_at = {call.arguments["order_id"].strip() for call in self._made if call.name == "get_order"}
        wanted = {request.reads[0].arguments["order_id"] for request in self._requests}
        return wanted <= looked_at and all(
            text in said for request in self._requests for text in request.told
        )

    def state_info(self) -> dict[str, Any]:
        customer = self._customer
        talk = [
            customer.position,
            customer.identified,
            customer.agreed,
            sorted(customer.told),
            self._known_user,
        ]
        return {
            "state": {
                "database": self._shop.digest,
                "requests_left": len(self._requests) - customer.position,
                # Only sessions that may ask for experts see what a policy has to find out.
                **(self._account() if self.shows_expert else {}),
            },
            "anchor": state_digest([self._shop.digest, talk, sorted(self._made_names)]),
        }

    def _account(self) -> dict[str, Any]:
        account = self._shop.database["users"].get(self._user_id, {})
        orders = {key: self._shop.database["orders"][key]["status"] for key in account.get("orders", ())}
        return {"user_id": self._user_id, "orders": orders}

    def _info(self, *, success: bool, valid: bool, reward: float, penalty: float) -> dict[str, Any]:
        info = super()._info(success=success, valid=valid, reward=reward, penalty=penalty)
        info["metrics"]["policy_violations"] = self._violations
        return info

    def describe_rules(self) -> str:
        return POLICY

    # -- the expert ------------------------------------------------------------------------------------------------

    def expert_turn(self) -> ToolCall | str:
        customer, request = self._customer, self._customer.request
        if request is None:
            return "Good bye."
        if not customer.identified:
            return "Hello. Please tell me your e-mail address, or your name and zip code."
        if self._known_user != self._user_id:
            return self._find
        for detail in request.asks:
            if detail not in customer.told:
                return _QUESTIONS[detail]
        for call in request.reads:
            if call not in self._made:
                return call
        if request.write is not None and request.write not in self._made:
            if not customer.agreed:
                return f"I am going to {request.plan}. Do you confirm that (yes/no)?"
            return request.write
        if request.kind == "refused":
            return "I am sorry, this order cannot be cancelled any more. Is there anything else?"
        report = "" if request.write is None else " That has been done."
        told = "".join(f" It is {amount} dollars." for amount in request.told)
        return f"{report}{told} Is there anything else?".strip()


def _finding(user: Mapping[str, Any], *, by_email: bool) -> ToolCall:
    if by_email:
        return ToolCall("find_user_by_email", {"email": user["email"]})
    return ToolCall(
        "find_user_by_name_and_zip",
        {"first_name": user["first_name"], "last_name": user["last_name"], "zip": user["address"]["zip"]},
    )


POLICY = """You work in the customer service of an online shop. In each reply either call tools, or write to the \
customer.

Rules:
1. First find out who the customer is: by e-mail address, or by name and zip code. Help with nobody else's data.
2. Orders are pending, processed, delivered or cancelled. Look at an order before you say anything about it.
3. Before you change anything, tell the customer what you are going to do, and get a clear yes.
4. Pending orders can be cancelled (the reason is "no longer needed" or "ordered by mistake"), sent to another \
address, and their items exchanged for other variants of the same product, once.
5. Delivered orders can be returned, to the payment method of the order or to a gift card, or their items exchanged \
for other variants of the same product. Name all the items in one call: an order takes one return or exchange.
6. Anything else cannot be done, such as cancelling an order that is processed or delivered. Then tell the customer \
that you cannot do it. Where that is of no use, transfer the conversation to a human.
7. When something was done, tell the customer so, with the amounts that were asked for, and ask if there is anything \
else. The customer ends the conversation."""
