"""Retail-v0: the shop's rules, the customer's script, and what is a solved task."""

import json
import re
import subprocess
import sys
import time

import pytest
from gymnasium.utils.env_checker import check_env

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.formats.hermes import HERMES
from rollgym.clients.replies.formats.table import FORMATS
from rollgym.envs.tools.retail.environment import RetailEnv
from rollgym.envs.tools.retail.requests import REQUEST_KINDS, STOP, Customer, CustomerRequest, Identity
from rollgym.envs.tools.retail.shop import Shop
from rollgym.envs.tools.tool import Toolbox


def call(name, **arguments):
    return HERMES.write([ToolCall(name, arguments)])


def play(env, seed, skip=lambda action: False, instead=None):
    """Play as the expert does, but where `skip` says so; gives what was seen and the last step."""
    observation, info = env.reset(seed=seed, options={"expert": True})
    seen = [observation]
    while True:
        action = info["expert_action"]
        if skip(action):
            action = instead
        observation, reward, terminated, truncated, info = env.step(action)
        seen += [action, observation]
        if terminated or truncated:
            return seen, reward, terminated, info


@pytest.mark.parametrize("item_ids", [["9"] * 40_000, [1] * 60_000, [{}] * 60_000])
@pytest.mark.parametrize("calls", [1, 60])
def test_a_call_with_many_values_stalls_nobody(item_ids, calls):
    env = RetailEnv(max_calls_per_turn=64)
    before = env.reset(seed=1)[1]
    arguments = {"order_id": "#W1", "item_ids": item_ids[: len(item_ids) // calls], "payment_method_id": "x"}
    # Longer than what a writer writes.
    said = json.dumps({"name": "return_items", "arguments": arguments}, separators=(",", ":"))
    reply = f"<tool_call>{said}</tool_call>" * calls
    begun = time.process_time()
    observation, *_, info = env.step(reply)
    # It took a second of everybody's event loop.
    assert time.process_time() - begun < 0.25
    assert "at most 4000 values" in observation
    assert not info["action_is_valid"]
    assert info["state"] == before["state"]


def test_a_turn_costs_what_is_new_in_it():
    env = RetailEnv(max_episode_steps=1000)
    user_id = env.reset(seed=1, options={"expert": True})[1]["state"]["user_id"]
    env.reset(seed=1)
    for turn in range(60):
        env.step(
            call("change_user_address", user_id=user_id, street=f"{turn}" + "x" * 180_000, city="A", zip="1")
        )
    begun = time.process_time()
    for _ in range(10):
        env.step(call("list_products"))
    # It took a second: all calls that had ever been made were written anew each time.
    assert time.process_time() - begun < 0.2


# -- the episode -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", REQUEST_KINDS)
def test_the_expert_solves_every_kind_of_request_and_breaks_no_rule(kind):
    env = RetailEnv(kinds=[kind], strict_policy=True)
    for seed in range(20):
        seen, reward, terminated, info = play(env, seed)
        assert terminated
        assert info["success"]
        assert reward == 1.0
        assert seen[-1].endswith(STOP)
        assert info["metrics"]["policy_violations"] == info["metrics"]["tool_errors"] == 0


def test_several_requests_are_made_one_after_another():
    env = RetailEnv(requests=3)
    for seed in range(20):
        _, reward, _, info = play(env, seed)
        assert reward == 1.0
        assert info["state"]["requests_left"] == 0


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_plays(name):
    for seed in range(4):
        assert play(RetailEnv(call_format=name), seed)[1] == 1.0


def test_the_expert_knows_nothing_that_it_was_not_told():
    """What the expert says and calls with has been shown to it before."""
    env = RetailEnv(requests=2)
    for seed in range(30):
        seen = play(env, seed)[0]
        for place in range(1, len(seen), 2):
            shown = "\n".join(seen[:place])
            for read in HERMES.read(seen[place], {}).calls:
                for value in read.arguments.values():
                    for text in value if isinstance(value, list) else [value]:
                        if read.name != "cancel_order" or text.startswith("#"):
                            # A customer writes its name and address in its own way.
                            assert text.lower() in shown.lower(), (seed, read)


def test_gymnasium_accepts_it():
    check_env(RetailEnv(render_mode="ansi"), skip_render_check=True)


def test_equal_seeds_are_equal_episodes_in_another_process():
    code = (
        "import json; from tests.envs.tools.test_retail import RetailEnv, play; "
        "print(json.dumps([play(RetailEnv(requests=2), seed)[0] for seed in range(4)]))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(other.stdout) == [play(RetailEnv(requests=2), seed)[0] for seed in range(4)]


def test_splits_share_no_task():
    shown = {}
    for split in ("train", "valid", "test"):
        env = RetailEnv(split=split)
        for seed in range(15):
            observation, info = env.reset(seed=seed, options={"expert": True})
            task = (observation, info["state"]["user_id"], info["state"]["database"])
            assert shown.setdefault(task, split) == split
    assert len(shown) == 45


# -- what is not solved ------------------------------------------------------------------------------------------------


def writes(action):
    return any(f'"name": "{name}"' in action for name in ("cancel_order", "return_items", "exchange_items"))


@pytest.mark.parametrize("kind", ["cancel", "return", "exchange"])
def test_to_say_that_it_was_done_is_not_to_do_it(kind):
    env = RetailEnv(kinds=[kind])
    seen, reward, terminated, info = play(env, 3, writes, "It has been cancelled. Is there anything else?")
    assert terminated
    assert STOP in seen[-1]
    assert (reward, info["success"]) == (0.0, False)


def test_a_change_too_many_is_a_failure():
    env = RetailEnv(kinds=["total"])
    _, info = env.reset(seed=2, options={"expert": True})
    pending = next(key for key, status in info["state"]["orders"].items() if status == "pending")
    observation, *_, info = env.step(call("cancel_order", order_id=pending, reason="no longer needed"))
    assert "is cancelled" in observation
    assert info["metrics"]["policy_violations"] == 1
    terminated = False
    while not terminated:
        _, reward, terminated, _, info = env.step(info["expert_action"])
    assert (reward, info["success"]) == (0.0, False)


def test_what_the_customer_asked_for_must_be_told():
    env = RetailEnv(kinds=["total"])
    for told, expected in (("It is 3 dollars", 0.0), ("Nothing to tell", 0.0)):
        reward = play(env, 2, lambda action: "dollars" in action, f"{told}. Is there anything else?")[1]
        assert reward == expected
    assert play(env, 2)[1] == 1.0


def test_whoever_says_every_number_has_told_none():
    env = RetailEnv(kinds=["total"])
    seen, reward, *_ = play(env, 2)
    told = next(action for action in seen if "dollars. Is there" in action)
    amount = int(re.search(r"(\d+) dollars", told)[1])
    few, many = (" ".join(map(str, range(amount - count, amount + count))) for count in (20, 100))
    for numbers, expected in ((few, 1.0), (many, 0.0)):
        said = f"It is one of {numbers}. Is there anything else?"
        assert play(env, 2, lambda action: "dollars" in action, said)[1] == expected
    assert reward == 1.0


def test_to_refuse_without_looking_is_a_failure():
    env = RetailEnv(kinds=["refused"])
    env.reset(seed=1)
    _, reward, terminated, _, info = env.step("I cannot do that. Is there anything else?")
    assert (reward, terminated, info["success"]) == (0.0, True, False)


@pytest.mark.parametrize("kind", ["refused", "cancel"])
def test_a_customer_who_gives_up_was_not_served_even_where_the_database_is_right(kind):
    env = RetailEnv(kinds=[kind])
    seen, reward, terminated, info = play(
        env, 1, lambda action: "anything else?" in action, "Hm, let me see."
    )
    assert terminated
    assert seen[-1] == f"This leads nowhere. {STOP}"
    assert (reward, info["success"]) == (0.0, False)


@pytest.mark.parametrize("kind", REQUEST_KINDS)
def test_what_the_customer_wants_hangs_on_no_confirmation(kind):
    env = RetailEnv(kinds=[kind])
    _, info = env.reset(seed=5, options={"expert": True})
    for asked in ("Do you confirm that?", "May I look at your order?", "Is that correct?") * 3:
        observation, *_, info = env.step(asked)
        assert observation == "Yes, please go ahead."
    terminated = False
    while not terminated:
        _, reward, terminated, _, info = env.step(info["expert_action"])
    assert (reward, info["success"]) == (1.0, True)


def test_a_transfer_ends_the_conversation():
    env = RetailEnv(kinds=["refused"])
    _, info = env.reset(seed=1, options={"expert": True})
    while "cannot be cancelled" not in info["expert_action"]:
        *_, info = env.step(info["expert_action"])
    _, reward, terminated, _, info = env.step(call("transfer_to_human", summary="wants to cancel"))
    assert (reward, terminated, info["success"]) == (1.0, True, True)
    env.reset(seed=1)
    assert env.step(call("transfer_to_human", summary="too hard"))[1:3] == (0.0, True)


def test_changes_without_a_yes_are_counted_and_fail_where_the_policy_is_strict():
    for strict, expected in ((False, 1.0), (True, 0.0)):
        env = RetailEnv(kinds=["cancel"], strict_policy=strict)
        _, info = env.reset(seed=4, options={"expert": True})
        while "Do you confirm" not in info["expert_action"]:
            *_, info = env.step(info["expert_action"])
        order_id = info["expert_action"].split("order ")[1].split()[0]
        reason = info["expert_action"].split("(")[1].split(")")[0]
        *_, info = env.step(call("cancel_order", order_id=order_id, reason=reason))
        _, reward, _, _, info = env.step(info["expert_action"])
        assert info["metrics"]["policy_violations"] == 1
        assert reward == expected


def test_replies_that_mean_nothing_leave_the_state():
    env = RetailEnv(format_penalty=-0.1)
    before = env.reset(seed=1)[1]
    for reply in ("", "<think>hm</think>", call("fly"), call("get_order"), "<tool_call>{</tool_call>"):
        observation, reward, terminated, truncated, info = env.step(reply)
        assert observation.startswith("error: ")
        assert (reward, terminated, truncated, info["action_is_valid"]) == (-0.1, False, False, False)
        assert (info["state"], info["anchor"]) == (before["state"], before["anchor"])


def test_a_customer_who_is_not_helped_goes():
    env = RetailEnv()
    env.reset(seed=1)
    for _ in range(40):
        observation, reward, terminated, *_ = env.step("Hm, let me think.")
        if terminated:
            break
    assert "leads nowhere" in observation
    assert reward == 0.0
    env = RetailEnv(max_episode_steps=2)
    env.reset(seed=1)
    env.step("Hm.")
    assert env.step("Hm.")[3] is True


# -- the customer ------------------------------------------------------------------------------------------------------

WISH = CustomerRequest(
    "cancel",
    "I would like to cancel one of my orders.",
    {"order": "It is #W1.", "reason": "By mistake.", "payment": "The way I paid."},
    (),
    None,
    "",
)


@pytest.mark.parametrize(
    ("message", "answer"),
    [
        ("What is your e-mail?", "I am Ada, zip 1."),
        ("Can you verify your identity, please?", "I am Ada, zip 1."),
        ("Which order is it, and what is the reason?", "It is #W1. By mistake."),
        ("I will refund order #W1 to your card. Do you confirm?", "Yes, please go ahead."),
        ("Your order was cancelled.", f"That is all, thank you. {STOP}"),
        (
            "It was cancelled, and the reason noted. Is there anything else?",
            f"That is all, thank you. {STOP}",
        ),
        ("I am afraid that is not possible.", f"That is all, thank you. {STOP}"),
        ("One moment.", "I would like to cancel one of my orders."),
        ("Your order was cancelled by whom?", "I would like to cancel one of my orders."),
    ],
)
def test_the_customer_answers_what_it_hears(message, answer):
    assert Customer(Identity("I am Ada, zip 1."), [WISH]).answer(message) == answer


def test_who_has_said_its_name_confirms_with_a_yes():
    customer = Customer(Identity("I am Ada, zip 1."), [WISH, WISH])
    assert customer.answer("Your name?") == "I am Ada, zip 1."
    assert (
        customer.answer("Ada, I cancel it and mail to your name. Do you confirm?") == "Yes, please go ahead."
    )
    assert customer.answer("It is cancelled. Anything else?") == f"Thank you. {WISH.opening}"
    # A yes is for one request.
    assert not customer.agreed


# -- the shop ----------------------------------------------------------------------------------------------------------


def small_shop():
    variants = {
        "1": {"options": {"colour": "red"}, "price": 10, "available": True},
        "2": {"options": {"colour": "blue"}, "price": 25, "available": True},
        "3": {"options": {"colour": "green"}, "price": 5, "available": False},
    }
    item = {"item_id": "1", "product_id": "p", "name": "lamp", "options": {"colour": "red"}, "price": 10}
    order = {"user_id": "u", "address": {}, "payment_method_id": "gift", "items": [item]}
    shop = Shop()
    shop.open(
        {
            "products": {"p": {"name": "lamp", "variants": variants}},
            "users": {
                "u": {
                    "payment_methods": {
                        "gift": {"kind": "gift card", "balance": 12},
                        "card": {"kind": "card"},
                        "other": {"kind": "card"},
                    }
                }
            },
            "orders": {
                "#P": {**order, "status": "pending"},
                "#D": {**order, "status": "delivered"},
                "#Q": {**order, "status": "processed"},
            },
        }
    )
    return shop, Toolbox(shop.tools())


def swap(order_id, old="1", new="2", payment="card"):
    return {"order_id": order_id, "item_ids": [old], "new_item_ids": [new], "payment_method_id": payment}


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("cancel_order", {"order_id": "#D", "reason": "no longer needed"}, "the order is delivered"),
        ("cancel_order", {"order_id": "#X", "reason": "no longer needed"}, "no order '#X'"),
        ("change_order_address", {"order_id": "#Q", "street": "a", "city": "b", "zip": "c"}, "processed"),
        ("change_order_items", swap("#D"), "delivered"),
        ("exchange_items", swap("#P"), "pending"),
        ("exchange_items", swap("#D", new="1"), "for itself"),
        ("exchange_items", swap("#D", new="3"), "not available"),
        ("exchange_items", swap("#D", new="9"), "no variant"),
        ("exchange_items", swap("#D", old="2"), "no item '2'"),
        ("exchange_items", swap("#D", payment="gift"), "holds 12 dollars, and 15"),
        ("exchange_items", swap("#D", payment="none"), "no payment method"),
        ("exchange_items", {**swap("#D"), "new_item_ids": ["2", "2"]}, "one new item"),
        ("return_items", {"order_id": "#D", "item_ids": ["1", "1"], "payment_method_id": "gift"}, "twice"),
        ("return_items", {"order_id": "#D", "item_ids": ["1"], "payment_method_id": "other"}, "gift card"),
        ("get_user", {"user_id": "nobody"}, "no user"),
    ],
)
def test_the_shop_keeps_to_its_rules(name, arguments, said):
    shop, box = small_shop()
    before = shop.digest
    result = box.run(ToolCall(name, arguments))
    assert result.error
    assert said in result.text
    shop._digest = None
    assert shop.digest == before


def test_the_shop_does_what_it_can():
    shop, box = small_shop()
    orders, methods = shop.database["orders"], shop.database["users"]["u"]["payment_methods"]
    assert not box.run(ToolCall("change_order_items", swap("#P"))).error
    assert orders["#P"]["items"][0]["item_id"] == "2"
    assert "once" in box.run(ToolCall("change_order_items", swap("#P", "2", "1"))).text
    assert not box.run(ToolCall("cancel_order", {"order_id": "#P", "reason": "no longer needed"})).error
    assert methods["gift"]["balance"] == 12 + 25
    assert not box.run(ToolCall("exchange_items", swap("#D", payment="gift"))).error
    assert methods["gift"]["balance"] == 37 - 15
    assert orders["#D"]["status"] == "exchange requested"


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"requests": 4}, "requests must be a whole number from 1 to 3"),
        ({"requests": 3, "kinds": ["cancel"]}, "requests must be at most 2"),
        ({"kinds": []}, "kinds must be some of"),
        ({"kinds": ["theft"]}, "kinds must be some of"),
        ({"split": "dev"}, "split must be"),
        ({"call_format": "yaml"}, "call_format"),
    ],
)
def test_arguments_that_make_no_sense(kwargs, said):
    with pytest.raises(ValueError, match=said):
        RetailEnv(**kwargs)
