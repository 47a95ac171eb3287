"""google-adk on litellm: its agent, plain, streaming and with a schema as its output."""
# players:
# google_adk = ["google-adk", "litellm"]

import parts
from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types


async def run(mode=StreamingMode.NONE, **fields):
    model = LiteLlm(model=f"openai/{parts.MODEL}", api_base=parts.BASE_URL, api_key=parts.KEY)
    agent = LlmAgent(name="adder", model=model, instruction=parts.INSTRUCTIONS, **fields)
    runner = InMemoryRunner(agent, app_name="adding")
    session = await runner.session_service.create_session(app_name="adding", user_id="u")
    asked = types.Content(role="user", parts=[types.Part(text=parts.QUESTION)])
    events = runner.run_async(
        user_id="u", session_id=session.id, new_message=asked, run_config=RunConfig(streaming_mode=mode)
    )
    return [each async for each in events][-1].content.parts[0].text


parts.play(
    tools=lambda: run(tools=[parts.add]),
    stream=lambda: run(StreamingMode.SSE, tools=[parts.add]),
    structured=lambda: run(output_schema=parts.Total),
)
