"""Settings are strict, readable, and all of them are read."""

import inspect
import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from rollgym.trainer.cli import main
from rollgym.trainer.config.agents import command_line
from rollgym.trainer.config.inference import InferenceSettings, WeightSettings
from rollgym.trainer.config.load import dump_settings, load_settings
from rollgym.trainer.config.output import TRACKERS, TrackingSettings
from rollgym.trainer.config.reference import reference
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.names_of_others import NAMES_OF_OTHERS
from rollgym.trainer.core.strict import _paths, models_of
from tests.support.attribute_reads import attribute_reads

ROOT = Path(__file__).parents[3]
MINIMAL = ["tasks=[{env_id: FrozenLake-v0}]"]
SERVER = ["inference={kind: vllm, urls: [http://127.0.0.1:8000]}"]
LAUNCHED = ["inference={kind: vllm, launch: {}}"]


def test_overrides_are_laid_over_the_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("tasks: [{env_id: FrozenLake-v0, kwargs: {size: 4}}]\nsteps: 3\n")
    settings = load_settings(file, ["steps=5", "rollout.group_size=2", "tasks.0.kwargs.size=8"])
    assert (settings.steps, settings.rollout.group_size, settings.tasks[0].kwargs) == (5, 2, {"size": 8})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rollout.group_sise=2"], "did you mean 'group_size'"),
        (["stepz=2"], "did you mean 'steps'"),
        (["steps=none"], "steps: Input should be a valid integer"),
        (["steps"], "not key=value"),
        (["steps.x=1"], "unknown key 'x'|goes through|steps"),
        (["deterministic=true", "rollout.max_staleness=1"], "needs rollout.max_staleness: 0"),
        (
            ["rollout.top_p=0.9", "algorithm.proximal=behaviour"],
            "rollout.top_p and rollout.top_k draw from a part",
        ),
        (["rollout.top_k=5", "algorithm.correction={kind: band}"], "leave top_p at 1 and top_k at 0"),
        (["deterministic=true", "rollout.extra_members=1"], "needs rollout.extra_members: 0"),
        (["deterministic=true", "rollout.extra_groups=1"], "needs rollout.extra_groups: 0"),
        (["tasks=[]"], "'tasks' is empty"),
        (["tasks.3.env_id=X"], "not an index"),
        (["algorithm=grpoo"], "grpo"),
        (["warm_start={demonstrations: 3, reply: go}"], "must contain {action}"),
        (
            ["inference.urls=[http://a:1]"],
            "kind 'embedded' samples in this process: set kind to vllm or sglang",
        ),
        (["inference.launch={}"], "launch names servers, and kind 'embedded'"),
        (["inference.kind=vllm"], "kind 'vllm' needs either urls of servers that run, or launch"),
        ([*SERVER, "inference.launch={}"], "needs either urls of servers that run, or launch"),
        ([*SERVER, "inference.urls_file=servers"], "there is urls, urls_file: set one of the three"),
        ([*LAUNCHED, "inference.urls_file=servers"], "there is urls_file, launch: set one of the three"),
        (
            ["inference.urls_file=servers"],
            "urls_file names servers, and kind 'embedded' samples in this process",
        ),
        (
            ["inference={kind: vllm, urls_file: servers}", "weights.transport=broadcast"],
            "meets the servers of inference.urls_file at an address of this machine: set weights.address",
        ),
        (["inference={kind: vllm, urls: [http://a:1, http://a:1/]}"], "urls names http://a:1 twice"),
        (["inference={kind: vllm, urls: [a:8000]}"], "not the address of a server, such as http"),
        (["inference={kind: vllm, urls: ['http://a:1/v1']}"], "ends with /v1: name the root of the server"),
        (["inference={kind: vllm, urls: ['http://me:secret@a:1']}"], "inference.api_key_variable names"),
        ([*SERVER, "deterministic=true"], "needs inference.kind embedded"),
        ([*SERVER, "inference.quantization=fp8"], "set algorithm.correction={kind: truncate}"),
        ([*SERVER, "inference.sleep_level=1"], "sleep_level is for servers that the run starts"),
        (
            [*SERVER, "weights.transport=in_process"],
            "reaches no server, and inference.kind is 'vllm': set disk",
        ),
        (
            ["algorithm=remax", "rollout.group_reward=os:getcwd"],
            "judges the group's alone: take rollout.reward",
        ),
        (
            ["algorithm=remax", "rollout.agent=python agent.py"],
            "plays an episode of each group with the most",
        ),
        (["weights.transport=disk"], "is for servers, and inference.kind is 'embedded': leave the transport"),
        ([*LAUNCHED, "inference.sleep_level=1", "rollout.max_staleness=1"], "set one of them to 0"),
        (
            [*LAUNCHED, "inference.sleep_level=2", "weights.transport=broadcast"],
            "drops the weights that a broadcast",
        ),
        ([*LAUNCHED, "inference.launch.devices=['0']", "inference.launch.count=2"], "name each server's"),
        ([*LAUNCHED, "inference.launch.devices=['0']", "inference.launch.tensor_parallel=2"], "fewer than"),
        ([*LAUNCHED, "inference.launch.port=65535", "inference.launch.count=2"], "pass 65535"),
        ([*LAUNCHED, "inference.launch.environment={A=B: c}"], "no name of an environment variable"),
        (
            [
                *LAUNCHED,
                "inference.launch.environment={CUDA_VISIBLE_DEVICES: '0'}",
                "inference.launch.devices=['1']",
            ],
            "both",
        ),
        ([*SERVER, "weights.directory_on_servers=/mnt"], "another name of directory: set that, too"),
        ([*SERVER, "weights={transport: broadcast, directory: /d}"], "not by 'broadcast': leave it out"),
        ([*SERVER, "weights={transport: adapter, separate_head: true}"], "about whole weights"),
        ([*SERVER, "weights.tolerance=.inf"], "finite"),
        ([*SERVER, "weights.transport=adapter"], "none are trained: set model.lora"),
        ([*SERVER, "model.lora={}", "weights={transport: adapter, pause: keep}"], "set wait or abort"),
        (
            ["inference={kind: vllm, urls: ['http://a:1']}", "weights.transport=broadcast"],
            "set weights.address to one",
        ),
        ([*SERVER, "inference.patience_s=true"], "truth value"),
        (["backend.ranks=2"], "ranks: kind 'torch' computes in the run's own process"),
        (
            ["backend={kind: fsdp2, ranks: 4, mesh: {data: 3}}"],
            r"product \(data 3 x tensor 1 is 3\): set ranks to 3",
        ),
        (["backend={kind: fsdp2, ranks: 3, mesh: {tensor: 2}}"], r"data 1 x tensor 2 is 2"),
        (
            ["backend={kind: fsdp2, ranks: 2, mesh: {pipeline: 2}}"],
            "divides data and tensor only: set kind to megatron, or leave mesh.pipeline out",
        ),
        (
            ["backend={kind: deepspeed, ranks: 2, mesh: {tensor: 2}}"],
            "divides data only: set kind to fsdp2, or leave",
        ),
        (["backend={kind: fsdp2, sequence_parallel: false}"], "read by kind 'megatron' only, not by 'fsdp2'"),
        (
            ["backend={kind: megatron, ranks: 2, cpu_offload: true}"],
            "read by kinds 'fsdp2' and 'deepspeed' only",
        ),
        (
            ["backend={kind: megatron, ranks: 8, mesh: {tensor: 2, pipeline: 2, context: 4}}"],
            r"data 1 x tensor 2 x pipeline 2 x context 4 is 16\): set ranks to 16",
        ),
        (
            ["backend={kind: megatron, ranks: 6, mesh: {tensor: 2, expert: 2}}"],
            "mesh.expert 2 does not divide the 3 ranks of mesh.data",
        ),
        (["inference.routed_experts=true"], "the embedded engine does not tell which experts"),
        (["backend={kind: fsdp2, zero_stage: 2}"], "read by kind 'deepspeed' only, not by 'fsdp2'"),
        (
            ["backend={kind: fsdp2, sharded_checkpoints: true}", "checkpoint.asynchronous=true"],
            "set one of them to false",
        ),
        (
            [*SERVER, "model.lora={rank: 513}", "weights.transport=adapter"],
            "model.lora.rank 513 is more than vLLM takes: lower it to 512",
        ),
        (["optimizer={kind: sgd, epsilon: 1.0e-5}"], "epsilon: read by kind 'adamw' only"),
        ([*SERVER, "weights.collective=gloo"], "collective: read by transport 'broadcast' only"),
        (
            [*SERVER, "weights={transport: disk, address: 10.0.0.1}"],
            "address: read by transport 'broadcast' only: set that, or leave it out",
        ),
        (["cluster.address=auto"], "address: read by kind 'ray' only, and kind is left out: set it to ray"),
        (
            ["cluster={working_dir: here, roles: {environment: {actors: 2}}}"],
            "working_dir, roles.environment: read",
        ),
        (["checkpoint.best_is=lowest"], "best_is is read by keep_best only"),
    ],
)
def test_mistakes_are_named_with_their_remedy(words, message):
    with pytest.raises(ConfigError, match=message):
        load_settings(None, [*MINIMAL, *words])


OF_SERVERS = {
    "inference.urls": "[http://a:1]",
    "inference.urls_file": "servers",
    "inference.launch": "{}",
    "inference.dtype": "bfloat16",
    "inference.quantization": "fp8",
    "inference.api_key_variable": "KEY",
    "inference.admin_key_variable": "KEY",
    "inference.routed_experts": "true",
    "inference.lost_after_s": "3",
    "inference.stalled_after_s": "3",
    "inference.look_every_s": "3",
    "inference.patience_s": "3",
    "inference.update_timeout_s": "3",
    "inference.max_concurrent_requests": "3",
    "inference.sleep_level": "2",
    "weights.transport": "disk",
    "weights.directory": "folder",
    "weights.directory_on_servers": "folder",
    "weights.separate_head": "true",
    "weights.bucket_mb": "3",
    "weights.collective": "gloo",
    "weights.address": "10.0.0.1",
    "weights.pause": "wait",
    "weights.tolerance": "0.5",
    "weights.attempts": "3",
    "weights.checksums": "false",
}
"""Settings that the engine in the run's own process has no use for, each with a value that is not its default."""


@pytest.mark.parametrize("key", OF_SERVERS)
def test_what_only_servers_need_is_refused_where_there_are_none(key):
    # A correction, without which quantised weights would be refused for another reason.
    words = [*MINIMAL, "algorithm.correction={kind: truncate}", f"{key}={OF_SERVERS[key]}"]
    with pytest.raises(ConfigError, match=key.rpartition(".")[2]):
        load_settings(None, words)


def test_the_engine_in_the_runs_own_process_sleeps_where_it_samples_with_what_is_trained():
    words = [*MINIMAL, "inference.sleep_level=1"]
    assert load_settings(None, words).inference.sleep_level == 1
    for other in ("backend={kind: fsdp2, ranks: 2}", "cluster.kind=ray", "rollout.max_staleness=1"):
        with pytest.raises(ConfigError, match=r"inference\.sleep_level"):
            load_settings(None, [*words, other])


def test_each_setting_of_servers_is_among_them():
    sections = {"inference": InferenceSettings, "weights": WeightSettings}
    there = {f"{name}.{key}" for name, model in sections.items() for key in model.model_fields}
    assert set(OF_SERVERS) == there - {"inference.kind"}


def test_settings_that_are_written_as_they_are_by_default_are_not_refused():
    load_settings(
        None, [*MINIMAL, "inference={kind: embedded, lost_after_s: 15}", "weights.transport=in_process"]
    )


def test_the_resolved_settings_read_back_equal(tmp_path):
    settings = load_settings(None, [*MINIMAL, "algorithm=gigpo", "warm_start={demonstrations: 7}"])
    file = tmp_path / "resolved.yaml"
    file.write_text(dump_settings(settings))
    assert load_settings(file) == settings


def test_weights_travel_as_suits_who_samples():
    def transport(*words):
        settings = load_settings(None, [*MINIMAL, *words])
        return settings.weights.chosen(settings.inference)

    assert transport() == "in_process"
    assert transport(*SERVER) == "disk"
    assert transport(*SERVER, "weights.transport=broadcast") == "broadcast"
    assert (
        transport(*LAUNCHED, "inference.quantization=fp8", "algorithm.correction={kind: truncate}") == "disk"
    )


def test_a_preset_takes_overrides():
    assert (
        load_settings(None, [*MINIMAL, "algorithm=ppo"]).algorithm != load_settings(None, MINIMAL).algorithm
    )


def test_dry_run_prints_the_resolved_settings(capsys):
    assert main(["--dry-run", *MINIMAL, "steps=3"]) == 0
    assert "steps: 3" in capsys.readouterr().out


def test_a_mistake_on_the_command_line_is_one_readable_line(capsys):
    assert main(["--dry-run", *MINIMAL, "stepz=3"]) == 2
    assert capsys.readouterr().err == "roll-train: settings: unknown key 'stepz'; did you mean 'steps'?\n"


def every_field(model: type[BaseModel] = RunSettings) -> set[str]:
    """All settings as `module.Class.field`, of the class that first declares the field, as all kinds of it are read."""
    fields = set()
    for name, field in model.model_fields.items():
        owner = [each for each in model.__mro__ if name in inspect.get_annotations(each)][-1]
        fields.add(f"{owner.__module__}.{owner.__qualname__}.{name}")
        for inner in models_of(field):
            fields |= every_field(inner)
    return fields


@pytest.mark.slow
def test_every_setting_is_read_by_code(tmp_path):
    """A setting that no code reads is a promise that nothing keeps."""
    # What settings do among themselves, such as refusing what does not fit together, is no use of them.
    algorithms = ROOT / "trainer" / "algorithms"
    declared = {*algorithms.glob("*settings.py"), *algorithms.glob("*presets.py")}
    declared |= set((ROOT / "trainer" / "config").glob("*.py"))
    reads = attribute_reads(ROOT, "rollgym.trainer", tmp_path)
    unread = {name for name in every_field() if not reads.get(name, set()) - declared}
    # Trackers are read by the property that lists those which a run has.
    tracking = f"{TrackingSettings.__module__}.{TrackingSettings.__name__}"
    if reads.get(f"{tracking}.chosen", set()) - declared:
        unread -= {f"{tracking}.{name}" for name in (*(each.name for each in TRACKERS), "others")}
    assert unread == set()


def test_a_read_counts_for_its_own_class_only(tmp_path):
    package = tmp_path / "sample"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "settings.py").write_text(
        "from pydantic import BaseModel\n\n\n"
        "class Model(BaseModel):\n    path: str\n\n\n"
        "class Data(BaseModel):\n    path: str\n    every: int\n"
    )
    (package / "use.py").write_text(
        "from pathlib import Path\n\nfrom sample.settings import Data, Model\n\n\n"
        "def use(model: Model, data: Data, every: Path) -> str:\n"
        "    rows = [data for _ in every.parts]\n"
        "    return model.path + str(rows[0].every)\n"
    )
    used = {
        name
        for name, paths in attribute_reads(tmp_path, "sample", tmp_path).items()
        if package / "use.py" in paths
    }
    assert {name for name in used if name.startswith("sample.")} == {
        "sample.settings.Model.path",
        "sample.settings.Data.every",
    }


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_loads(path):
    settings = load_settings(path)
    assert settings.tasks or settings.datasets or settings.section


def test_the_pages_of_settings_are_those_of_the_code():
    pages = reference()
    for path, text in pages.items():
        assert (ROOT / "docs" / path).read_text() == text, "python -m rollgym.trainer.config.reference"
    written = {f"configuration/{page.name}" for page in (ROOT / "docs" / "configuration").iterdir()}
    assert written == set(pages) - {"configuration.md"}


def test_every_key_of_a_run_stands_on_one_page():
    listed = re.findall(r"^- \*\*`([\w.]+)`", "\n".join(reference().values()), re.MULTILINE)
    assert len(listed) > 500
    for key in (
        "seed",
        "tasks.env_id",
        "cluster.roles.actor_train.devices",
        "algorithm.filter.above",
        "tracking.wandb.project",
    ):
        assert listed.count(key) >= 1, key
    assert "rollout.group_size" in listed


@pytest.mark.parametrize("number", ["010", "1:30", "1_000", "0b11", "+05", "1.2.3"])
def test_numbers_that_readers_disagree_about_are_refused(number, tmp_path):
    with pytest.raises(ConfigError, match=r"^steps: .*write it in plain digits, such as 10, 0.5 or 1e-6"):
        load_settings(None, [*MINIMAL, f"steps={number}"])
    file = tmp_path / "run.yaml"
    file.write_text(f"tasks: [{{env_id: FrozenLake-v0}}]\noptimizer: {{learning_rate: {number}}}\n")
    with pytest.raises(ConfigError, match=r"^optimizer.learning_rate: .*write it in plain digits"):
        load_settings(file)


def test_numbers_are_numbers_wherever_they_stand(tmp_path):
    words = ["optimizer.learning_rate=1e-6", "steps=0x10", "tasks.0.kwargs.slip=1e-3"]
    settings = load_settings(None, [*MINIMAL, *words])
    assert (settings.optimizer.learning_rate, settings.steps) == (1e-6, 16)
    assert settings.tasks[0].kwargs == {"slip": 1e-3}


@pytest.mark.parametrize(
    "text", ["runs/a #1", "no", "on", "2024-01-02", "1:30", "010", "Answer: yes", "runs/1_000"]
)
def test_words_that_are_text_stay_text(text, tmp_path):
    settings = load_settings(None, [*MINIMAL, f"output_dir={text}"])
    assert settings.output_dir == text
    file = tmp_path / "run.yaml"
    file.write_text(dump_settings(settings))
    assert load_settings(file) == settings


def test_a_number_where_a_text_belongs_is_told_how_to_become_one():
    with pytest.raises(ConfigError, match=r'env_id: .*not 7 \(in quotes it is text: "7"\)'):
        load_settings(None, ["tasks=[{env_id: 7}]"])


def test_switches_take_the_words_for_them():
    for word, value in {"yes": True, "off": False, "true": True}.items():
        assert load_settings(None, [*MINIMAL, f"deterministic={word}"]).deterministic is value


MINIMAL = ["tasks=[{env_id: FrozenLake-v0}]"]
PATHS = {
    "output_dir": "output_dir={}",
    "model.path": "model.path={}",
    "datasets.0.path": "datasets=[{{path: {}, verifier: Math-v0}}]",
    "sft.data.0.path": "sft={{data: [{{path: {}}}]}}",
    "dpo.reference": "dpo={{data: [{{path: a.jsonl}}], reference: {}}}",
    "prompt.chat_template": "prompt.chat_template={}",
    "checkpoint.resume": "checkpoint.resume={}",
    "inference.urls_file": "inference={{kind: vllm, urls_file: {}}}",
    "tracking.mlflow.uri": "tracking.mlflow={{uri: {}}}",
    "agents.sandbox_read_only.0": "agents={{sandbox: namespaces, sandbox_read_only: [{}]}}",
}


@pytest.mark.parametrize("key", PATHS)
def test_the_home_folder_stands_in_place_of_its_sign(key, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "it").write_text("http://a:1\n")
    found = load_settings(None, [*MINIMAL, PATHS[key].format("~/it")])
    for part in key.split("."):
        found = found[int(part)] if part.isdecimal() else getattr(found, part)
    assert found == str(tmp_path / "it")


def test_a_path_below_another_folder_is_as_it_was_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("runs/~/a", "./~", "a~", "Qwen/Qwen2.5-0.5B"):
        assert load_settings(None, [*MINIMAL, f"output_dir={path}"]).output_dir == path


def test_nobodys_home_is_refused_with_the_way_out():
    with pytest.raises(
        ConfigError, match=r"^output_dir: '~nobody-here' is no home folder: write ./~nobody-here if"
    ):
        load_settings(None, [*MINIMAL, "output_dir=~nobody-here/runs"])


def test_the_command_line_of_an_agent(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    words = command_line("python ~/agent.py --pattern '~x'", here=False)
    assert words == ["python", str(Path(tmp_path, "agent.py")), "--pattern", "~x"]


@pytest.mark.parametrize(
    ("word", "path"),
    [
        ("kl_loss_coef=0.1", "algorithm.kl.coefficient"),
        ("num_return_sequences_in_group=8", "rollout.group_size"),
        ("lr=0.1", "optimizer.learning_rate"),
        ("optimizer.lr=0.1", "learning_rate"),
        ("rollout.n=8", "group_size"),
        ("num_generations=8", "rollout.group_size"),
        ("max_new_tokens=8", "rollout.max_new_tokens"),
        ("gradient_checkpointing=true", "model.gradient_checkpointing"),
    ],
)
def test_names_of_roll_verl_and_trl_are_answered_with_ours(word, path, capsys):
    assert main(["--dry-run", *MINIMAL, word]) == 2
    assert f"did you mean '{path}'?" in capsys.readouterr().err


def test_every_setting_that_names_of_others_lead_to_exists():
    assert set(NAMES_OF_OTHERS.values()) <= set(_paths(RunSettings))
