"""Settings that cannot work are refused before anything is begun, with the key and what to do."""

import math
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

import rollgym.trainer.run.dry_run
from rollgym.extras import install_line
from rollgym.trainer.cli import main
from rollgym.trainer.config.checks import check_settings
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.strict import models_of
from tests.support.inference_server.running import InferenceServer
from tests.support.processes import env_server

MINIMAL = {"tasks": [{"env_id": "FrozenLake-v0"}]}
HOLDERS = {
    "tasks": [{"env_id": "FrozenLake-v0"}],
    "datasets": [{"path": "rows.jsonl", "verifier": "Math-v0"}],
    "warm_start": {"demonstrations": 5},
    "sft": {"data": [{"path": "rows.jsonl"}]},
    "dpo": {"data": [{"path": "rows.jsonl"}]},
    "reward": {"data": [{"path": "rows.jsonl"}]},
    "distill": {"data": [{"path": "rows.jsonl"}], "teachers": {"own": {"path": "model"}}},
    "data": [{"path": "rows.jsonl"}],
    "held_out": [{"path": "rows.jsonl"}],
    "reject": [{"measure": "k1"}],
}
"""What must be there for a setting inside of it to be there."""
NESTED = {
    "datasets.route": {"column": "kind", "verifiers": {"a": "Math-v0"}},
    "datasets.difficulty": {"column": "rate", "minimum": 0.0},
    "algorithm.correction": {"kind": "truncate"},
    "algorithm.reward.overlong": {"max_tokens": 10, "buffer_tokens": 5},
    "algorithm.critic": {},
    "algorithm.reward": {},
    "sft.expert": {"demonstrations": 5},
}
NAMED = {
    "sets": {"held_out": {"env_id": "FrozenLake-v0"}},
    "judges": {"own": {"model": "judge", "devices": [0], "command": ["vllm"]}},
    "teachers": {"own": {"path": "model"}},
}
"""Settings by names that users choose."""


def leaves(
    model: type[BaseModel], prefix: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, str | None]]:
    """All settings below a class: the path, the annotation, and the kind of the part that holds it."""
    for name, field in model.model_fields.items():
        inner = models_of(field)
        if not inner:
            yield (*prefix, name), field.annotation, kind_of(model)
        for each in inner:
            yield from leaves(each, (*prefix, name))


def kind_of(model: type[BaseModel]) -> str | None:
    field = model.model_fields.get("kind")
    return None if field is None else next(iter(typing.get_args(field.annotation)), None)


def types_in(annotation: Any) -> set[type]:
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return {annotation}
    return {kind for part in typing.get_args(annotation) for kind in types_in(part)}


def settings_with(path: tuple[str, ...], kind: str | None, value: object) -> dict[str, Any]:
    """The smallest settings in which a key has a value."""
    *parents, last = path
    values: dict[str, Any] = {"tasks": [{"env_id": "FrozenLake-v0"}]}
    node: Any = values
    for depth, name in enumerate(parents, start=1):
        place = ".".join(parents[:depth])
        if place in NESTED:
            node[name] = dict(NESTED[place])
            node.pop({"route": "verifier", "expert": "data"}.get(name, ""), None)
        elif name in HOLDERS:
            held = HOLDERS[name]
            node[name] = [dict(entry) for entry in held] if isinstance(held, list) else dict(held)
        elif name in NAMED:
            node[name] = {key: dict(entry) for key, entry in NAMED[name].items()}
        elif name == "dataset":
            node.pop("env_id", None)
            node[name] = dict(HOLDERS["datasets"][0])
        else:
            node.setdefault(name, {})
        node = node[name]
        node = node[0] if isinstance(node, list) else next(iter(node.values())) if name in NAMED else node
    if kind is not None:
        node["kind"] = kind
    node[last] = value
    return values


FIELDS = [
    (path, annotation, kind)
    for path, annotation, kind in leaves(RunSettings)
    if path[-1] != "kind" and "dataset" not in path[:-1]  # an evaluation set's data set is a data set
]
NUMBERS = [(path, kind) for path, annotation, kind in FIELDS if types_in(annotation) & {int, float}]
WRONG_NUMBERS = [math.nan, math.inf, -math.inf, True, False, 10**30, -(10**30), "many", [[]], {"a": 1}]
MAPPINGS = ("weights", "max_concurrent_by_environment")
MAY_BE_ZERO_OR_NEGATIVE = {
    "algorithm.advantage.baseline_shift",
    "algorithm.correction.reject.high",
    "algorithm.correction.reject.low",
    "algorithm.entropy_coefficient",
    "algorithm.filter.above",
    "algorithm.filter.below",
    "algorithm.reward.offset",
    "algorithm.reward.truncated_reward",
    "algorithm.reward.turn_low",
    "algorithm.reward.turn_high",
    "algorithm.selection.high",
    "algorithm.selection.low",
    "algorithm.surrogate.score_threshold",
    "datasets.difficulty.minimum",
    "datasets.difficulty.maximum",
}


def refusal(values: dict[str, Any]) -> str | None:
    """What loading says against settings; None where they are taken."""
    try:
        RunSettings.model_validate(values)
    except ValueError:
        pass
    else:
        return None
    import yaml

    with pytest.raises(ConfigError) as refused:
        load_settings(None, [f"{key}={yaml.safe_dump(value)}" for key, value in values.items()])
    return str(refused.value)


def test_the_walk_finds_the_settings():
    found = {".".join(path) for path, _, _ in FIELDS}
    assert {"steps", "optimizer.betas", "algorithm.advantage.epsilon", "tasks.weight"} <= found
    assert len(found) > 100
    assert len(NUMBERS) > 50


@pytest.mark.parametrize(
    ("path", "kind"), NUMBERS, ids=lambda value: ".".join(value) if isinstance(value, tuple) else value
)
def test_what_is_no_number_is_refused_with_its_key(path, kind):
    for wrong in WRONG_NUMBERS:
        # Where a setting is a list of numbers, one of them is wrong.
        value = [wrong, 0.5] if path[-1] == "betas" else {"a": wrong} if path[-1] in MAPPINGS else wrong
        if path[-1] in ("verifiers",):
            continue
        said = refusal(settings_with(path, kind, value))
        assert said is not None, f"{path} takes {value!r}"
        assert path[-1] in said, f"{said!r} does not name {path[-1]}"
        assert ".group." not in said
    if ".".join(path) not in MAY_BE_ZERO_OR_NEGATIVE and path[-1] not in ("betas", *MAPPINGS):
        assert refusal(settings_with(path, kind, -1)) is not None


@pytest.mark.parametrize(
    ("path", "annotation", "kind"),
    FIELDS,
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else "",
)
def test_a_value_of_another_type_is_refused(path, annotation, kind):
    plain = types_in(annotation) - {types.NoneType}
    wrong: list[object] = [[["list"]], {"a": {"b": ["c"]}}]
    if str in plain or typing.get_origin(annotation) is typing.Literal:
        wrong += [1, 2.5, True, ["a"]] if str in plain and "list" not in str(annotation) else []
    if path[-1] in ("kwargs", "options", "template_kwargs"):
        wrong = [[1], "text", 3, {"a": math.nan}, {1: 2}]
    if path[-1] in ("columns", "verifiers"):
        wrong = [[1], "text", {"a": 1}]
    for value in wrong:
        assert refusal(settings_with(path, kind, value)) is not None, f"{path} takes {value!r}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["rollout.group_size=1"],
            "rollout.group_size 1 leaves algorithm.advantage 'group' nothing to compare",
        ),
        (["rollout.group_size=1", "algorithm=gigpo"], "algorithm.advantage 'gigpo' nothing to compare"),
        (
            ["rollout.group_size=1", "algorithm=starpo_s"],
            "algorithm.filter 'top_fraction' nothing to compare",
        ),
        (["optimizer.betas=[1.0, 0.9]"], "optimizer.betas.0: Input should be less than 1, not 1.0"),
        (["optimizer.betas=[0.9]"], "optimizer.betas"),
        (["steps=true"], "steps: true is a truth value"),
        (["steps=99999999999999"], "steps: Input should be less than or equal to 1000000000"),
        (["rollout.max_turns=99999999999999"], "rollout.max_turns: Input should be less than or equal to"),
        (["algorithm.epochs=99999999999999"], "algorithm.epochs: Input should be less than or equal to"),
        (
            ["optimizer.warmup_steps=99999999999999"],
            "optimizer.warmup_steps: Input should be less than or equal to",
        ),
        (
            ["checkpoint.resume=maybe"],
            "checkpoint.resume: 'maybe' is neither auto, nor never, nor a checkpoint's folder",
        ),
        (
            ["checkpoint.resume=no"],
            "checkpoint.resume: 'no' is neither auto, nor never, nor a checkpoint's folder",
        ),
        (["prompt.turns=2"], "turns is read by context 'last_turns' only"),
        (["prompt.compact_above=100"], "compact_above is read by context 'compaction' only"),
        (["prompt.summary_tokens=9"], "summary_tokens is read by context 'compaction' only"),
        (["prompt.summary_request=Well?"], "summary_request is read by context 'compaction' only"),
        (["prompt.context=compaction"], "set prompt.compact_above, in tokens"),
        (
            ["prompt={context: compaction, compact_above: 100}", "prompt.custom_context=a:b"],
            "takes the place of context 'compaction'",
        ),
        (
            ["prompt={context: compaction, compact_above: 100}", "rollout.agent=http://127.0.0.1:1"],
            "prompt.context 'compaction' shortens prompts of ours, and rollout.agent makes its own",
        ),
        (
            ["prompt={context: compaction, compact_above: 704}", "model.max_length=1024"],
            "leaves no room for a summary: a prompt of prompt.compact_above 704 tokens, its reply and a summary take "
            "1024",
        ),
        (
            ["prompt.custom_context=a:b", "prompt.context=single_turn"],
            "takes the place of context 'single_turn'",
        ),
        (["evaluation.sets=[{episodes: 3}]"], "evaluation.sets: must be a mapping, key: value, not [{"),
        (["evaluation.sets={path: x}"], "evaluation.sets.path: must be a mapping, key: value, not 'x'"),
        (["optimizer=3"], "optimizer: must be a mapping, key: value, not 3"),
        (["model.hidden_size=30"], "hidden_size 30 must be a multiple of twice heads 4"),
        (["model.path=elsewhere/model", "model.layers=3"], "layers shape the tiny policy"),
        (["model.path=/nowhere/at/all"], "model.path: there is no folder /nowhere/at/all"),
        (
            ["env_url=localhost:8000"],
            "env_url: 'localhost:8000' is not the address of a server, such as http://",
        ),
        (["env_url=http://127.0.0.1:99999"], "env_url: 'http://127.0.0.1:99999' has no port that there is"),
        (["tasks.0.url=ws://there:0x50"], "tasks.0.url: 'ws://there:0x50' has no port that there is"),
        (["serve=[nomod:X]"], "serve: cannot import 'nomod'"),
        (
            ["serve=[Mine=rollgym.envs.games.frozen_lake:Nothing]"],
            "serve: module 'rollgym.envs.games.frozen_lake' has no attribute 'Nothing'",
        ),
        (["serve=[json:dumps]"], "serve: 'json:dumps' is no subclass of gymnasium.Env"),
        (
            ["optimizer.learning_rate=1e300"],
            "optimizer.learning_rate: Input should be less than or equal to 100",
        ),
        (
            ["warm_start={demonstrations: 5, learning_rate: 1e300}"],
            "warm_start.learning_rate: Input should be less than or equal to 100",
        ),
        (["tasks.0.url=ftp://x"], "tasks.0.url: 'ftp://x' is not the address of a server"),
        (["tasks.0.env_id="], "tasks.0.env_id"),
        (["output_dir="], "output_dir"),
        (
            ["datasets=[{path: nowhere.jsonl, verifier: Math-v0}]"],
            "datasets.0.path: there is no nowhere.jsonl here",
        ),
        (["rollout.reward=no_module_of_mine:reward"], "rollout.reward: cannot import 'no_module_of_mine'"),
        (["rollout.reward=json:nothing"], "rollout.reward: module 'json' has no attribute 'nothing'"),
        (["rollout.reward=math:pi"], "rollout.reward: 'math:pi' is no function, but float"),
        (
            ["rollout.agent=agent"],
            "rollout.agent: 'agent' is no program that can be run, no module:attr and no http address",
        ),
        (["algorithm.advantage.clip=3"], "algorithm.advantage: names no kind"),
        (
            ["algorithm={preset: grpo, advantage: {clip: -1}}"],
            "algorithm.advantage.clip: Input should be greater than 0",
        ),
        (["algorithm={preset: [1]}"], "unknown preset '[1]'"),
        (
            ["evaluation={sampled: false, greedy: false, sets: {a: {env_id: FrozenLake-v0}}}"],
            "sampled and greedy are both false",
        ),
        (["tasks.0.kwargs={day: !!timestamp 2024-01-01}"], "tasks.0.kwargs.day"),
        (["tasks.0.options={seed: 99999999999999999999}"], "tasks.0.options: seed has 67 bits"),
        (
            ["evaluation.sets.a={dataset: {path: x.jsonl, verifier: QA-v0}, kwargs: {a: 1}}"],
            "an evaluation set with a dataset takes no kwargs of its own",
        ),
        (
            ["evaluation.sets.a={dataset: {path: x.jsonl, verifier: QA-v0}, url: 'http://127.0.0.1:9'}"],
            "an evaluation set with a dataset takes no url of its own",
        ),
        *(
            (
                [f"algorithm.{part}={{kind: custom, function: 'no_module_of_mine:part'}}"],
                f"algorithm.{part}.function: cannot import 'no_module_of_mine'",
            )
            for part in ("advantage", "surrogate", "selection", "filter", "episodes")
        ),
        (
            ["algorithm={preset: grpo, aggregation: {unit: group}, minibatches: 9}"],
            "algorithm.minibatches 9 cuts a step into more parts than its 8 groups",
        ),
        (
            ["algorithm={preset: reinforce_pp, advantage: {return_mask: none}}", "rows=step"],
            "algorithm.advantage.return_mask 'none' discounts row by row, and rows 'step' cuts episodes",
        ),
        (
            ["algorithm={preset: ppo, advantage: {gae_mask: none}}", "prompt.context=last_turns"],
            "algorithm.advantage.gae_mask 'none' discounts row by row, and prompt.context 'last_turns' cuts",
        ),
        (
            ["algorithm={preset: gigpo, kl: {target: 0.1, horizon: 12}}"],
            "algorithm.kl.horizon 12 is that of a few episodes, and a step has 64",
        ),
        (
            ["inference={kind: vllm, launch: {devices_variable: SEEN}}"],
            "inference.launch.devices_variable is not read, since no devices are named: leave it out",
        ),
        (
            [
                "inference={kind: vllm, launch: {host: 0.0.0.0}}",
                "cluster={kind: ray, roles: {actor_inference: {devices: 1}}}",
                "backend.kind=fsdp2",
            ],
            "inference.launch.host is not read with cluster.kind 'ray'",
        ),
        (
            ["rollout.max_concurrent_by_environment={FrozenLike-v0: 4}"],
            "max_concurrent_by_environment names 'FrozenLike-v0', which this run does not play",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_refused_by_a_dry_run(capsys, words, message):
    assert main(["--dry-run", "tasks=[{env_id: FrozenLake-v0}]", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("roll-train: ")


BROADCAST = ["inference={kind: vllm, urls: ['http://127.0.0.1:9']}", "weights.transport=broadcast"]


@pytest.mark.parametrize("command", [["--dry-run"], ["eval"], ["rollout", "--policy", "model"], []])
def test_a_broadcast_to_vllm_is_refused_where_the_trainer_has_no_vllm(capsys, monkeypatch, tmp_path, command):
    monkeypatch.setitem(sys.modules, "vllm", None)
    words = [*BROADCAST, "tasks=[{env_id: FrozenLake-v0}]", f"output_dir={tmp_path}/run"]
    assert main([*command, *words]) == 2
    said = capsys.readouterr().err
    assert (
        f"vllm is not installed beside the trainer: {install_line('vllm')}, or set weights.transport" in said
    )
    assert list(tmp_path.iterdir()) == [], "nothing was begun"


def test_a_broadcast_by_what_is_there_is_not_refused(monkeypatch, tmp_path):
    task = "tasks=[{env_id: FrozenLake-v0}]"
    (tmp_path / "vllm.py").touch()
    with monkeypatch.context() as there:
        there.syspath_prepend(tmp_path)
        check_settings(load_settings(None, [task, *BROADCAST]))
    monkeypatch.setitem(sys.modules, "vllm", None)
    sglang = "inference={kind: sglang, urls: ['http://127.0.0.1:9']}"
    for words in ([sglang, BROADCAST[1]], [*BROADCAST, "weights.collective=gloo"], BROADCAST[:1]):
        check_settings(load_settings(None, [task, *words]))


def test_a_token_is_never_shown(capsys):
    assert main(["--dry-run", "tasks=[{env_id: FrozenLake-v0}]", "env_token=[secret]"]) == 2
    assert "secret" not in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"a: [", b"[" * 5000, b"- 1"], ids=range(4))
def test_a_file_that_is_no_settings(tmp_path, content):
    (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        load_settings(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    "words",
    [
        ["algorithm={preset: grpo, aggregation: {unit: group}, minibatches: 8}"],
        ["algorithm={preset: reinforce_pp, advantage: {return_mask: none}}"],
        # A single turn is a whole episode, whatever a prompt shows of those before it.
        [
            "algorithm={preset: ppo, advantage: {gae_mask: none}}",
            "prompt.context=single_turn",
            "rollout.max_turns=1",
        ],
        ["algorithm={preset: gigpo, kl: {target: 0.1, horizon: 13}}"],
        [
            "rollout.max_concurrent_by_environment={FrozenLake-v0: 4, Math-v0: 2, Sokoban-v0: 1}",
            "datasets=[{path: rows.jsonl, route: {column: kind, verifiers: {sums: Math-v0}}}]",
            "evaluation.sets.boxes.env_id=Sokoban-v0",
        ],
        [
            "rollout.max_concurrent_by_environment={Anything-v0: 4}",
            "rollout.task_source=examples.extensions.task_source:Growing",
        ],
    ],
)
def test_what_can_work_is_not_refused(words):
    load_settings(None, ["tasks=[{env_id: FrozenLake-v0}]", *words])


def test_a_single_member_may_be_trained_on_where_nothing_is_compared():
    for words in ("algorithm=ppo", "algorithm={preset: grpo, advantage: {singleton: raw}}"):
        load_settings(None, ["tasks=[{env_id: FrozenLake-v0}]", "rollout.group_size=1", words])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with env_server() as address:
        yield address


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    monkeypatch.setattr(rollgym.trainer.run.dry_run, "_PATIENCE_S", 60.0)  # this machine may be busy


def probe(capfd, *words: str) -> tuple[int, str]:
    code = main(["--dry-run", "--probe", "tasks=[{env_id: FrozenLake-v0}]", *words])
    said = capfd.readouterr()
    assert "Traceback" not in said.err
    return code, "\n".join(line for line in (said.out + said.err).splitlines() if "probe: " in line)


def test_a_probe_asks_environments_and_model(capfd, url):
    code, said = probe(capfd, "--env-url", url)
    assert code == 0
    assert said.splitlines() == [
        "probe: model: the tiny policy, which is built here",
        "probe: environments: FrozenLake-v0 made and reset",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tasks.0.env_id=FrozenLike-v0"], "probe: environments: FrozenLike-v0: unknown_env"),
        (["tasks.0.kwargs.size=huge"], "probe: environments: FrozenLake-v0: invalid_kwargs"),
        (["warm_start={demonstrations: 3}"], "probe: environments: FrozenLake-v0: forbidden"),
        (["evaluation.sets={a: {env_id: Nothing-v0}}"], "probe: environments: Nothing-v0: unknown_env"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_probe_says_what_is_missing(capfd, url, words, message):
    code, said = probe(capfd, "--env-url", url, *words)
    assert code == 2
    assert message in said


def test_a_probe_of_nothing_that_answers(capfd, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    code, said = probe(capfd, "--env-url", "http://127.0.0.1:9", f"model.path={tmp_path}/model")
    assert code == 2
    assert "holds no weights" in said
    assert "probe: environments: no server answers at http://127.0.0.1:9" in said


SERVED = ["deterministic=false", "inference.kind=vllm"]


def test_a_probe_asks_inference_servers(capfd, url, monkeypatch):
    monkeypatch.setenv("ROLLGYM_INFERENCE_KEY", "k")
    with InferenceServer("vllm", api_key="k") as served:
        code, said = probe(capfd, "--env-url", url, *SERVED, f"inference.urls=[{served.url}]")
    assert code == 0
    assert f"probe: inference: {served.url} is vLLM 0.33.0 with 'policy'" in said


@pytest.mark.parametrize(
    ("options", "words", "message"),
    [
        ({"release": "0.19.0"}, [], "vLLM 0.19.0 is too old: weight updates in sessions came with 0.24"),
        ({"dev_mode": False}, [], "VLLM_SERVER_DEV_MODE=1"),
        ({"api_key": "k"}, [], "API key (Unauthorized); set the environment variable ROLLGYM_INFERENCE_KEY"),
        ({"max_length": 30}, [], "takes rows of up to 30 tokens"),
    ],
)
def test_a_probe_says_what_inference_servers_lack(capfd, url, options, words, message):
    with InferenceServer("vllm", **options) as served:
        code, said = probe(capfd, "--env-url", url, *SERVED, *words, f"inference.urls=[{served.url}]")
    assert code == 2
    assert f"probe: inference: {served.url}" in said
    assert message in said


def test_a_probe_of_inference_servers_that_are_not_there(capfd, url, monkeypatch):
    monkeypatch.setattr(rollgym.trainer.run.dry_run, "_CONNECT_S", 0.2)
    code, said = probe(capfd, "--env-url", url, *SERVED, "inference.urls=['http://127.0.0.1:9']")
    assert code == 2
    assert "probe: inference: http://127.0.0.1:9 has not answered for 0.2 s" in said
    code, said = probe(capfd, "--env-url", url, *SERVED, "inference.launch={command: [no-such-vllm]}")
    assert code == 2
    assert "probe: inference: inference.launch.command: there is no program no-such-vllm" in said


def test_a_probe_belongs_to_a_dry_run(capfd):
    assert main(["--probe", "tasks=[{env_id: FrozenLake-v0}]"]) == 2
    assert "--probe belongs to --dry-run" in capfd.readouterr().err


@pytest.mark.parametrize("word", ["backend={kind:", "tasks=[{env_id:"])
def test_a_value_that_the_shell_has_cut_is_told_to_be_quoted(word):
    with pytest.raises(ConfigError, match="cut at a blank: put the whole word in quotes"):
        load_settings(None, [word, "fsdp2}"])


@pytest.mark.parametrize("word", ["tasks=[{env_id: FrozenLake-v0", "tasks=[{env_id: FrozenLake-v0}}"])
def test_a_value_in_quotes_that_is_broken_was_cut_by_nobody(word):
    with pytest.raises(ConfigError, match=r"the value of 'tasks=\[.* is not YAML"):
        load_settings(None, [word])
