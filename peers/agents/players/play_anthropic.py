"""anthropic: messages with a tool, its tool runner, a stream and its own structured output."""
# players:
# anthropic = ["anthropic"]

from anthropic import Anthropic, beta_tool
from parts import INSTRUCTIONS, MODEL, QUESTION, Total, add, play

client = Anthropic(api_key="any")
ASKED = {"model": MODEL, "max_tokens": 256, "messages": [{"role": "user", "content": QUESTION}]}


def tools():
    @beta_tool
    def add_numbers(a: int, b: int) -> str:
        """Adds two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return str(add(a, b))

    runner = client.beta.messages.tool_runner(**ASKED, system=INSTRUCTIONS, tools=[add_numbers])
    return runner.until_done().content[0].text


def stream():
    with client.messages.stream(**ASKED) as events:
        return events.get_final_text()


def structured():
    return client.messages.parse(**ASKED, output_format=Total).parsed_output


play(tools=tools, stream=stream, structured=structured)
