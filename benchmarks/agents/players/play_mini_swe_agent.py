"""mini-swe-agent: its default agent on litellm, with a shell as its tool."""
# /// script
# dependencies = ["mini-swe-agent"]
# ///

import parts
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel


def tools():
    model = LitellmModel(model_name=f"openai/{parts.MODEL}", cost_tracking="ignore_errors")
    agent = DefaultAgent(
        model,
        LocalEnvironment(),
        system_template=parts.INSTRUCTIONS,
        instance_template="{{task}} Print the sum in the shell.",
        step_limit=2,
    )
    return agent.run(parts.QUESTION)


parts.play(tools=tools)
