"""Agents written on libraries from PyPI, each as its own documentation has it: nothing in them knows of us.

Each plays one episode at `base_url`: two tools at once, streams, a second conversation (a sub-agent's), and a history
that is shortened before it goes on. `LIBRARIES` names them by the distribution that they need.

Usage: agent_libraries.py NAME BASE_URL, by the interpreter of an environment that has the library and nothing of ours.
"""

import asyncio
import json
import sys

QUESTION = "Add 1 and 2, and add 3 and 4."
SUB_TASK = "You are the helper. Say one word."
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds two numbers.", "parameters": SCHEMA},
}


def user(text):
    return {"role": "user", "content": text}


def results_of(calls):
    """Messages with the results of a completion's calls of tools."""
    found = []
    for call in calls:
        arguments = json.loads(call.function.arguments)
        total = str(arguments.get("a", 0) + arguments.get("b", 0))
        found.append({"role": "tool", "tool_call_id": call.id, "content": total})
    return found


async def play_openai(base_url, key):
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key=key, max_retries=3) as client:
        completions = client.chat.completions
        messages = [{"role": "system", "content": "You add."}, user(QUESTION)]
        first = (await completions.create(model="policy", messages=messages, tools=[TOOL])).choices[0].message
        messages += [first.model_dump(exclude_none=True), *results_of(first.tool_calls or [])]
        async with completions.stream(model="policy", messages=messages, tools=[TOOL]) as stream:
            async for _ in stream:
                pass
            last = (await stream.get_final_completion()).choices[0].message
        messages += [{"role": "assistant", "content": last.content}, user("And again?")]
        await asyncio.gather(
            *(completions.create(model="policy", messages=messages, tools=[TOOL]) for _ in range(2))
        )
        await completions.create(model="policy", messages=[user(SUB_TASK)])
        # Compaction: the middle is left out.
        await completions.create(model="policy", messages=[messages[0], messages[-2], messages[-1]])


async def play_openai_agents(base_url, key):
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)

    @function_tool
    def add(a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)

    async with AsyncOpenAI(base_url=base_url, api_key=key) as client:
        for model_class in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
            model = model_class(model="policy", openai_client=client)
            helper = Agent(name="helper", instructions=SUB_TASK, model=model)
            tools = [add, helper.as_tool("helper", "Asks the helper.")]
            agent = Agent(name="adder", instructions="You add.", model=model, tools=tools)
            result = await Runner.run(agent, QUESTION, max_turns=4)
            streamed = Runner.run_streamed(agent, [*result.to_input_list(), user("And again?")], max_turns=4)
            async for _ in streamed.stream_events():
                pass
            await Runner.run(helper, "Ask the helper.")
            await Runner.run(agent, [*result.to_input_list()[-1:], user("Shorter?")], max_turns=4)


async def play_pydantic_ai(base_url, key):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=base_url, api_key=key)
    for model_class in (OpenAIChatModel, OpenAIResponsesModel):
        model = model_class("policy", provider=provider)
        helper = Agent(model, instructions=SUB_TASK)
        agent = Agent(model, instructions="You add.")

        @agent.tool_plain
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            return a + b

        @agent.tool_plain
        async def ask_helper() -> str:
            """Asks the helper."""
            return (await helper.run("Ask the helper.")).output  # noqa: B023 - used before the next one is made

        result = await agent.run(QUESTION)
        async with agent.run_stream("And again?", message_history=result.all_messages()) as streamed:
            async for _ in streamed.stream_text(debounce_by=None):
                pass
        await helper.run("Ask the helper.")
        await agent.run("Shorter?", message_history=result.all_messages()[-1:])


async def play_smolagents(base_url, key):
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def add(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: The first.
            b: The second.
        """
        return a + b

    def run():
        model = OpenAIServerModel(model_id="policy", api_base=base_url, api_key=key)
        agent = ToolCallingAgent(tools=[add], model=model, max_steps=3, verbosity_level=0)
        agent.run(QUESTION)
        agent.run("And again?", reset=False)
        helper = ToolCallingAgent(
            tools=[add], model=model, max_steps=2, name="helper", description="helps", verbosity_level=0
        )
        manager = ToolCallingAgent(
            tools=[],
            model=model,
            managed_agents=[helper],
            max_steps=3,
            verbosity_level=0,
            stream_outputs=True,
        )
        for _ in manager.run(QUESTION, stream=True):
            pass

    await asyncio.to_thread(run)


async def play_langgraph(base_url, key):
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    @tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return a + b

    for responses in (False, True):
        model = ChatOpenAI(model="policy", base_url=base_url, api_key=key, use_responses_api=responses)
        bound = model.bind_tools([add])

        async def call(state, bound=bound):
            return {"messages": [await bound.ainvoke(state["messages"])]}

        graph = StateGraph(MessagesState)
        graph.add_node("model", call)
        graph.add_node("tools", ToolNode([add]))
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", tools_condition)
        graph.add_edge("tools", "model")
        agent = graph.compile()
        begun = [SystemMessage("You add."), HumanMessage(QUESTION)]
        state = await agent.ainvoke({"messages": begun}, {"recursion_limit": 6})
        async for _ in agent.astream(
            {"messages": [*state["messages"], HumanMessage("And again?")]},
            {"recursion_limit": 6},
            stream_mode="messages",
        ):
            pass
        await asyncio.gather(*(model.ainvoke([HumanMessage(SUB_TASK)]) for _ in range(2)))
        # Compaction: all but the end is left out.
        short = [state["messages"][0], state["messages"][-1], HumanMessage("Shorter?")]
        await agent.ainvoke({"messages": short}, {"recursion_limit": 6})


async def play_litellm(base_url, key):
    import litellm

    litellm.telemetry = False

    async def ask(messages, **fields):
        return await litellm.acompletion(
            model="openai/policy", api_base=base_url, api_key=key, messages=messages, num_retries=2, **fields
        )

    messages = [{"role": "system", "content": "You add."}, user(QUESTION)]
    first = (await ask(messages, tools=[TOOL], temperature=0.3)).choices[0].message
    messages += [first.model_dump(exclude_none=True), *results_of(first.tool_calls or [])]
    chunks = [chunk async for chunk in await ask(messages, tools=[TOOL], stream=True)]
    last = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
    messages += [last.model_dump(exclude_none=True), user("And again?")]
    await asyncio.gather(*(ask(messages, tools=[TOOL]) for _ in range(2)))
    await ask([user(SUB_TASK)])
    await ask([messages[0], messages[-2], messages[-1]])


LIBRARIES = {
    "openai": play_openai,
    "openai-agents": play_openai_agents,
    "pydantic-ai": play_pydantic_ai,
    "smolagents": play_smolagents,
    "langgraph": play_langgraph,
    "litellm": play_litellm,
}
"""Players by the distribution's name."""

_CALLS = "".join(
    f'<tool_call>\n{{"name":  "add", "arguments": {{"b": {b},  "a": {a}}}}}\n</tool_call>'
    for a, b in ((1, 2), (3, 4))
)
_FINAL = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "3 and 7"}}\n</tool_call>'


def adder(prompt: str) -> str:
    """What a policy says that knows how to add with tools."""
    last = prompt.rpartition("<|im_start|>assistant")[0].rpartition("<|im_start|>")[2]
    if "helper. Say one word" in prompt:
        return "<think>\none word\n</think>\n\nword"
    if '"name": "helper"' in prompt and '"name": "add"' not in prompt and "Observation" not in last:
        return '<tool_call>\n{"name": "helper", "arguments": {"task": "Add 1 and 2."}}\n</tool_call>'
    if "tool_response" in last or "Observation" in last:
        return (
            _FINAL
            if '"final_answer"' in prompt
            else "<think>\nboth are there\n</think>\n\nThe sums are 3 and 7."
        )
    if "And again?" in last or "Shorter?" in last:
        return _FINAL if '"final_answer"' in prompt else "Still 3 and 7."
    return f"I add both.\n{_CALLS}"


if __name__ == "__main__":
    asyncio.run(LIBRARIES[sys.argv[1]](sys.argv[2], "any"))
