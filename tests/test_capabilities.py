"""A package of somebody else's adds one of each kind, and it works as ours do: in settings, runs and servers."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
import websockets
import yaml

from rollgym.clients.audit.baselines import audit_baselines
from rollgym.clients.audit.card import CardVerdict
from rollgym.clients.checks.conformance import CHECKS
from rollgym.clients.checks.report import Status
from rollgym.clients.checks.target import CheckTarget
from rollgym.clients.cli.main import main as roll_env
from rollgym.clients.client.env import RemoteEnv
from rollgym.env_server.common.settings import ConfigurationError
from rollgym.env_server.process.embedding import create_app
from rollgym.envs.pages import main as environment_pages
from rollgym.extras import extra_of
from rollgym.trainer.algorithms.advantage_settings import ADVANTAGES
from rollgym.trainer.algorithms.group_filters import FILTERS
from rollgym.trainer.algorithms.surrogates import SURROGATES
from rollgym.trainer.config.backend import BACKENDS
from rollgym.trainer.config.checks import check_broadcast
from rollgym.trainer.config.inference import INFERENCE_SERVERS
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.config.output import TRACKERS, TrackingSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.kinds import kind_of
from rollgym.trainer.inference.base import GenerationRequest, SamplingParams
from rollgym.trainer.inference.server_client.client import ServerClient
from rollgym.trainer.inference.servers.launch import require_program
from rollgym.trainer.learn.tracking import RunIdentity, open_trackers
from rollgym.trainer.run.agent_proxy import main as agent_proxy
from rollgym.trainer.run.layout import check_combinations
from rollgym.trainer.run.memory import memory_plan, model_shape, remedies
from tests.support.audits import Auditor
from tests.support.inference_server.running import InferenceServer
from tests.support.other_package import GROUPS_OF_RUNS, GROUPS_OF_SERVERS, install
from tests.support.wire import Server

ROOT = Path(__file__).parents[1]
ALGORITHMS = '''
from typing import ClassVar, Literal

from rollgym.trainer.algorithms.advantage import Advantage
from rollgym.trainer.algorithms.group_filters import Filter
from rollgym.trainer.algorithms.surrogates import Surrogate


class Signs(Advantage):
    """Whether an episode scored anything."""

    kind: Literal["signs"]
    unit_of_credit: ClassVar[str] = "trajectory"
    formula: ClassVar[str] = "`height` or `-height`"
    height: float = 1.0

    def of_turns(self, credit):
        return [[self.height if sum(turns) > 0 else -self.height for _ in turns] for turns in credit.rewards]


class Plain(Surrogate):
    """The policy gradient, scaled."""

    kind: Literal["plain"]
    formula: ClassVar[str] = "`-s A lp`"
    has_ratio: ClassVar[bool] = False
    scale: float = 1.0

    def loss(self, inputs):
        from rollgym.trainer.algorithms.losses import reinforce_surrogate

        return reinforce_surrogate(self.scale * inputs.logprobs, inputs.advantages)


class First(Filter):
    """The first groups."""

    kind: Literal["first"]
    keeps: ClassVar[str] = "the first `count` groups"
    count: int = 1

    def kept(self, groups):
        return set([*groups.sizes][: self.count])
'''
RUNS = '''
import json
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from rollgym.trainer.run.layout import Fsdp2Maker
from rollgym.trainer.config.backend import BACKENDS, MemoryLayout
from rollgym.trainer.config.inference import INFERENCE_SERVERS
from rollgym.trainer.config.output import TrackerSettings


class MirrorMaker(Fsdp2Maker):
    """Torch's own sharding, and a word about it."""

    def trained(self, settings, head, group, schedule):
        Path(settings.output_dir, "mirrored").touch()
        return super().trained(settings, head, group, schedule)


MAKER = MirrorMaker()


def refusals(settings):
    if settings.model.lora is not None:
        yield "model.lora: backend.kind mirror trains no adapters: leave it out"


MIRROR = replace(BACKENDS[1], name="mirror", maker="others_of_runs:MAKER", refusals=refusals)
ALONE = replace(BACKENDS[0], name="alone", refusals=refusals, memory=MemoryLayout(weights="copied"))
SAMPLER = replace(INFERENCE_SERVERS[0], name="sampler", title="Sampler", group="", inexact="it rounds")


class Notes(TrackerSettings):
    """A file of notes."""

    name: ClassVar[str] = "notes"
    board: ClassVar[str] = "others_of_runs:NotesBoard"
    file: str = "notes.jsonl"


class NotesBoard:
    """The file."""

    def __init__(self, settings, run):
        self._path = run.directory / settings.file

    def log(self, step, values):
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\\n")

    def close(self):
        pass
'''
CALLS = """
import json

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.formats.calls import CallFault, CallFormat, Candidate, collect, parse_json


def read(text, schemas, strict):
    index = text.find("CALL ")
    if index < 0:
        return collect(text, [])

    def call():
        name, _, arguments = text[index + 5 :].partition(" ")
        return ToolCall(name, parse_json(arguments, strict=strict))

    return collect(text, [Candidate(index, len(text), call)])


def write(calls, content, schemas):
    if len(calls) != 1:
        raise ValueError("one call at a time")
    return content + f"CALL {calls[0].name} {json.dumps(dict(calls[0].arguments))}"


SHOUTED = CallFormat(
    "shouted", read, write, lambda schemas: "Write CALL, a name and JSON.", mark="CALL ", template_marks=("CALL {{",)
)
"""
SERVERS = """
from fastapi import Response
from pydantic import BaseModel

from rollgym.clients.protocol.upstream_protocols import UpstreamProtocol
from rollgym.env_server.gateway.upstream.base import EnvironmentSpec, Upstream
from rollgym.env_server.http.call_routes import Call, PathId, call_router
from rollgym.env_server.http.openapi import Tag, problems
from rollgym.env_server.protocols.face import Face, SocketRoute
from rollgym.env_server.protocols.operating import operate
from rollgym.env_server.workers.base import StepOutcome


class ParrotUpstream(Upstream):
    protocol = "parrot"

    def __init__(self, word):
        self._word = word

    @classmethod
    def connect(cls, endpoint):
        return cls(endpoint.env_id)

    async def spec(self):
        return EnvironmentSpec(description="It repeats.")

    async def make(self, key, kwargs, *, timeout):
        spec = EnvironmentSpec()
        return spec.action_space, spec.observation_space

    async def reset(self, key, seed, options, *, timeout):
        return self._word, {}

    async def step(self, key, action, *, timeout):
        return StepOutcome(action, 1.0, True, False, {})

    async def close(self, key):
        pass

    async def shutdown(self):
        pass


PARROT = UpstreamProtocol(
    name="parrot", speakers="parrots", upstream="others_of_servers:ParrotUpstream", free_ids=True
)
HOLLOW = UpstreamProtocol(name="hollow", speakers="nobody", upstream="others_of_servers:Cry")
CALLS = call_router()


class Cry(BaseModel):
    cry: str


@CALLS.get("/aviary/{env_id}/cry", response_model=Cry, responses=problems("unknown_env"))
async def aviary_cry(call: Call, env_id: PathId) -> Response:
    "Aviary: what an environment is about."
    described = await operate(call.services.operations, call.context, "envs", {"env_id": env_id})
    return call.answer({"cry": described["description"]})


async def sing(services, scope, receive, send):
    await receive()
    await send({"type": "websocket.accept"})
    await send({"type": "websocket.send", "text": f"la {scope['path_params']['env_id']}"})
    await send({"type": "websocket.close"})


AVIARY = Face(
    name="aviary",
    clients="birds",
    address="/aviary/{env_id}",
    page="birds.md",
    tag=Tag("/aviary", "Aviary", "For birds.", "birds.md"),
    calls=CALLS.routes,
    sockets=[SocketRoute("/aviary/{env_id}/ws", "a song", sing)],
)
CUCKOO = Face(
    name="cuckoo",
    clients="cuckoos",
    address="/v1",
    page="birds.md",
    sockets=[SocketRoute("/v1/envs/{its}", "an egg", sing)],
)
MAGPIE = Face(
    name="magpie",
    clients="magpies",
    address="/console",
    page="birds.md",
    sockets=[SocketRoute("/console/written_call", "a ring", sing)],
)
"""
OF_SERVERS = {
    "rollgym.upstream_protocols": {
        "parrot": "others_of_servers:PARROT",
        "hollow": "others_of_servers:HOLLOW",
        "torn": "others_of_servers:sing",
    },
    "rollgym.faces": {
        "aviary": "others_of_servers:AVIARY",
        "cuckoo": "others_of_servers:CUCKOO",
        "magpie": "others_of_servers:MAGPIE",
        "torn": "others_of_servers:sing",
    },
}
ENVIRONMENT = """
import rollgym


def tasks(draw):
    first, second = map(int, draw.integers(2, 6, size=2))
    return {"question": f"{first} + {second}?", "answer": str(first + second)}


@rollgym.verifier(
    tasks=tasks,
    example_reply="It is {answer}.",
    baselines={"random": 0, "constant action": 1, "echo": 0},
)
def sums(response, task):
    "Sums of two numbers."
    return response == f"It is {task['answer']}."
"""
OF_CALLS = {"rollgym.call_formats": {"shouted": "others_of_calls:SHOUTED", "torn": "others_of_calls:read"}}
OF_RUNS = {
    "rollgym.backends": {"mirror": "others_of_runs:MIRROR", "alone": "others_of_runs:ALONE"},
    "rollgym.inference": {"sampler": "others_of_runs:SAMPLER"},
    "rollgym.trackers": {"notes": "others_of_runs:Notes"},
}
ENTRIES = {
    "rollgym.advantages": {"signs": "others:Signs"},
    "rollgym.surrogates": {"plain": "others:Plain"},
    "rollgym.filters": {"first": "others:First"},
}
CHOSEN = (
    "algorithm.advantage={kind: signs, height: 2}",
    "algorithm.surrogate={kind: plain, scale: 0.5}",
    "algorithm.filter={kind: first}",
    "backend.kind=mirror",
    "tracking.others.notes={file: told.jsonl}",
)
RUN = (
    "tasks=[{env_id: FrozenLake-v0, kwargs: {size: 4, split: train, max_episode_steps: 4}}]",
    "prompt={context: single_turn, instruction: none}",
    "rollout={groups_per_step: 2, group_size: 2, max_turns: 4, max_new_tokens: 3}",
    "model={hidden_size: 16, layers: 1, heads: 2, max_length: 96}",
    "tracking={tensorboard: false}",
    "evaluation.every=0",
    "steps=1",
)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A folder that the commands below find modules and packages in."""
    site = tmp_path / "site"
    site.mkdir()
    install(site, "others", ALGORITHMS, ENTRIES)
    install(site, "others_of_runs", RUNS, OF_RUNS)
    install(site, "others_of_calls", CALLS, OF_CALLS)
    install(site, "others_of_servers", SERVERS, OF_SERVERS)
    install(site, "sums", ENVIRONMENT, {"rollgym.environments": {"Sums-v0": "sums:sums"}})
    yield site
    for name in (
        "others",
        "others_of_runs",
        "others_of_calls",
        "others_of_servers",
        "sums",
        "more",
        "broken",
    ):
        sys.modules.pop(name, None)


def roll_train(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rollgym.trainer.cli", *words],
        env=os.environ | {"PYTHONPATH": str(site)},
        cwd=site.parent,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_a_run_is_made_of_parts_of_another_package(site: Path) -> None:
    done = roll_train(site, *RUN, *CHOSEN, "output_dir=run")
    assert done.returncode == 0, done.stderr
    written = yaml.safe_load((site.parent / "run" / "config.yaml").read_text())["algorithm"]
    assert (written["advantage"]["kind"], written["advantage"]["height"]) == ("signs", 2.0)
    assert written["surrogate"] == {"kind": "plain", "scale": 0.5}
    assert written["filter"] == {"kind": "first", "count": 1}
    numbers = (site.parent / "run" / "metrics.jsonl").read_text()
    assert '"batch/advantage_max": 2.0' in numbers
    assert '"rollout/groups_kept": 1' in numbers
    assert (site.parent / "run" / "mirrored").exists(), "a rank found the package, too"
    told = json.loads((site.parent / "run" / "told.jsonl").read_text().splitlines()[0])
    assert (told["step"], told["batch/advantage_max"]) == (1, 2.0)
    # The settings that it wrote are understood again.
    again = roll_train(site, "--config", "run/config.yaml", "--dry-run")
    assert again.returncode == 0, again.stderr
    assert yaml.safe_load(again.stdout)["algorithm"] == written


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("algorithm.advantage={kind: sings}", "there is no kind 'sings'; did you mean signs?"),
        (
            "algorithm.advantage={kind: signs, heigth: 2}",
            "algorithm.advantage: unknown key 'heigth'; did you mean 'height'?",
        ),
        ("algorithm.advantage={kind: signs, height: no}", "algorithm.advantage.height"),
        ("algorithm={advantage: {kind: signs}, critic: {}}", "advantage 'signs' never reads a critic"),
        ("algorithm={surrogate: {kind: plain}, epochs: 2}", "surrogate 'plain' has no ratio"),
        ("backend.kind=miror", "backend.kind: there is no kind 'miror'; did you mean mirror?"),
        ("backend={kind: mirror, zero_stage: 2}", "not by 'mirror': leave it out"),
        ("inference.kind=samplr", "inference.kind: there is no kind 'samplr'; did you mean sampler?"),
        ("inference.kind=sampler", "kind 'sampler' needs either urls of servers that run, or launch"),
        (
            "agents.tool_format=shout",
            "agents.tool_format: there is no such format of calls; did you mean shouted?",
        ),
        (
            "agents.tool_format=torn",
            "the package others_of_calls: others_of_calls:read is not a CallFormat of this name",
        ),
        ("tracking.others={note: {}}", "there is no tracker 'note' of another package; did you mean notes?"),
        ("tracking.others={wandb: {}}", "it is tracking.wandb"),
        ("tracking.others={notes: {fil: a}}", "unknown key 'fil'; did you mean 'file'?"),
    ],
)
def test_settings_of_its_kinds_are_checked_as_ours_are(
    word: str, said: str, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(site))
    with pytest.raises(ConfigError) as refused:
        load_settings(None, [*RUN, word])
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("code", "path", "said"),
    [
        ("import nowhere", "broken:Kind", "it imports 'nowhere', which is not installed"),
        ("x = 1", "broken:Kind", "module 'broken' has no attribute 'Kind'"),
        ("Kind = dict", "broken:Kind", "broken:Kind is no subclass of rollgym.trainer.algorithms.advantage"),
        (
            "from rollgym.trainer.algorithms.advantage_settings import HgpoAdvantage as Kind",
            "broken:Kind",
            "says `kind: Literal['hgpo']`; the entry point must have the same name",
        ),
    ],
)
def test_a_broken_package_is_named_where_it_is_asked_for_and_nowhere_else(
    code: str, path: str, said: str, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "broken", code, {"rollgym.advantages": {"torn": path}})
    monkeypatch.syspath_prepend(str(site))
    assert load_settings(None, [*RUN, "algorithm.advantage={kind: hgpo}"]).algorithm.advantage.kind == "hgpo"
    with pytest.raises(ConfigError) as refused:
        load_settings(None, [*RUN, "algorithm.advantage={kind: torn}"])
    assert "kind 'torn' of the package broken is broken" in str(refused.value)
    assert said in str(refused.value)


def test_what_its_back_end_refuses_is_said_before_anything_is_begun(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(site))
    settings = load_settings(None, [*RUN, "backend.kind=mirror", "model.lora={}"])
    with pytest.raises(ConfigError, match=r"model\.lora: backend\.kind mirror trains no adapters"):
        check_combinations(settings)


def test_its_back_end_without_dimensions_has_no_ranks(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))
    assert load_settings(None, [*RUN, "backend.kind=alone"]).backend.in_process
    with pytest.raises(ConfigError, match="kind 'alone' computes in the run's own process"):
        load_settings(None, [*RUN, "backend={kind: alone, ranks: 2}"])


def test_its_back_end_says_how_models_lie_on_devices(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))
    weights = []
    for kind in ("torch", "alone"):
        settings = load_settings(None, [*RUN, f"backend.kind={kind}", "model.dtype=fp32"])
        shape = model_shape(settings.model)
        weights.append(memory_plan(settings, shape, 10**9).parts[0].need.weights / shape.parameters.total)
    assert weights == [4, 8], "the second has a copy of its own beside fp32 weights"


def test_what_its_back_end_refuses_is_not_advised_where_memory_is_short(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(site))
    for kind, advised in (("torch", True), ("alone", False)):
        settings = load_settings(
            None, [*RUN, "model.hidden_size=4096", "model.layers=16", f"backend.kind={kind}"]
        )
        found = remedies(settings, model_shape(settings.model), 10**9)
        assert ("model.lora={}" in [remedy.setting for remedy in found]) is advised


def test_its_inference_servers_are_refused_what_they_do_not_take(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(site))
    server = "inference={kind: sampler, urls: ['http://127.0.0.1:9']}"
    check_broadcast(load_settings(None, [*RUN, server]))
    settings = load_settings(None, [*RUN, server, "weights.transport=broadcast"])
    with pytest.raises(ConfigError, match="broadcast: Sampler takes no broadcasts: set it to disk"):
        check_broadcast(settings)


def test_a_program_of_its_servers_that_is_missing_is_installed_by_its_own_name(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(site))
    inference = load_settings(None, [*RUN, "inference={kind: sampler, launch: {}}"]).inference
    assert inference.launch is not None
    with pytest.raises(
        ConfigError, match="sampler is not installed beside the trainer: pip install sampler, name"
    ):
        require_program(inference, inference.launch)


def test_its_format_of_calls_is_chosen_by_name(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))
    settings = load_settings(None, [*RUN, "rollout.agent=python agent.py", "agents.tool_format=shouted"])
    assert settings.agents.tool_format == "shouted"


async def test_its_inference_servers_are_asked_and_chosen_by_name(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(site))
    with InferenceServer("vllm") as server:
        async with ServerClient(server.url, "sampler") as client:
            result = await client.generate(GenerationRequest("r", [72, 101], SamplingParams(3), 1))
    assert len(result.token_ids) == 3
    with pytest.raises(SystemExit):
        agent_proxy(["--help"])
    assert "{vllm,sglang,sampler}" in capsys.readouterr().out


def test_its_format_of_calls_is_read_written_and_known_by_a_template(tmp_path: Path) -> None:
    install(tmp_path, "calls", CALLS, {"rollgym.call_formats": {"shouted": "calls:SHOUTED"}})
    program = """
from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.formats.table import written_calls
from rollgym.clients.replies.formats.table import declared_tools
from rollgym.envs.tools.tool_use import ToolUseEnv
from rollgym.trainer.rollout.agents.replies import format_of_template, has_mark, read_reply

print(*(format_of_template(text) for text in ("CALL {{ name }} <tool_call>", "<tool_call>", "")))
print(read_reply('so: CALL add {"a": 1}', "shouted").calls, has_mark("CALL add", "shouted"))
env = ToolUseEnv(call_format="shouted")
prompt, info = env.reset(seed=0)
name = declared_tools(info)[0].name
observation = env.step(written_calls("shouted", [ToolCall(name, {"none": 1})]))[0]
print("Write CALL, a name and JSON." in info["instruction"], name in observation)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "shouted hermes hermes",
        "(ApiToolCall(name='add', arguments='{\"a\": 1}'),) True",
        "True True",
    ], done.stderr


@pytest.fixture
def gateway(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A gateway where the package is installed, with its face."""
    monkeypatch.setenv("PYTHONPATH", str(site))
    with Server("--gateway", "--allow-network", "loopback", "--face", "aviary") as server:
        yield server


def register(gateway: Server, protocol: str) -> httpx.Response:
    body = {"env_id": "Bird", "url": "http://127.0.0.1:9", "protocol": protocol}
    return httpx.post(f"{gateway.url}/v1/envs", json=body, timeout=60)


def test_a_server_that_speaks_its_protocol_is_registered_and_played(gateway: Server, site: Path) -> None:
    words = ("register", "Bird", "http://127.0.0.1:9", "--protocol", "parrot", "--upstream-env-id", "a bird!")
    done = subprocess.run(
        [sys.executable, "-m", "rollgym.clients.cli.main", *words, "--gateway", gateway.url],
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with closing(RemoteEnv(gateway.url, "Bird")) as env:
        assert env.metadata["protocol"] == "parrot"
        assert env.reset(seed=1)[0] == "a bird!"
        assert env.step("hello")[:4] == ("hello", 1.0, True, False)
    document = httpx.get(f"{gateway.url}/openapi.json", timeout=60).json()
    assert document["components"]["schemas"]["RegisterRequest"]["properties"]["protocol"]["enum"] == [
        *("rollgym", "openenv", "gem", "http"),
        *("hollow", "parrot", "torn"),
    ]


def test_a_protocol_that_cannot_be_spoken_is_refused_with_the_reason(gateway: Server) -> None:
    for protocol, said in {
        "torn": "of the package others_of_servers: others_of_servers:sing is not an UpstreamProtocol of this name",
        "hollow": "'hollow': others_of_servers:Cry is no Upstream of this name",
        "parot": "should be 'rollgym', 'openenv', 'gem', 'http', 'hollow', 'parrot' or 'torn'",
    }.items():
        refused = register(gateway, protocol)
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request")
        (error,) = refused.json()["errors"]
        assert error["field"] == "protocol"
        assert said in error["reason"]


def test_a_gateway_without_the_package_names_the_protocols_that_it_has() -> None:
    with Server("--gateway", "--allow-network", "loopback") as server:
        refused = register(server, "parrot")
    assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request")
    assert refused.json()["errors"] == [
        {"field": "protocol", "reason": "Input should be 'rollgym', 'openenv', 'gem' or 'http'"}
    ]


def test_its_protocol_stands_in_the_help_of_commands(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(site))
    with pytest.raises(SystemExit):
        roll_env(["register", "--help"])
    assert "rollgym, openenv, gem, http, hollow, parrot, torn (default" in " ".join(
        capsys.readouterr().out.split()
    )
    words = ("register", "Bird", "http://127.0.0.1:9", "--gateway", "http://127.0.0.1:9")
    with pytest.raises(SystemExit):
        roll_env([*words, "--protocol", "parot"])
    assert "there is no 'parot': did you mean parrot?" in capsys.readouterr().err
    assert "others_of_servers" not in sys.modules, "names are known without the package's code"


async def test_its_face_answers_clients_beside_ours(gateway: Server) -> None:
    assert register(gateway, "parrot").status_code == 201
    async with gateway.http() as client:
        assert (await client.get("/aviary/Bird/cry")).json() == {"cry": "It repeats."}
        missing = await client.get("/aviary/None/cry")
        assert (missing.status_code, missing.json()["code"]) == (404, "unknown_env")
        assert (await client.options("/aviary/Bird/cry")).headers["allow"] == "GET, HEAD, OPTIONS"
        document = (await client.get("/openapi.json")).json()
        assert (await client.get("/list_environments")).json() == ["Bird"]
    described = document["paths"]["/aviary/{env_id}/cry"]["get"]
    assert described["tags"] == ["Aviary"]
    assert described["description"] == "Aviary: what an environment is about. See birds.md."
    assert document["paths"]["/aviary/{env_id}/ws"]["get"]["summary"] == "WebSocket: a song"
    assert [tag["name"] for tag in document["tags"]][-5:] == ["OpenEnv", "GEM", "MCP", "Aviary", "server"]
    async with websockets.connect(f"ws://127.0.0.1:{gateway.port}/aviary/Bird/ws") as socket:
        assert await socket.recv() == "la Bird"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("avairy", "face: no installed package adds 'avairy'; did you mean aviary?"),
        ("zoo", "face: no installed package adds 'zoo'; there are aviary, cuckoo, magpie, torn"),
        ("GEM", "face: every server has 'GEM': leave it out"),
        (
            "torn",
            "'torn' of the package others_of_servers: others_of_servers:sing is not a Face of this name",
        ),
        ("cuckoo", "face: 'cuckoo' has the path /v1/envs/{its}, which belongs to the server itself"),
        ("magpie", "face: 'magpie' has the path /console/written_call, which belongs to the server itself"),
    ],
)
async def test_a_face_that_cannot_be_had_is_named(
    name: str, said: str, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(site))
    with pytest.raises(ConfigurationError) as refused:
        async with create_app(builtin=False, face=[name]).lifespan():
            pass
    assert said in str(refused.value)


def test_its_environment_has_a_page_a_check_and_an_audit_that_read_what_it_declares(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(site))
    environment_pages(["--installed", str(site / "pages"), "--only", "Sums-v0"])
    assert "| [Sums-v0](Sums-v0.md) | Sums of two numbers. |" in (site / "pages" / "README.md").read_text()
    page = (site / "pages" / "Sums-v0.md").read_text()
    assert "[policy]\nIt is 9.\n\n[reward 1, terminated, success]" in page
    assert "| constant action | 100 % | 1 |" in page
    (site / "README.md").write_text("# Mine")
    with pytest.raises(FileExistsError, match=r"README\.md is no page"):
        environment_pages(["--installed", str(site)])
    (site / "mine").mkdir()
    (site / "mine" / "episodes.json").write_text("[1]")
    with pytest.raises(FileExistsError, match=r"episodes\.json is no record"):
        environment_pages(["--installed", str(site / "mine"), "--only", "Sums-v0"])
    for words in (
        ["--installed", str(site), "--only", "Sums-v0", "--play", "None-v0"],
        ["--only", "Maze-v0"],
    ):
        with pytest.raises(SystemExit):
            environment_pages(words)
    assert [(each.status, each.detail) for each in CHECKS["baselines"](CheckTarget("Sums-v0"))] == [
        (Status.PASS, "random, constant action, echo")
    ]
    monkeypatch.setenv("PYTHONPATH", str(site))
    with Auditor() as auditor:
        found = auditor.part("Sums-v0", audit_baselines)["as declared"]
    # Who says always the same solves nothing of the kind.
    assert (found.verdict, found.detail) == (
        CardVerdict.WARNING,
        "constant action solves 0 with a mean return of 0",
    )


def test_two_packages_of_one_name_are_told_apart(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "more", ALGORITHMS, {"rollgym.advantages": {"signs": "more:Signs"}})
    monkeypatch.syspath_prepend(str(site))
    with pytest.raises(ConfigError, match="kind 'signs' is in several packages, more and others: uninstall"):
        load_settings(None, [*RUN, "algorithm.advantage={kind: signs}"])


def test_a_package_adds_one_of_each_kind_here_and_a_page_says_how() -> None:
    assert {*ENTRIES, *OF_RUNS, *OF_CALLS} == GROUPS_OF_RUNS
    assert {*OF_SERVERS} == GROUPS_OF_SERVERS
    page = (ROOT / "docs" / "packages.md").read_text()
    groups = GROUPS_OF_RUNS | GROUPS_OF_SERVERS
    assert [group for group in groups if f"| `{group}` |" not in page] == []


@pytest.mark.parametrize(
    "package", [*(each.package for each in BACKENDS), *(each.name for each in INFERENCE_SERVERS)]
)
def test_what_a_kind_of_ours_needs_has_an_extra_of_its_name(package: str) -> None:
    if package:
        assert extra_of(package) == package, "pyproject.toml, rollgym/extras.py and docs/installation.md"


@pytest.mark.parametrize("name", [each.name for each in TRACKERS])
def test_a_tracker_of_ours_is_opened_by_its_name(name: str, tmp_path: Path) -> None:
    settings = TrackingSettings.model_validate({name: {}})
    assert [each.name for each in settings.chosen] == [name]
    boards = open_trackers(settings, RunIdentity(tmp_path, "run", {}, 0), lambda _: None)
    assert [each.name for each in boards] == [name]
    for each in boards:
        each.close(30.0)


@pytest.mark.parametrize("kinds", [ADVANTAGES, SURROGATES, FILTERS], ids=["advantage", "surrogate", "filter"])
def test_each_kind_of_ours_has_a_name_of_its_own(kinds: tuple[type, ...]) -> None:
    names = [kind_of(each) for each in kinds]
    assert all(names)
    assert len(set(names)) == len(names)
