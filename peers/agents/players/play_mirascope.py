"""mirascope: calls with tools, a stream and a structured reply."""
# players:
# mirascope = ["mirascope[openai]"]

import parts
from mirascope import llm

llm.register_provider(
    "openai:completions", scope=f"openai/{parts.MODEL}", base_url=parts.BASE_URL, api_key=parts.KEY
)
NAME = f"openai/{parts.MODEL}"


def tools():
    @llm.tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        return parts.add(a, b)

    @llm.call(NAME, tools=[add])
    def ask():
        return parts.QUESTION

    response = ask()
    while response.tool_calls:
        response = response.resume(response.execute_tools())
    return response.text()


def stream():
    @llm.call(NAME)
    def ask():
        return parts.QUESTION

    return "".join(ask.stream().text_stream())


def structured():
    @llm.call(NAME, format=parts.Total)
    def ask():
        return parts.QUESTION

    return repr(ask().parse())


parts.play(tools=tools, stream=stream, structured=structured)
