"""Agents that write code: aider, whose command streams by itself, on a file, and mini-swe-agent, with a shell."""
# players:
# aider = ["aider-chat"]
# mini_swe_agent = ["mini-swe-agent"]

import subprocess
import sys
import tempfile
from pathlib import Path

import parts


def aider(*options):
    command = [sys.executable, "-m", "aider", "--model", f"openai/{parts.MODEL}", "--yes-always", "--no-git"]
    command += ["--no-check-update", "--no-analytics", "--no-show-model-warnings", "--no-show-release-notes"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sum.txt").write_text("1 + 2\n")
        done = subprocess.run(
            [*command, *options, "--message", parts.QUESTION, "sum.txt"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    return done.stdout[-200:]


def mini_swe_agent():
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    model = LitellmModel(model_name=f"openai/{parts.MODEL}", cost_tracking="ignore_errors")
    agent = DefaultAgent(
        model,
        LocalEnvironment(),
        system_template=parts.INSTRUCTIONS,
        instance_template="{{task}} Print the sum in the shell.",
        step_limit=2,
    )
    return agent.run(parts.QUESTION)


if parts.NAME == "aider":
    parts.play(stream=aider, plain=lambda: aider("--no-stream"))
else:
    parts.play(tools=mini_swe_agent)
