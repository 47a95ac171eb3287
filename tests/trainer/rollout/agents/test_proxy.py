"""The proxy as a program of its own, in front of a model that it runs itself; its records are read back."""

import asyncio
import json
import signal
import socket
import subprocess
import time
from contextlib import asynccontextmanager, contextmanager

import httpx
import openai
import pytest

from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.run_files import WriteError, output_lock
from rollgym.trainer.models.load import save_model
from rollgym.trainer.models.tiny import TinyPolicySettings, build_tiny_model
from rollgym.trainer.records.trajectory import Trajectory, TrajectoryOutcome
from rollgym.trainer.rollout.agents.endpoint import agents_app
from rollgym.trainer.rollout.agents.http import serve_app
from rollgym.trainer.rollout.agents.proxy import ProxySessions
from rollgym.trainer.run.agent_proxy import main, opened_policy, parse
from tests.support.agent_policy import (
    ScriptedPolicy,
    endpoint_of,
    recorded_replies,
    service_of,
    tool_tokenizer,
)
from tests.support.inference_server.running import InferenceServer
from tests.support.processes import running, start_agent_proxy


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = tool_tokenizer()
    shape = TinyPolicySettings(len(tokenizer), hidden_size=16, layers=1, heads=2, max_length=1024)
    save_model(build_tiny_model(shape, 0), tokenizer, folder)
    return folder


class Proxy:
    """A running `roll-agent-proxy`."""

    def __init__(self, model, output):
        words = ["--model", str(model), "--port", "0", "--output", str(output), "--max-new-tokens", "8"]
        self.output = output
        self.process = start_agent_proxy(*words)
        line = self.process.stdout.readline()
        assert "serving on" in line, line
        self.url = line.split()[3].rstrip(",")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def records(self):
        return [Trajectory.from_record(json.loads(line)) for line in self.output.read_text().splitlines()]


def ask(base_url, key="any", **fields):
    with openai.OpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="policy",
            messages=[{"role": "user", "content": "Hi"}],
            logprobs=True,
            extra_body={"return_token_ids": True},
            **fields,
        )
        return raw.parse()


def test_names_are_sessions_and_records_are_read_back(model, tmp_path):
    with Proxy(model, tmp_path / "records.jsonl") as proxy:
        first = ask(f"{proxy.url}/s/run-1/v1")
        ask(f"{proxy.url}/v1", key="run-2")
        with httpx.Client(base_url=f"{proxy.url}/s/run-1") as http:
            assert http.post("end", json={"reward": 0.5, "success": True}).status_code == 200
            assert http.post("v1/chat/completions", json={}).status_code == 410
        (record,) = proxy.records()
        assert (record.outcome, record.total_reward) == (TrajectoryOutcome.SOLVED, 0.5)
        assert record.task.options == {"session": "run-1"}
        (segment,) = record.segments
        assert segment.ids == [*first.prompt_token_ids, *first.choices[0].token_ids]
        sampled = [
            value for value, mask in zip(segment.behaviour_logprobs, segment.action_mask, strict=True) if mask
        ]
        assert sampled == [each.logprob for each in first.choices[0].logprobs.content]
        greedy = [ask(f"{proxy.url}/s/{name}/v1", temperature=0).choices[0].token_ids for name in "ab"]
        assert greedy[0] == greedy[1], "an agent's own sampling is heeded"
        assert ask(f"{proxy.url}/s/c/v1", max_tokens=2).usage.completion_tokens <= 2
        # Two sessions that ask the same draw from streams of their own.
        proxy.process.send_signal(signal.SIGTERM)
        assert proxy.process.wait(20) == 0
        second = proxy.records()[1]
        assert second.detail == "the proxy stopped"
        assert second.segments[0].ids != segment.ids


def test_a_port_in_use_is_told_in_a_line_and_loading_draws_no_bars(model, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [
            "--model",
            str(model),
            "--port",
            str(taken.getsockname()[1]),
            "--output",
            str(tmp_path / "out"),
        ]
        with running(start_agent_proxy(*words, stderr=subprocess.PIPE)) as process:
            output, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    (line,) = [each for each in errors.splitlines() if "Warning" not in each]
    assert line.startswith("roll-agent-proxy: agents: cannot listen on 127.0.0.1 port")
    assert "name another port (0 takes a free one)" in line
    # What was never open has no episodes to tell of.
    assert "episodes written" not in output


@asynccontextmanager
async def _serving(sessions):
    app = agents_app(sessions, 1 << 20, sessions.routes())
    async with serve_app(app, "127.0.0.1", 0) as url, httpx.AsyncClient(base_url=url) as http:
        yield http


async def test_with_a_token_sessions_open_on_request_only():
    policy = ScriptedPolicy(tool_tokenizer(), ["Hello"])
    records = []
    sessions = ProxySessions(service_of(policy, tool_tokenizer()), records.append, "secret", 0.2, time.time)
    async with _serving(sessions) as http:
        assert (await http.get("/s/anything/v1/models")).status_code == 404
        assert (await http.post("/sessions")).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert (await http.post("/sessions", headers=headers, content=b"[")).status_code == 400
        asked = {"task": {"question": "2 + 2"}}
        opened = (await http.post("/sessions", headers=headers, json=asked)).json()
        body = {"messages": [{"role": "user", "content": "Hi"}]}
        assert (await http.post(f"{opened['base_url']}/chat/completions", json=body)).status_code == 200
        async with asyncio.timeout(20):
            while not records:
                await asyncio.sleep(0.02)
        assert (await http.get(f"/s/{opened['key']}/v1/models")).status_code == 410
    record = Trajectory.from_record(records[0])
    assert record.detail == "nobody used it any more"
    assert record.task.options == {"session": "", "question": "2 + 2"}


async def test_a_disk_that_is_full_loses_no_record():
    policy = ScriptedPolicy(tool_tokenizer(), ["a", "b"])
    records, full = [], [True]

    def write(record):
        if full[0]:
            raise WriteError("no space left")
        records.append(record)

    sessions = ProxySessions(service_of(policy, tool_tokenizer()), write, None, 60.0, time.time)
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    async with _serving(sessions) as http:
        for name in ("a", "b"):
            await http.post(f"/s/{name}/v1/chat/completions", json=body)
        refused = await http.post("/s/a/end")
        assert (refused.status_code, "no space left" in refused.text) == (502, True)
        full[0] = False
        assert (await http.post("/s/b/end")).status_code == 200
    assert [record["task"]["options"]["session"] for record in records] == ["a", "b"]


def test_two_proxies_do_not_write_one_file(model, tmp_path, capfd):
    output = tmp_path / "records.jsonl"
    output.write_text('{"whole": 1}\n{"half')  # which another one is about to end
    with output_lock(output):
        assert main(["--model", str(model), "--port", "0", "--output", str(output)]) == 2
    said = capfd.readouterr().err
    assert said.startswith(f"roll-agent-proxy: --output {output} is in use by another process")
    assert output.read_text().endswith("half"), "what another one writes is left alone"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no/such/folder/here"], "--model: there is no folder no/such/folder/here"),
        (["--host", "0.0.0.0"], "set ROLLGYM_PROXY_TOKEN"),
        (["--port", "80400"], "argument --port: '80400' is no port"),
        (["--temperature", "-1"], "--temperature is from 0"),
        (["--max-new-tokens", "0"], "no whole number above 0"),
        (["--template-kwargs", "[]"], "no JSON object"),
        (["--output", "/no/such/folder/x.jsonl"], "/no/such/folder/x.jsonl"),
    ],
)
def test_mistakes_are_a_line(model, arguments, message, capfd):
    try:
        code = main(["--model", str(model), "--port", "0", "--output", "/dev/null", *arguments])
    except SystemExit as end:
        code = end.code
    said = capfd.readouterr().err
    assert code == 2
    assert message in said
    assert said.count("\n") == 1


@contextmanager
def _ending_with(message):
    with pytest.raises(ConfigError, match=message):
        yield


async def test_what_the_server_behind_cannot_do_is_said_at_the_start(model, capsys):
    def words(server, *more):
        return parse(["--model", str(model), "--upstream", server.url, *more])

    with (
        InferenceServer("vllm", model=model, api_key="secret") as server,
        _ending_with("set ROLLGYM_UPSTREAM_KEY"),
    ):
        async with opened_policy(words(server)):
            pass
    with InferenceServer("vllm", max_length=64) as server:
        async with opened_policy(words(server)) as service:
            assert service.max_length == 64, "the server's rows are shorter than the model's"
        assert "processed_logprobs" in capsys.readouterr().out
        with _ending_with("--max-length 100: .* takes rows of up to 64 tokens"):
            async with opened_policy(words(server, "--max-length", "100")):
                pass
        with _ending_with("processed_logprobs"):
            async with opened_policy(words(server, "--temperature", "0.7")):
                pass


async def test_a_prompt_longer_than_the_servers_rows_is_the_agents_fault(model):
    with InferenceServer("vllm", max_length=64) as server:
        words = ["--model", str(model), "--upstream", server.url, "--max-new-tokens", "8"]
        async with opened_policy(parse(words)) as service, endpoint_of(service) as endpoint:
            key, _ = endpoint.open()
            url = f"{endpoint.url}/s/{key}/v1/chat/completions"
            async with httpx.AsyncClient() as http:
                asked = {"messages": [{"role": "user", "content": "Hi " * 200}]}
                refused = await http.post(url, json=asked)
                assert (refused.status_code, refused.json()["error"]["code"]) == (
                    400,
                    "context_length_exceeded",
                )
                asked = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0.5}
                refused = await http.post(url, json=asked)
                assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_value")
                assert "processed_logprobs" in refused.json()["error"]["message"]


@pytest.mark.parametrize("dialect", ["vllm", "sglang"])
async def test_in_front_of_a_server_the_record_is_the_servers(model, dialect, monkeypatch):
    monkeypatch.setenv("ROLLGYM_UPSTREAM_KEY", "secret")
    with InferenceServer(dialect, model=model, api_key="secret") as server:
        words = [
            "--model",
            str(model),
            "--upstream",
            server.url,
            "--dialect",
            dialect,
            "--max-new-tokens",
            "8",
        ]
        async with opened_policy(parse(words)) as service, endpoint_of(service) as endpoint:
            key, session = endpoint.open()
            async with openai.AsyncOpenAI(base_url=f"{endpoint.url}/s/{key}/v1", api_key="x") as agent:
                messages = [{"role": "user", "content": "Hi"}]
                for _ in range(3):
                    got = await agent.chat.completions.create(model="policy", messages=messages)
                    said = {"role": "assistant", "content": got.choices[0].message.content}
                    messages += [said, {"role": "user", "content": "more"}]
        drawn = server.log()["replies"][-3:]  # before them the client has tried out what the server can do
    recorded = recorded_replies(session.trajectory)
    assert [(prompt, ids) for prompt, ids, _, _ in recorded] == [
        (reply["prompt_ids"], reply["token_ids"]) for reply in drawn
    ]
    for (_, _, logprobs, _), reply in zip(recorded, drawn, strict=True):
        assert logprobs == pytest.approx(reply["processed_logprobs"], abs=1e-6)
    assert len(session.trajectory.segments) == 1
