"""Every setting of a training run. Each field is read by code; a test proves it."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from trainer.algorithms.advantage_settings import compares_members
from trainer.algorithms.filter_settings import RankedFilter
from trainer.algorithms.presets import lay_over_preset, resolve_preset
from trainer.algorithms.settings import AlgorithmSettings
from trainer.config.agents import AgentsSettings, agent_kind
from trainer.config.backend import BackendSettings
from trainer.config.cluster import ClusterSettings
from trainer.config.data import DatasetSettings
from trainer.config.inference import InferenceSettings, WeightSettings, disagreement
from trainer.config.model import ModelSettings
from trainer.config.tracking import TrackingSettings
from trainer.core.strict import Count, JsonObject, LearningRate, Seconds, ServerUrl, Settings, Weight

_SERVED = re.compile(r"([A-Za-z0-9._-]{1,128}=)?[\w.]+:\w+")


_SET_BY_US = frozenset({"conversation", "tools", "tokenize", "add_generation_prompt", "return_dict"})

PLAIN_REPLY = "{action}"
"""A reply that is the action and nothing else."""


class TaskSettings(Settings):
    """One environment of the mixture that a run plays."""

    env_id: str = Field(min_length=1)
    kwargs: JsonObject = Field({}, description="What the environment is made with.")
    options: JsonObject | None = Field(None, description="Options of every reset.")
    weight: Weight = Field(1.0, description="Share of the tasks, relative to the other entries.")
    domain: str = Field("", description="Name in the metrics; the environment's id if empty.")
    url: ServerUrl | None = Field(None, description="Server of this entry; the run's default if absent.")


class PromptSettings(Settings):
    """What of an episode the policy is shown."""

    context: Literal["full_history", "last_turns", "single_turn"] = "full_history"
    turns: PositiveInt | None = Field(
        None, description="Turns that `last_turns` keeps, the current one included; 3 if absent."
    )
    instruction: Literal["system", "first_user", "none"] = Field(
        "system", description="Where the environment's instruction goes."
    )
    tools: Literal["none", "template"] = Field(
        "none", description="Whether the chat template is given the environment's tools (`info['tools']`)."
    )
    template_kwargs: JsonObject = Field(
        {},
        description="Further variables of the chat template, such as enable_thinking: false (Qwen3), or date_string "
        "where a template writes today's date (Llama-3).",
    )
    chat_template: str | None = Field(
        None,
        min_length=1,
        description="File with a Jinja template that replaces the tokenizer's, such as one that keeps the thoughts of "
        "earlier turns where the model's own drops them. It is saved with the tokenizer.",
    )
    custom_context: str | None = Field(
        None, description="module:attr of a function (history, observation) -> messages; replaces `context`."
    )

    @field_validator("template_kwargs")
    @classmethod
    def _variables_are_the_templates(cls, value: dict[str, Any]) -> dict[str, Any]:
        if ours := sorted(_SET_BY_US & set(value)):
            raise ValueError(f"{', '.join(ours)}: set by the run itself")
        return value

    @model_validator(mode="after")
    def _context_is_one(self) -> Self:
        if self.turns is not None and self.context != "last_turns":
            raise ValueError(
                f"turns is read by context 'last_turns' only, not by '{self.context}': set that, or leave turns out"
            )
        if self.custom_context is not None and self.context != "full_history":
            raise ValueError(
                f"custom_context takes the place of context '{self.context}': leave out one of them"
            )
        return self


class RolloutSettings(Settings):
    """How episodes are played for training."""

    groups_per_step: Count = 8
    group_size: Count = 8
    extra_members: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="Episodes started beyond group_size; the last ones are cancelled. Groups then hold the episodes "
        "that end first, which are the short ones: training sees fewer long episodes than the policy plays.",
    )
    extra_groups: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="Groups started beyond those that a step needs; when it is full, those of them that are due and "
        "not ready are stopped, and begin anew as soon as groups_per_step of them are aside, in a round of their own "
        "that waits for them. All lengths are trained, long ones later; what they had sampled is thrown away.",
    )
    max_turns: PositiveInt = 30
    max_new_tokens: PositiveInt = 64
    temperature: float = Field(1.0, ge=0.01, le=100.0, description="Divides the logits.")
    top_p: float = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="Draw from the most likely tokens of this mass; 1 is off. Not with proximal 'behaviour' or a "
        "correction: see top_k.",
    )
    top_k: int = Field(
        0,
        ge=0,
        description="Draw from so many most likely tokens; 0 is off. What was drawn then has another distribution "
        "than what is trained, so log-probabilities at sampling cannot be compared with the policy's.",
    )
    max_staleness: int = Field(
        0,
        ge=0,
        le=1000,
        description="Most updates that a group may be behind when it is trained; 0 trains on-policy. Rollouts run "
        "ahead by as many steps.",
    )
    window_fraction: float = Field(
        0.3,
        ge=0.0,
        le=1.0,
        description="Share of the groups under way that may overtake an unfinished one, where max_staleness allows.",
    )
    episode_timeout_s: Seconds = Field(300.0, description="A hung episode is cancelled and played again.")
    server_timeout_s: Seconds = Field(
        300.0, description="A server that is gone is waited for so long; then the run is saved and ends."
    )
    max_attempts: PositiveInt = Field(3, description="Attempts at an episode before its group is dropped.")
    max_failed_groups: Count = Field(
        8,
        description="Groups of one environment that may be dropped in a row because it fails; one more ends the run.",
    )
    max_concurrent_sequences: Count = Field(
        256,
        description="Replies that are sampled at once; of the requests that wait, those of the next step go first.",
    )
    max_concurrent_episodes: Count | None = Field(
        None,
        description="Episodes, and with them sessions of environments, at one time; absent: as many as servers allow.",
    )
    max_concurrent_by_environment: dict[str, Count] = Field(
        {},
        description="The same by environment id, for those that are dear, such as ones with a sandbox. An episode "
        "that waits for its environment keeps no other one, and no reply, from going on.",
    )
    encoding: Literal["json", "msgpack"] = "msgpack"
    log: Literal["none", "process", "machine"] = Field(
        "process",
        description="What the sampled tokens of episodes under way outlive, so that a resumed run goes on with them: "
        "nothing, the trainer's process, or the machine (every reply waits for the disk).",
    )
    agent: str | None = Field(
        None,
        min_length=1,
        description="Who plays in place of ours: module:attr of a coroutine, the command line of a program that is run "
        "for each episode, or the http address of a service. The latter two reach the policy by OpenAI's API.",
    )
    reward: str | None = Field(
        None, description="module:attr of a function Trajectory -> list of turn rewards."
    )
    task_source: str | None = Field(
        None, description="module:attr of a function (settings, seed) -> TaskSource."
    )

    @property
    def black_box(self) -> bool:
        """Whether an agent plays that reaches the policy by OpenAI's API."""
        return self.agent is not None and agent_kind(self.agent) != "coroutine"

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return self.top_p < 1.0 or self.top_k > 0


class WarmStartSettings(Settings):
    """Supervised start on expert demonstrations that are collected over the wire."""

    demonstrations: Count = Field(description="Expert episodes. None are used after the warm start.")
    epochs: PositiveInt = 4
    batch_rows: PositiveInt = 64
    learning_rate: LearningRate = 2e-3
    reply: str = Field(PLAIN_REPLY, description="How the expert's action is written as a reply.")

    @field_validator("reply")
    @classmethod
    def _reply_names_action(cls, value: str) -> str:
        if "{action}" not in value:
            raise ValueError("reply must contain {action}, for example '<answer>{action}</answer>'")
        return value


_Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimizerSettings(Settings):
    """The optimizer and its schedule."""

    kind: Literal["adamw", "sgd"] = Field(
        "adamw",
        description="adamw (Loshchilov and Hutter 2019), or plain gradient descent, which holds no averages: betas "
        "and epsilon mean nothing to it.",
    )
    learning_rate: LearningRate = 1e-3
    critic_learning_rate: LearningRate = Field(2e-3, description="Used where the algorithm has a critic.")
    betas: tuple[_Beta, _Beta] = Field((0.9, 0.95), description="Decay of AdamW's two averages.")
    epsilon: float = Field(1e-8, gt=0.0, le=1.0, description="Added to the divisor of AdamW's steps.")
    weight_decay: float = Field(0.0, ge=0.0, le=100.0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    gradient_clip: PositiveFloat = 1.0
    max_skipped_steps: PositiveInt = Field(
        8,
        description="Optimizer steps in a row that may be left out because loss or gradient is not finite; one more "
        "ends the run.",
    )
    tokens_per_micro_batch: PositiveInt = 16384
    shared_prefixes: Literal["auto", "off"] = Field(
        "auto",
        description="Whether tokens of rows that begin alike go through the model once: where that is exact and costs "
        "less, or never.",
    )

    @model_validator(mode="after")
    def _numbers_are_read(self) -> Self:
        own = {name: getattr(self, name) for name in ("betas", "epsilon")}
        unread = [name for name, value in own.items() if value != type(self).model_fields[name].default]
        if self.kind == "sgd" and unread:
            raise ValueError(f"{', '.join(unread)}: read by kind 'adamw' only, not by 'sgd': leave it out")
        return self


class PanelSettings(Settings):
    """A fixed set of tasks to evaluate on."""

    env_id: str = Field("", description="The environment; empty where a data set is named.")
    dataset: DatasetSettings | None = Field(
        None, description="In place of an environment: the panel's tasks are the first rows."
    )
    kwargs: JsonObject = Field({}, description="What the environment is made with.")
    options: JsonObject | None = None
    episodes: Count = 200
    distinct: bool = Field(
        True, description="Keep only tasks whose first state (of a data set: row) differs from all before it."
    )
    max_turns: PositiveInt | None = Field(None, description="The rollout's max_turns if absent.")
    url: ServerUrl | None = None
    baselines: bool = Field(
        True,
        description="Also play the random baseline and the blind one (the best fixed sequence of actions), once. The "
        "blind one is the expert's on training tasks of this environment; a line says why where there is none.",
    )

    @model_validator(mode="after")
    def _environment_or_rows(self) -> Self:
        if bool(self.env_id) == (self.dataset is not None):
            raise ValueError("a panel needs either an env_id or a dataset")
        return self


class EvaluationSettings(Settings):
    """When and how the policy is measured."""

    every: int = Field(
        25, ge=0, description="Training steps between evaluations; 0 evaluates at the ends only."
    )
    sampled: bool = True
    greedy: bool = True
    interim_episodes: Count | None = Field(
        None, description="Episodes per panel between the two ends; all if absent."
    )
    panels: dict[str, PanelSettings] = Field(
        {}, description="Named panels; any environment, trained on or not."
    )

    @model_validator(mode="after")
    def _panels_are_played(self) -> Self:
        if self.panels and not self.sampled and not self.greedy:
            raise ValueError(
                "sampled and greedy are both false, so nobody plays the panels: set one of them, or no panels"
            )
        return self


class CheckpointSettings(Settings):
    """What is kept so that a killed run goes on."""

    every: int = Field(10, ge=0, description="Training steps between checkpoints; 0 keeps only the last.")
    keep: PositiveInt = Field(2, description="How many of the newest stay.")
    keep_best: int = Field(
        0, ge=0, le=1_000_000, description="How many of those with the best `best_metric` stay beside them."
    )
    best_metric: str | None = Field(
        None,
        min_length=1,
        description="A name in metrics.jsonl, such as rollout/success or evaluate/PANEL/greedy/success. A checkpoint's "
        "score is its value at that very step: evaluate where checkpoints are written.",
    )
    best_is: Literal["highest", "lowest"] = Field("highest", description="Which values of it are the best.")
    asynchronous: bool = Field(
        False,
        description="Go on training while a checkpoint is written, from a copy of it in the host's memory.",
    )
    resume: str = Field(
        "never",
        min_length=1,
        description="'auto' (the newest in output_dir, if any), 'never' (output_dir must hold no run), or a "
        "checkpoint's folder.",
    )

    @model_validator(mode="after")
    def _best_is_named(self) -> Self:
        if self.keep_best and self.best_metric is None:
            raise ValueError("keep_best needs best_metric: name the metric that checkpoints are chosen by")
        if self.best_metric is not None and not self.keep_best:
            raise ValueError(
                "best_metric is read by keep_best only: set keep_best to 1 or more, or leave it out"
            )
        return self


class RunSettings(Settings):
    """A whole run."""

    name: str = "run"
    seed: int = Field(0, ge=0)
    deterministic: bool = Field(
        False, description="Ids, rewards and weights equal between two runs, step by step."
    )
    output_dir: str = Field("runs/default", min_length=1)
    steps: PositiveInt = Field(100, description="Training steps.")
    threads: int = Field(1, ge=1, le=1024, description="Threads of torch's operators.")
    env_url: ServerUrl | None = Field(
        None, description="Default environment server; absent: one is started on loopback."
    )
    env_token: str | None = Field(
        None,
        description="Bearer token for the servers; better set the environment variable ROLLGYM_TOKEN, which is not "
        "saved with the run.",
    )
    serve: list[str] = Field(
        [],
        description="Environments that the embedded server adds: module:Class or name=module:Class. Without effect "
        "where env_url names a server.",
    )
    tasks: list[TaskSettings] = Field([], description="The environments that the run plays, by weight.")
    datasets: list[DatasetSettings] = Field(
        [], description="Data sets whose rows are tasks of verifiers, by weight, beside the environments."
    )
    interleave: Literal["stream", "step"] = Field(
        "stream",
        description="Where the shares of data sets and environments hold: over the stream of tasks (in every thousand, "
        "where there are data sets; each drawn by weight, where there are none), or in the tasks of every step.",
    )
    model: ModelSettings = ModelSettings()
    backend: BackendSettings = BackendSettings()
    prompt: PromptSettings = PromptSettings()
    rollout: RolloutSettings = RolloutSettings()
    agents: AgentsSettings = AgentsSettings()
    inference: InferenceSettings = InferenceSettings()
    weights: WeightSettings = WeightSettings()
    cluster: ClusterSettings = ClusterSettings()
    rows: Literal["trajectory", "step"] = Field(
        "trajectory", description="A training row per segment or per turn."
    )
    warm_start: WarmStartSettings | None = None
    algorithm: AlgorithmSettings = Field(default_factory=lambda: resolve_preset("grpo", {}))
    optimizer: OptimizerSettings = OptimizerSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    tracking: TrackingSettings = TrackingSettings()

    @field_validator("serve")
    @classmethod
    def _served_are_classes(cls, value: list[str]) -> list[str]:
        for named in value:
            if not _SERVED.fullmatch(named):
                raise ValueError(f"'{named}' is not of the form module:Class or name=module:Class")
        return value

    @field_validator("algorithm", mode="before")
    @classmethod
    def _resolve_preset(cls, value: Any) -> Any:
        if isinstance(value, str):
            return lay_over_preset(value, {})
        if isinstance(value, dict) and "preset" in value:
            overrides = {key: entry for key, entry in value.items() if key != "preset"}
            return lay_over_preset(value["preset"], overrides)
        return value

    @model_validator(mode="after")
    def _modes_agree(self) -> Self:
        if not self.tasks and not self.datasets and self.rollout.task_source is None:
            raise ValueError(
                "'tasks' is empty: name at least one environment, one of 'datasets', or a rollout.task_source"
            )
        if self.rollout.max_new_tokens >= self.model.max_length:
            raise ValueError(
                f"model.max_length {self.model.max_length} leaves no room for a prompt beside replies of "
                f"rollout.max_new_tokens {self.rollout.max_new_tokens}: raise the one or lower the other"
            )
        if self.rollout.truncates and self.algorithm.reads_behaviour:
            raise ValueError(
                "rollout.top_p and rollout.top_k draw from a part of the vocabulary, so log-probabilities at sampling "
                "are not those of the policy in training, and algorithm.proximal 'behaviour' and algorithm.correction "
                "compare the two: leave top_p at 1 and top_k at 0, or take proximal 'recomputed' without correction"
            )
        if self.deterministic and self.rollout.max_staleness > 0:
            raise ValueError("deterministic: true needs rollout.max_staleness: 0")
        if self.deterministic and self.rollout.extra_members > 0:
            raise ValueError(
                "deterministic: true needs rollout.extra_members: 0: who finishes first is a matter of time"
            )
        if self.deterministic and self.rollout.extra_groups > 0:
            raise ValueError(
                "deterministic: true needs rollout.extra_groups: 0: who is put aside is a matter of time"
            )
        return self

    @model_validator(mode="after")
    def _ranks_can_read_the_reference(self) -> Self:
        warm = self.model.lora is not None and self.warm_start is not None
        if self.backend.kind == "deepspeed" and warm and self.algorithm.needs_reference:
            raise ValueError(
                "backend.kind deepspeed does not keep the adapters of a warm start for a KL penalty (model.lora, "
                "warm_start, algorithm.kl): take backend.kind fsdp2, or leave one of the three out"
            )
        return self

    @model_validator(mode="after")
    def _greedy_episodes_can_be_played(self) -> Self:
        if self.algorithm.needs_greedy and self.rollout.black_box:
            raise ValueError(
                "algorithm.advantage.baseline 'greedy' plays an episode of each group with the most likely tokens, and "
                f"rollout.agent '{self.rollout.agent}' asks for tokens as it likes: take another baseline, or a "
                "coroutine as the agent"
            )
        return self

    @model_validator(mode="after")
    def _checkpoints_can_be_written(self) -> Self:
        if self.backend.sharded_checkpoints and self.checkpoint.asynchronous:
            raise ValueError(
                "backend.sharded_checkpoints has the ranks write what they hold, and checkpoint.asynchronous trains on "
                "meanwhile: set one of them to false"
            )
        return self

    @model_validator(mode="after")
    def _servers_can_sample(self) -> Self:
        if (reason := disagreement(self.inference, self.weights)) is not None:
            raise ValueError(reason)
        if self.weights.transport == "adapter" and self.model.lora is None:
            raise ValueError(
                "weights.transport 'adapter' sends LoRA adapters alone, and none are trained: set model.lora={}, or "
                "the transport to disk"
            )
        if self.deterministic and not self.inference.embedded:
            raise ValueError(
                f"deterministic: true needs inference.kind embedded: what '{self.inference.kind}' computes depends on "
                "who shares a batch, which is a matter of time"
            )
        if self.inference.quantization and self.algorithm.correction.kind == "off":
            raise ValueError(
                f"inference.quantization '{self.inference.quantization}' samples from other weights than are trained: "
                "set algorithm.correction={kind: truncate}, which weighs tokens by how far the two are apart"
            )
        if self.inference.sleep_level and self.rollout.max_staleness:
            raise ValueError(
                "inference.sleep_level puts servers to sleep while the policy is trained, and rollout.max_staleness "
                f"{self.rollout.max_staleness} samples meanwhile: set one of them to 0"
            )
        return self

    @model_validator(mode="after")
    def _groups_can_be_compared(self) -> Self:
        if self.rollout.group_size > 1:
            return self
        advantage, chosen = self.algorithm.advantage, self.algorithm.filter.kind
        if compares_members(advantage):
            raise ValueError(
                f"rollout.group_size 1 leaves algorithm.advantage '{advantage.kind}' nothing to compare, so "
                "that nothing would be learnt: set group_size to 2 or more, algorithm.advantage.singleton to 'raw', or "
                "take preset 'ppo'"
            )
        if isinstance(self.algorithm.filter, RankedFilter) and self.algorithm.filter.by == "deviation":
            raise ValueError(
                f"rollout.group_size 1 leaves algorithm.filter '{chosen}' nothing to compare: set group_size to 2 "
                "or more, or algorithm.filter.kind to 'none'"
            )
        return self
