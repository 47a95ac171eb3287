"""Every setting of a training run. Each field is read by code; a test proves it."""

import math
import re
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from rollgym.trainer.algorithms.group_filters import RankedFilter
from rollgym.trainer.algorithms.presets import lay_over_preset, resolve_preset
from rollgym.trainer.algorithms.settings import AlgorithmSettings
from rollgym.trainer.algorithms.state import LARGEST_CHANGE
from rollgym.trainer.config.agents import AgentsSettings
from rollgym.trainer.config.backend import BackendSettings
from rollgym.trainer.config.cluster import ClusterSettings
from rollgym.trainer.config.data import DatasetSettings, EvaluationSettings
from rollgym.trainer.config.inference import InferenceSettings, WeightSettings, disagreement
from rollgym.trainer.config.model import ModelSettings
from rollgym.trainer.config.optimizer import OptimizerSettings
from rollgym.trainer.config.output import CheckpointSettings, TrackingSettings
from rollgym.trainer.config.rollout import (
    SUMMARY_TOKENS,
    CurriculumSettings,
    PromptSettings,
    RolloutSettings,
    TaskSettings,
)
from rollgym.trainer.config.supervised import (
    DistillSettings,
    DpoSettings,
    RewardModelSettings,
    SftSettings,
    WarmStartSettings,
)
from rollgym.trainer.core.strict import Amount, ServerUrl, Settings, UserPath

SECTIONS = ("sft", "dpo", "distill", "reward")
"""The sections of pipelines; each is read by the command of its name."""

_SERVED = re.compile(r"([A-Za-z0-9._-]{1,128}=)?[\w.]+:\w+")


class RunSettings(Settings):
    """All settings of a run, section by section."""

    name: str = "run"
    seed: int = Field(0, ge=0)
    deterministic: bool = Field(
        False, description="Ids, rewards and weights equal between two runs, step by step."
    )
    output_dir: UserPath = Field("runs/default", min_length=1)
    steps: Amount = Field(100, description="Training steps.")
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
        description="Where the shares of data sets and environments hold: over the stream of tasks (in every thousand "
        "with data sets; without, each task is drawn by weight), or in the tasks of every step.",
    )
    curriculum: CurriculumSettings | None = Field(
        None,
        description="The shares of each step follow the success in each domain (with interleave step); {} for "
        "defaults. They are written to curriculum.jsonl, and a resumed run continues with them.",
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
    sft: SftSettings | None = Field(None, description="What `roll-train sft` learns from.")
    dpo: DpoSettings | None = Field(None, description="What `roll-train dpo` learns from.")
    distill: DistillSettings | None = Field(None, description="What `roll-train distill` learns from.")
    reward: RewardModelSettings | None = Field(None, description="What `roll-train reward` learns from.")
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

    @property
    def section(self) -> str | None:
        """The section of the one pipeline that these settings are for; None: reinforcement learning."""
        return next((name for name in SECTIONS if getattr(self, name) is not None), None)

    @property
    def pipeline(self) -> SftSettings | DpoSettings | DistillSettings | RewardModelSettings | None:
        """What stands in that section."""
        return self.sft or self.dpo or self.distill or self.reward

    @property
    def plays(self) -> bool:
        """Whether the policy plays episodes in this run."""
        on_policy = self.distill is not None and self.distill.on_policy
        return self.section is None or on_policy

    @property
    def compares_sampling(self) -> bool:
        """Whether log-probabilities at sampling are compared with those of the model in training."""
        if self.distill is not None:
            return self.distill.on_policy and self.distill.estimate == "sampled"
        return self.section is None and self.algorithm.reads_behaviour

    @model_validator(mode="after")
    def _one_pipeline(self) -> Self:
        named = [name for name in SECTIONS if getattr(self, name) is not None]
        if len(named) > 1:
            raise ValueError(
                f"{' and '.join(named)}: a run is for one command: leave out all but one of them"
            )
        if self.sft is not None and self.sft.expert is not None and not self.tasks:
            raise ValueError("'tasks' is empty: sft.expert plays them: name at least one environment")
        return self

    @model_validator(mode="after")
    def _modes_agree(self) -> Self:
        if not self.plays:
            return self
        if not self.tasks and not self.datasets and self.rollout.task_source is None:
            raise ValueError(
                "'tasks' is empty: name an environment, such as tasks='[{env_id: FrozenLake-v0}]', one of 'datasets', "
                "a rollout.task_source, or a configuration, such as --config frozen_lake"
            )
        if self.rollout.max_new_tokens >= self.model.max_length:
            raise ValueError(
                f"model.max_length {self.model.max_length} leaves no room for a prompt beside replies of "
                f"rollout.max_new_tokens {self.rollout.max_new_tokens}: raise the one or lower the other"
            )
        self._check_summaries()
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
    def _experts_can_be_taken_again(self) -> Self:
        if not self.optimizer.router_replay:
            return self
        if self.section is not None:
            raise ValueError(
                f"optimizer.router_replay takes experts again for ratios of log-probabilities, and {self.section} has "
                "none: leave it out"
            )
        if not self.algorithm.needs_old_logprobs:
            raise ValueError(
                "optimizer.router_replay takes experts again that the policy took when its old log-probabilities were "
                "computed, and this algorithm computes none: set algorithm.proximal to 'recomputed' and "
                "algorithm.minibatches or epochs above 1, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _shares_can_follow(self) -> Self:
        if self.curriculum is None:
            return self
        if self.interleave != "step" or self.rollout.task_source is not None:
            raise ValueError(
                "curriculum sets the shares of domains in each step: set interleave to 'step', and leave "
                "rollout.task_source out"
            )
        return self

    @model_validator(mode="after")
    def _next_prompts_are_known(self) -> Self:
        if self.algorithm.bootstraps and self.rollout.agent is not None:
            raise ValueError(
                "algorithm.advantage.bootstrap_truncated reads the prompt that would have come next, which "
                f"rollout.agent '{self.rollout.agent}' alone could write: leave one of the two out"
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
        if self.algorithm.needs_greedy and self.rollout.group_reward is not None:
            raise ValueError(
                "algorithm.advantage.baseline 'greedy' compares with an episode that is not of the group, and "
                "rollout.group_reward judges the group's alone: take rollout.reward, or another baseline"
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
        for reason in self.inference.what.refusals(self):
            raise ValueError(reason)
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
        shares = self.backend.in_process and self.cluster.kind == "local"
        if self.inference.sleep_level and self.inference.embedded and not shares:
            raise ValueError(
                f"inference.sleep_level {self.inference.sleep_level}: the embedded engine gives memory back where it "
                "samples with the very weights that are trained (backend.kind torch, cluster.kind local): leave it out"
            )
        return self

    @model_validator(mode="after")
    def _groups_can_be_compared(self) -> Self:
        if self.rollout.group_size > 1 or self.section is not None:
            return self
        advantage, chosen = self.algorithm.advantage, self.algorithm.filter.kind
        if advantage.compares_members:
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

    def _check_summaries(self) -> None:
        """Refuse a context whose summary could not be written, or whose prompts an agent builds itself."""
        above = self.prompt.compact_above
        if above is None:
            return
        if self.rollout.black_box:
            raise ValueError(
                "prompt.context 'compaction' shortens prompts of ours, and rollout.agent makes its own: leave out "
                "prompt.context and prompt.compact_above"
            )
        needed = above + self.rollout.max_new_tokens + (self.prompt.summary_tokens or SUMMARY_TOKENS)
        if needed >= self.model.max_length:
            raise ValueError(
                f"model.max_length {self.model.max_length} leaves no room for a summary: a prompt of "
                f"prompt.compact_above {above} tokens, its reply and a summary take {needed}, and the request for it "
                "more: lower prompt.compact_above or prompt.summary_tokens, or raise model.max_length"
            )

    @model_validator(mode="after")
    def _steps_suffice(self) -> Self:
        if self.section is not None:
            return self
        groups, algorithm = self.rollout.groups_per_step, self.algorithm
        if algorithm.aggregation.unit == "group" and algorithm.minibatches > groups:
            raise ValueError(
                f"algorithm.minibatches {algorithm.minibatches} cuts a step into more parts than its {groups} groups, "
                "and algorithm.aggregation.unit 'group' leaves each whole: lower algorithm.minibatches, or raise "
                "rollout.groups_per_step"
            )
        episodes = groups * self.rollout.group_size
        if algorithm.kl.target is not None and LARGEST_CHANGE * episodes >= algorithm.kl.horizon:
            raise ValueError(
                f"algorithm.kl.horizon {algorithm.kl.horizon} is that of a few episodes, and a step has {episodes}: "
                "the weight would fall to 0 in the first step, where the policy is the reference, and stay there; "
                f"raise it above {math.floor(LARGEST_CHANGE * episodes)}"
            )
        return self

    @model_validator(mode="after")
    def _rows_hold_what_follows(self) -> Self:
        advantage = self.algorithm.advantage
        masks = [name for name in ("gae_mask", "return_mask") if getattr(advantage, name, "skip") == "none"]
        cut = "rows 'step'" if self.rows == "step" else f"prompt.context '{self.prompt.context}'"
        whole = self.rows == "trajectory" and self.prompt.context == "full_history"
        if self.section is None and masks and self.rollout.max_turns > 1 and not whole:
            raise ValueError(
                f"algorithm.advantage.{masks[0]} 'none' discounts row by row, and {cut} cuts episodes into several, so "
                "that no turn would be credited with what follows it: take 'skip', or rows that are whole episodes "
                "(rows: trajectory, prompt.context: full_history)"
            )
        return self

    @model_validator(mode="after")
    def _limited_environments_are_played(self) -> Self:
        if not self.plays or self.rollout.task_source is not None:
            return self
        measured = self.evaluation.sets.values()
        datasets = [*self.datasets, *(each.dataset for each in measured if each.dataset is not None)]
        played = {task.env_id for task in self.tasks} | {each.env_id for each in measured if each.env_id}
        played |= {name for each in datasets for name in each.played_by}
        if unknown := sorted(set(self.rollout.max_concurrent_by_environment) - played):
            raise ValueError(
                f"rollout.max_concurrent_by_environment names '{unknown[0]}', which this run does not play: it plays "
                f"{', '.join(sorted(played))}"
            )
        return self
