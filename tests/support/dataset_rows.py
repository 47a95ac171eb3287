"""Rows as the data sets of other libraries have them: what each is read as, or why it is refused."""

import json
from typing import Any


def u(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def a(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def s(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def share(speaker: str, text: Any, **more: Any) -> dict[str, Any]:
    return {"from": speaker, "value": text, **more}


LOOK = {"name": "look", "description": "Look it up.", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": LOOK}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"q": 1}'}}
ASKED, TALK = [u("q")], [u("q"), a("r")]
LONG = [s("Be brief."), u("q"), a("r"), u("more"), a("end")]
PARTS = [{"type": "text", "text": "q"}]

SFT: dict[str, tuple[dict[str, Any], str]] = {
    # TRL
    "TRL conversational": ({"messages": TALK}, ">>u:q|a:r"),
    "TRL several turns": ({"messages": LONG}, ">>s:Be brief.|u:q|a:r|u:more|a:end"),
    "TRL prompt-completion": ({"prompt": "q", "completion": "r"}, "u:q|>>a:r"),
    "TRL conversational prompt-completion": ({"prompt": ASKED, "completion": [a("r")]}, "u:q|>>a:r"),
    "TRL prompt with a system message": (
        {"prompt": [s("Be brief."), u("q")], "completion": [a("r")]},
        "s:Be brief.|u:q|>>a:r",
    ),
    "TRL tools": ({"messages": TALK, "tools": [TOOL]}, ">>u:q|a:r #look"),
    "TRL tools as JSON text": ({"messages": TALK, "tools": json.dumps([TOOL])}, ">>u:q|a:r #look"),
    "TRL calls": (
        {
            "messages": [
                u("q"),
                a(None, tool_calls=[CALL]),
                {"role": "tool", "content": "3", "name": "look"},
                a("r"),
            ]
        },
        '>>u:q|a:!look{"q": 1}|t:3|a:r',
    ),
    "TRL content parts": ({"messages": [u(PARTS), a([{"type": "text", "text": "r"}])]}, ">>u:q|a:r"),
    "TRL other columns": ({"messages": TALK, "chat_template_kwargs": {}, "source": "x"}, ">>u:q|a:r"),
    # OpenAI
    "OpenAI chat": ({"messages": LONG}, ">>s:Be brief.|u:q|a:r|u:more|a:end"),
    "OpenAI weights": (
        {"messages": [u("q"), a("r", weight=0), u("more"), a("end", weight=1)]},
        ">>u:q|a:r[0]|u:more|a:end",
    ),
    "OpenAI tools": (
        {"messages": [u("q"), a(None, tool_calls=[CALL])], "tools": [TOOL], "parallel_tool_calls": False},
        '>>u:q|a:!look{"q": 1} #look',
    ),
    "OpenAI developer": ({"messages": [{"role": "developer", "content": "x"}, *TALK]}, ">>d:x|u:q|a:r"),
    "OpenAI functions": (
        {
            "messages": [
                u("q"),
                {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": "{}"}},
                {"role": "function", "name": "look", "content": "3"},
                a("r"),
            ],
            "functions": [LOOK],
        },
        ">>u:q|a:!look{}|t:3|a:r #look",
    ),
    "OpenAI tools of responses": (
        {"messages": TALK, "tools": [{"type": "function", **LOOK}]},
        ">>u:q|a:r #look",
    ),
    # axolotl
    "axolotl chat_template": ({"messages": TALK}, ">>u:q|a:r"),
    "axolotl train of a message": (
        {"messages": [u("q"), a("r", train=False), a("x", train=True)]},
        ">>u:q|a:r[0]|a:x",
    ),
    "axolotl training of a message": (
        {"messages": [u("q"), a("r", training=False), a("x")]},
        ">>u:q|a:r[0]|a:x",
    ),
    "axolotl alpaca": ({"instruction": "q", "input": "", "output": "r"}, ">>u:q|a:r"),
    "axolotl alpaca with input": ({"instruction": "q", "input": "i", "output": "r"}, ">>u:q\ni|a:r"),
    "axolotl alpaca with text": (
        {"instruction": "q", "input": "i", "output": "r", "text": "all"},
        ">>u:q\ni|a:r",
    ),
    "axolotl sharegpt": ({"conversations": [share("human", "q"), share("gpt", "r")]}, ">>u:q|a:r"),
    "axolotl sharegpt system": (
        {"conversations": [share("system", "x"), share("human", "q"), share("gpt", "r")]},
        ">>s:x|u:q|a:r",
    ),
    "axolotl sharegpt weights": (
        {"conversations": [share("human", "q"), share("gpt", "r", weight=0), share("gpt", "x", weight=1)]},
        ">>u:q|a:r[0]|a:x",
    ),
    "axolotl conversations with roles": ({"conversations": TALK}, ">>u:q|a:r"),
    "axolotl messages with from": ({"messages": [share("human", "q"), share("gpt", "r")]}, ">>u:q|a:r"),
    # LLaMA-Factory
    "LLaMA-Factory alpaca": (
        {"instruction": "q", "input": "i", "output": "r", "system": "x", "history": [["a", "b"], ["c", "d"]]},
        ">>s:x|u:a|a:b|u:c|a:d|u:q\ni|a:r",
    ),
    "LLaMA-Factory alpaca with nulls": (
        {"instruction": "q", "input": None, "output": "r", "system": None, "history": None},
        ">>u:q|a:r",
    ),
    "LLaMA-Factory sharegpt": (
        {
            "conversations": [
                share("human", "q"),
                share("function_call", '{"name": "look", "arguments": {"q": 1}}'),
                share("observation", "3"),
                share("gpt", "r"),
            ],
            "system": "x",
            "tools": json.dumps([LOOK]),
        },
        '>>s:x|u:q|a:!look{"q": 1}|t:3|a:r #look',
    ),
    "LLaMA-Factory several calls": (
        {
            "conversations": [
                share("human", "q"),
                share("function_call", json.dumps([{"name": "look", "arguments": {"q": n}} for n in (1, 2)])),
            ]
        },
        '>>u:q|a:!look{"q": 1}!look{"q": 2}',
    ),
    "LLaMA-Factory openai": ({"messages": TALK, "system": ""}, ">>u:q|a:r"),
    "LLaMA-Factory empty pictures": ({"messages": TALK, "images": [], "videos": None}, ">>u:q|a:r"),
    # others
    "Dolly": ({"instruction": "q", "context": "c", "response": "r", "category": "x"}, ">>u:q\nc|a:r"),
    "OpenRLHF input and output": ({"input": "q", "output": "r"}, "u:q|>>a:r"),
    "OpenRLHF list as input": ({"input": ASKED, "output": "r"}, "u:q|>>a:r"),
    "verl multi-turn": (
        {"messages": LONG, "tools": None, "enable_thinking": None},
        ">>s:Be brief.|u:q|a:r|u:more|a:end",
    ),
    "verl prompt and response": ({"prompt": "q", "response": "r"}, "u:q|>>a:r"),
    "Tinker": ({"messages": [u("q"), a([{"type": "text", "text": "r"}])]}, ">>u:q|a:r"),
    "NeMo conversations": (
        {"conversations": [share("User", "q"), share("Assistant", "r")], "system": "x", "mask": "User"},
        ">>s:x|u:q|a:r",
    ),
    "NeMo-RL input and output": ({"input": "q", "output": "r", "task_name": "x"}, "u:q|>>a:r"),
    "slime messages": ({"messages": LONG[1:3], "metadata": {}}, ">>u:q|a:r"),
    "slime step_loss_mask": (
        {"messages": [u("q"), a("bad", step_loss_mask=0), u("more"), a("r", step_loss_mask=1)]},
        ">>u:q|a:bad[0]|u:more|a:r",
    ),
    "ms-swift loss_scale": (
        {"messages": [u("q"), a("r", loss_scale=0.0), a("x", loss_scale=1.0)]},
        ">>u:q|a:r[0]|a:x",
    ),
    "torchtune masked": (
        {"messages": [u("q"), a("r", masked=True), a("x", masked=False)]},
        ">>u:q|a:r[0]|a:x",
    ),
    "calls with parameters": (
        {
            "messages": [
                u("q"),
                a(None, tool_calls=[{"function": {"name": "look", "parameters": {"q": 1}}}]),
                a(None, tool_calls=[{"name": "look", "parameters": '{"q": 2}', "arguments": None}]),
            ]
        },
        '>>u:q|a:!look{"q": 1}|a:!look{"q": 2}',
    ),
    "ShareGPT call with parameters": (
        {
            "conversations": [
                share("human", "q"),
                share("function_call", '{"name": "look", "parameters": {"q": 1}}'),
            ]
        },
        '>>u:q|a:!look{"q": 1}',
    ),
    "integers beyond 64 bits in calls": (
        {
            "messages": [
                u("q"),
                a(None, tool_calls=[{"function": {"name": "look", "arguments": f'{{"q": {2**70}}}'}}]),
                share("function_call", f'{{"name": "look", "arguments": {{"q": {2**70}}}}}'),
            ]
        },
        f'>>u:q|a:!look{{"q": {2**70}}}|a:!look{{"q": {2**70}}}',
    ),
    "an integer beyond 64 bits in tools": (
        {"messages": TALK, "tools": json.dumps([{**LOOK, "description": 2**70}])},
        ">>u:q|a:r #look",
    ),
    "messages as JSON text": ({"messages": json.dumps(LONG)}, ">>s:Be brief.|u:q|a:r|u:more|a:end"),
    "conversations as JSON text": (
        {"conversations": json.dumps([share("human", "q"), share("gpt", "r")])},
        ">>u:q|a:r",
    ),
    "tool_calls as JSON text": (
        {"messages": [u("q"), a(None, tool_calls=json.dumps([CALL])), a("", tool_calls=[json.dumps(CALL)])]},
        '>>u:q|a:!look{"q": 1}|a:!look{"q": 1}',
    ),
    "function_call as JSON text": (
        {"messages": [u("q"), a(None, function_call=json.dumps({"name": "look", "arguments": "{}"}))]},
        ">>u:q|a:!look{}",
    ),
    "tools that are JSON texts": ({"messages": TALK, "tools": [json.dumps(TOOL)]}, ">>u:q|a:r #look"),
    "parts whose other kinds a table has filled up": (
        {"messages": [u([{"type": "text", "text": "q", "image": None}]), a("r")]},
        ">>u:q|a:r",
    ),
    "Gemma's role": ({"messages": [u("q"), {"role": "model", "content": "r"}]}, ">>u:q|a:r"),
    "a reply that holds its prompt": ({"prompt": ASKED, "completion": TALK}, "u:q|>>a:r"),
    "control tokens are text": ({"prompt": "<|im_end|>", "completion": "r"}, "u:<|im_end|>|>>a:r"),
}

NAMED: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "OpenRLHF input_key": (
        {"question": "q", "reply": "r"},
        {"prompt": "question", "completion": "reply"},
        "u:q|>>a:r",
    ),
    "axolotl message_property_mappings": (
        {"talk": [{"who": "human", "says": "q"}, {"who": "gpt", "says": "r"}]},
        {"messages": "talk", "messages.role": "who", "messages.content": "says"},
        ">>u:q|a:r",
    ),
    "axolotl field_messages": (
        {"talk": [share("human", "q"), share("gpt", "r")]},
        {"messages": "talk"},
        ">>u:q|a:r",
    ),
    "LLaMA-Factory columns": (
        {"ask": "q", "say": "r", "sys": "x"},
        {"prompt": "ask", "completion": "say", "system": "sys"},
        "s:x|u:q|>>a:r",
    ),
    "verl prompt_dict_keys": (
        {"prompt": [u("chat")], "extra_info": {"question": "q", "answer": "r"}},
        {"prompt": "extra_info.question", "completion": "extra_info.answer"},
        "u:q|>>a:r",
    ),
    "a column with a dot": (
        {"a.b": "q", "a": 1, "c": "r"},
        {"prompt": "a.b", "completion": "c"},
        "u:q|>>a:r",
    ),
    "Alpaca by our names": (
        {"instruction": "q", "output": "r"},
        {"prompt": "instruction", "completion": "output"},
        "u:q|>>a:r",
    ),
}

PAIRS: dict[str, tuple[dict[str, Any], tuple[str, str]]] = {
    "TRL explicit prompt": ({"prompt": "q", "chosen": "r", "rejected": "x"}, ("u:q|>>a:r", "u:q|>>a:x")),
    "TRL conversational": (
        {"prompt": ASKED, "chosen": [a("r")], "rejected": [a("x")]},
        ("u:q|>>a:r", "u:q|>>a:x"),
    ),
    "TRL implicit prompt": ({"chosen": TALK, "rejected": [u("q"), a("x")]}, ("u:q|>>a:r", "u:q|>>a:x")),
    "TRL tools": (
        {"prompt": ASKED, "chosen": [a("r")], "rejected": [a("x")], "tools": [TOOL]},
        ("u:q|>>a:r #look", "u:q|>>a:x #look"),
    ),
    "TRL margin": ({"prompt": "q", "chosen": "r", "rejected": "x", "margin": 2}, ("u:q|>>a:r", "u:q|>>a:x")),
    "UltraFeedback": (
        {"prompt": "q", "chosen": TALK, "rejected": [u("q"), a("x")], "messages": TALK, "score_chosen": 8.0},
        ("u:q|>>a:r", "u:q|>>a:x"),
    ),
    "OpenRLHF": ({"chosen": TALK, "rejected": [u("q"), a("x")], "prompt": None}, ("u:q|>>a:r", "u:q|>>a:x")),
    "axolotl chat_template.default": (
        {"messages": [s("y"), u("q")], "chosen": a("r"), "rejected": a("x")},
        ("s:y|u:q|>>a:r", "s:y|u:q|>>a:x"),
    ),
    "axolotl chatml.intel": (
        {"system": "y", "question": "q", "chosen": "r", "rejected": "x"},
        ("s:y|u:q|>>a:r", "s:y|u:q|>>a:x"),
    ),
    "axolotl chatml.argilla": (
        {"system": "y", "instruction": "q", "chosen_response": "r", "rejected_response": "x"},
        ("s:y|u:q|>>a:r", "s:y|u:q|>>a:x"),
    ),
    "axolotl prompt_pairs": (
        {"system": "y", "prompt": "q", "chosen": "r", "rejected": "x"},
        ("s:y|u:q|>>a:r", "s:y|u:q|>>a:x"),
    ),
    "LLaMA-Factory alpaca ranking": (
        {"instruction": "q", "input": "i", "chosen": "r", "rejected": "x"},
        ("u:q\ni|>>a:r", "u:q\ni|>>a:x"),
    ),
    "LLaMA-Factory sharegpt ranking": (
        {"conversations": [share("human", "q")], "chosen": share("gpt", "r"), "rejected": share("gpt", "x")},
        ("u:q|>>a:r", "u:q|>>a:x"),
    ),
    "OpenAI preferences": (
        {
            "input": {"messages": ASKED, "tools": [TOOL], "parallel_tool_calls": True},
            "preferred_output": [a("r")],
            "non_preferred_output": [a("x")],
        },
        ("u:q|>>a:r #look", "u:q|>>a:x #look"),
    ),
    "Tinker A": (
        {
            "comparison": {"prompt_conversation": ASKED, "completion_A": [a("r")], "completion_B": [a("x")]},
            "label": "A",
        },
        ("u:q|>>a:r", "u:q|>>a:x"),
    ),
    "Tinker B": (
        {
            "comparison": {"prompt_conversation": ASKED, "completion_A": [a("r")], "completion_B": [a("x")]},
            "label": "B",
        },
        ("u:q|>>a:x", "u:q|>>a:r"),
    ),
    "NeMo-RL": (
        {
            "context": ASKED,
            "completions": [{"rank": 1, "completion": [a("x")]}, {"rank": 0, "completion": [a("r")]}],
        },
        ("u:q|>>a:r", "u:q|>>a:x"),
    ),
}

JUDGED: dict[str, tuple[dict[str, Any], list[tuple[str, bool]]]] = {
    "TRL unpaired": ({"prompt": "q", "completion": "r", "label": True}, [("u:q|>>a:r", True)]),
    "TRL conversational unpaired": (
        {"prompt": ASKED, "completion": [a("r")], "label": False},
        [("u:q|>>a:r", False)],
    ),
    "a pair": ({"prompt": "q", "chosen": "r", "rejected": "x"}, [("u:q|>>a:r", True), ("u:q|>>a:x", False)]),
    "axolotl KTO": (
        {"system": "y", "instruction": "q", "completion": "r", "label": True},
        [("s:y|u:q|>>a:r", True)],
    ),
    "LLaMA-Factory alpaca KTO": (
        {"instruction": "q", "input": "i", "output": "r", "kto_tag": False},
        [("u:q\ni|>>a:r", False)],
    ),
    "LLaMA-Factory sharegpt KTO": (
        {"conversations": [share("human", "q"), share("gpt", "r")], "kto_tag": True},
        [("u:q|>>a:r", True)],
    ),
    "LLaMA-Factory openai KTO": ({"messages": TALK, "label": None, "kto_tag": False}, [("u:q|>>a:r", False)]),
}

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "TRL language modelling": (
        "sft",
        {"text": "x"},
        "the row has no 'prompt' .or 'messages'.; its columns are text",
    ),
    "TRL prompt-only": ("sft", {"prompt": "q"}, "the row has no 'completion'"),
    "TRL implicit prompt as text": (
        "pairs",
        {"chosen": "q r", "rejected": "q x"},
        "'chosen' is a reply alone",
    ),
    "TRL stepwise": (
        "judged",
        {"prompt": "q", "completions": ["r"], "labels": [True]},
        "has no 'completion'",
    ),
    "TRL pictures": (
        "sft",
        {"messages": TALK, "images": ["x.png"]},
        "'images' holds what is seen beside the text",
    ),
    "TRL picture parts": (
        "sft",
        {"messages": [u([{"type": "image"}]), a("r")]},
        r"messages\[0\].content must be a text",
    ),
    "TRL label": (
        "judged",
        {"prompt": "q", "completion": "r", "label": "yes"},
        "'label' must be true or false",
    ),
    "OpenAI batch": (
        "sft",
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": ASKED}},
        "the row has no 'prompt' .*its columns are custom_id, method, url, body",
    ),
    "OpenAI weight": (
        "sft",
        {"messages": [u("q"), a("r", weight=0.5)]},
        r"messages\[1\].weight must be 0 or 1",
    ),
    "OpenAI preferences without messages": (
        "pairs",
        {"input": "q", "preferred_output": [a("r")], "non_preferred_output": [a("x")]},
        "'input' must be an object with 'messages'",
    ),
    "axolotl input_output": ("sft", {"segments": [{"label": True, "text": "x"}]}, "its columns are segments"),
    "axolotl completion": ("sft", {"text": "x"}, "the row has no 'prompt'"),
    "axolotl train_detail": (
        "sft",
        {"messages": [u("q"), a("r", train_detail=[{"begin_offset": 0, "end_offset": 1, "train": True}])]},
        r"messages\[1\].train_detail has parts of a message learnt",
    ),
    "axolotl unknown role": (
        "sft",
        {"messages": [{"role": "critic", "content": "x"}]},
        "role must be one of .*messages.role",
    ),
    "LLaMA-Factory pictures": (
        "sft",
        {"conversations": [share("human", "<image>")], "images": ["x.png"]},
        "leave the row out",
    ),
    "LLaMA-Factory broken call": (
        "sft",
        {"conversations": [share("human", "q"), share("function_call", "look(q)")]},
        "a message of function_call is not JSON",
    ),
    "LLaMA-Factory history": (
        "sft",
        {"instruction": "q", "output": "r", "history": ["a"]},
        "'history' must be a list of pairs",
    ),
    "LLaMA-Factory number": (
        "sft",
        {"instruction": 5, "output": "r"},
        "'instruction' and 'input' must be texts",
    ),
    "LLaMA-Factory conversations as text": (
        "sft",
        {"conversations": "q"},
        "'conversations' must be a list of messages, not str",
    ),
    "LLaMA-Factory tag": (
        "judged",
        {"messages": TALK, "kto_tag": "good"},
        "'label' must be true or false, not 'good'",
    ),
    "Tinker tie": (
        "pairs",
        {
            "comparison": {"prompt_conversation": ASKED, "completion_A": [a("r")], "completion_B": [a("x")]},
            "label": "Tie",
        },
        "'label' must be A or B, not 'Tie': of a tie nothing is learnt",
    ),
    "NeMo-RL equal ranks": (
        "pairs",
        {"context": ASKED, "completions": [{"rank": 0, "completion": [a(t)]} for t in "rx"]},
        r"must have two different ranks, not \[0, 0\]",
    ),
    "NeMo-RL one completion": (
        "pairs",
        {"context": ASKED, "completions": [{"rank": 0}]},
        "'completions' must be two",
    ),
    "a pair for sft": ("sft", {"prompt": "q", "chosen": "r", "rejected": "x"}, "the row has no 'completion'"),
    "calls that are no list": (
        "sft",
        {"messages": [u("q"), a(None, tool_calls=5)]},
        "tool_calls must be a list of calls",
    ),
    "LLaMA-Factory ranking, former": (
        "sft",
        {"instruction": "i", "input": "", "output": ["good", "bad"]},
        "'output' holds 2 texts, and a reply is one: .*'chosen' and 'rejected'",
    ),
    "Dolly with several replies": (
        "sft",
        {"instruction": "i", "response": ["good", "bad"]},
        "'response' holds 2 texts",
    ),
    "LLaMA-Factory KTO with several replies": (
        "judged",
        {"instruction": "i", "output": ["good", "bad"], "kto_tag": True},
        r"completion\[0\] must be a message",
    ),
    "a content of several texts": (
        "sft",
        {"messages": [u("q"), a(["good", "bad"])]},
        r"messages\[1\].content must be a text",
    ),
    "a picture with a caption": (
        "sft",
        {"messages": [u([{"type": "image", "text": "caption", "image": "x.png"}]), a("r")]},
        r"messages\[0\].content must be a text .*leave the row out",
    ),
    "a picture in a part of text": (
        "sft",
        {"messages": [u([{"text": "caption", "image_url": {"url": "x.png"}}]), a("r")]},
        r"messages\[0\].content must be a text",
    ),
    "slime step_loss_mask": (
        "sft",
        {"messages": [u("q"), a("r", step_loss_mask=2)]},
        r"messages\[1\].step_loss_mask must be 0 or 1",
    ),
    "torchtune masked": (
        "sft",
        {"messages": [u("q"), a("r", masked="no")]},
        r"messages\[1\].masked must be true or false",
    ),
    "arguments under another name": (
        "sft",
        {"messages": [u("q"), a(None, tool_calls=[{"name": "look", "args": {"q": 1}}])]},
        r"tool_calls\[0\] has no 'arguments'; what it has is called args: call its arguments 'arguments'",
    ),
    "arguments beside the function": (
        "sft",
        {"messages": [u("q"), a(None, tool_calls=[{"function": {"name": "look"}, "arguments": {"q": 1}}])]},
        r"tool_calls\[0\].arguments stands beside its function",
    ),
    "arguments under two names": (
        "sft",
        {
            "messages": [
                u("q"),
                a(None, tool_calls=[{"name": "look", "arguments": {"q": 1}, "parameters": {"q": 2}}]),
            ]
        },
        "has other 'arguments' than 'parameters'",
    ),
    "messages as a text": ("sft", {"messages": "q"}, "'messages' must be a list of messages, not 'q'"),
    "messages as broken JSON text": ("sft", {"messages": '[{"role"'}, "messages is not JSON"),
    "calls as broken JSON text": (
        "sft",
        {"messages": [u("q"), a(None, tool_calls="look(q)")]},
        r"messages\[1\].tool_calls is not JSON",
    ),
    **{
        f"arguments that hold {number}": (
            "sft",
            {"messages": [u("q"), a(None, tool_calls=[{"name": "look", "arguments": f'{{"q": {number}}}'}])]},
            r"tool_calls\[0\].function.arguments is not JSON",
        )
        for number in ("NaN", "Infinity", "1e999", '"\\ud800"')
    },
    **{
        f"a message's {name}": (
            "sft",
            {"messages": [u("q"), a("r") | {name: value}]},
            rf"messages\[1\].{name} may say whether the message is learnt",
        )
        for name, value in {"mask": 0, "loss_weight": 0.0, "no_loss": True, "ignore": False}.items()
    },
    "thoughts that are no text": (
        "sft",
        {"messages": [u("q"), a("r") | {"reasoning_content": 5}]},
        r"messages\[1\].reasoning_content must be a text",
    ),
    "a tool whose function is a text": (
        "sft",
        {"messages": TALK, "tools": [{"type": "function", "function": "look"}]},
        "a declaration in 'tools' must have a function with a name",
    ),
    "a picture in a column of its own": (
        "sft",
        {"messages": TALK, "image": "x.png"},
        "'image' holds what is seen",
    ),
    "a prompt as the JSON text of its messages": (
        "sft",
        {"prompt": '[{"role": "user", "content": "q"}]', "completion": "r"},
        "'prompt' is a list of messages written as JSON text",
    ),
    "a number as text": ("sft", {"messages": [u(5), a("r")]}, r"messages\[0\].content must be a text"),
}

VERL = {
    "data_source": "gsm8k",
    "prompt": [u("q")],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0},
}
RLVR: dict[str, tuple[dict[str, Any], dict[str, str], Any]] = {
    "verl": (VERL, {}, ("q", "72")),
    "verl with a system message": (
        {**VERL, "prompt": [s("Be brief."), u("q")]},
        {},
        ("Be brief.\n\nq", "72"),
    ),
    "verl by paths": (VERL, {"question": "prompt", "answer": "reward_model.ground_truth"}, ("q", "72")),
    "verl answer by a path": (VERL, {"answer": "reward_model.ground_truth"}, ("q", "72")),
    "verl several turns": (
        {**VERL, "prompt": LONG},
        {},
        "the question is a list of messages, and only one of the user",
    ),
    "verl without ground truth": (
        {**VERL, "reward_model": {"style": "rule"}},
        {"answer": "reward_model.ground_truth"},
        "has no reward_model.ground_truth; its columns are data_source",
    ),
    "TRL prompt and answer": ({"prompt": ASKED, "answer": "72"}, {}, ("q", "72")),
    "TRL open-r1": ({"prompt": ASKED, "solution": "$72$"}, {}, ("q", "$72$")),
    "open-r1 named": (
        {"problem": "q", "solution": "72"},
        {"question": "problem", "answer": "solution"},
        ("q", "72"),
    ),
    "verifiers": ({"prompt": [u("q")], "answer": "72", "info": {"a": 1}}, {}, ("q", "72")),
    "verifiers question": ({"question": "q", "answer": "72"}, {}, ("q", "72")),
    "OpenRLHF": ({"input": "q", "label": "72"}, {}, ("q", "72")),
    "slime text": ({"prompt": "q", "label": "72"}, {}, ("q", "72")),
    "slime list": ({"prompt": ASKED, "label": "72", "metadata": {"rm_type": "math"}}, {}, ("q", "72")),
    "NeMo-RL": ({"problem": "q", "expected_answer": "72"}, {}, ("q", "72")),
    "OpenAI RFT": ({"messages": ASKED, "reference_answer": "72"}, {}, ("q", "72")),
    "OpenAI RFT with answer": ({"messages": [u(PARTS)], "answer": 72}, {}, ("q", 72)),
    "GSM8K": ({"question": "q", "answer": "so\n#### 72"}, {}, ("q", "so\n#### 72")),
    "Instructions": ({"prompt": ASKED, "ground_truth": "x"}, {}, (None, None)),
    "pictures": (
        {"prompt": [u([{"type": "image"}])], "answer": "72"},
        {},
        "the question is a list of messages",
    ),
}
