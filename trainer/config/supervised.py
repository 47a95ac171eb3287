"""Learning from examples, whose replies are imitated or preferred to others, and from a teacher's distributions."""

from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator, model_validator

from rollgym.trainer.algorithms.loss_settings import PreferenceLossSettings
from rollgym.trainer.algorithms.modes import Divergence
from rollgym.trainer.config.data import ExamplesSettings
from rollgym.trainer.config.inference import ServerName
from rollgym.trainer.core.strict import Amount, Count, LearningRate, Seconds, ServerUrl, Settings, UserPath

PLAIN_REPLY = "{action}"
"""A reply that is the action and nothing else."""


class ExpertSettings(Settings):
    """Demonstrations of the environments' experts as examples."""

    demonstrations: Count = Field(description="Expert episodes, of the environments under `tasks`.")
    reply: str = Field(PLAIN_REPLY, description="How the expert's action is written as a reply.")

    @field_validator("reply")
    @classmethod
    def _reply_names_action(cls, value: str) -> str:
        if "{action}" not in value:
            raise ValueError("reply must contain {action}, for example '<answer>{action}</answer>'")
        return value


class WarmStartSettings(ExpertSettings):
    """Supervised start on expert demonstrations that are collected over the wire; none are used after it."""

    epochs: Amount = 4
    batch_rows: Amount = 64
    learning_rate: LearningRate = 2e-3


class LearningFromExamples(Settings):
    """Settings of the passes over the examples."""

    data: list[ExamplesSettings] = Field([], description="The examples, one data set after the other.")
    held_out: list[ExamplesSettings] = Field(
        [], description="Examples that are measured and never learnt from, as `data` has them."
    )
    held_out_every: int = Field(
        25, ge=0, description="Steps between measurements on held_out; 0 measures at the two ends only."
    )
    epochs: Amount | None = Field(
        None, description="Passes over the examples; they take the place of `steps`. Absent: `steps` steps."
    )
    batch: Count = Field(32, description="Examples of one optimizer step.")
    batch_tokens: Amount | None = Field(
        None,
        description="In place of `batch`: a step takes as many examples as have so many tokens, so that steps cost the "
        "same, whatever their examples' lengths.",
    )
    longer: Literal["refuse", "leave_out"] = Field(
        "refuse",
        description="What becomes of examples beyond model.max_length: the first of them is named, or all are left out "
        "and counted.",
    )


class SftSettings(LearningFromExamples):
    """`roll-train sft`: replies are imitated, token by token."""

    roles: list[Literal["assistant", "user", "system", "tool"]] = Field(
        ["assistant"], min_length=1, description="Whose messages are learnt; all others are read only."
    )
    expert: ExpertSettings | None = Field(
        None, description="In place of data: demonstrations of the environments' experts."
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.data) == (self.expert is not None):
            raise ValueError("sft learns either from 'data' or from an 'expert': name one of them")
        if self.expert is not None and self.roles != ["assistant"]:
            raise ValueError(
                "roles: an expert's demonstrations are the assistant's replies, and nothing else of them is learnt: "
                "leave roles out"
            )
        return self


class DpoSettings(LearningFromExamples):
    """`roll-train dpo`: of two replies, the better one becomes likelier."""

    loss: PreferenceLossSettings = PreferenceLossSettings()
    reference: UserPath | None = Field(
        None,
        min_length=1,
        description="What the policy is compared with: a model's folder or name on the hub, `none` (no reference), or "
        "absent: the policy as it begins.",
    )

    @model_validator(mode="after")
    def _examples_are_named(self) -> Self:
        if not self.data:
            raise ValueError("dpo learns from 'data': name at least one data set")
        if self.reference is not None and not self.loss.has_reference:
            raise ValueError(f"loss '{self.loss.kind}' compares with no reference: leave it out")
        if self.reference == "none" and self.loss.needs_reference:
            raise ValueError(
                f"loss '{self.loss.kind}' measures how far the policy is from a reference: leave reference out"
            )
        return self


class RewardModelSettings(LearningFromExamples):
    """`roll-train reward`: a model that gives the better of two replies the higher number (Bradley and Terry)."""

    centre: NonNegativeFloat = Field(
        0.0, description="Weight of the pull of rewards towards zero (2312.09244: 0.01); 0: none."
    )

    @model_validator(mode="after")
    def _examples_are_named(self) -> Self:
        if not self.data:
            raise ValueError("reward learns from 'data': name at least one data set")
        return self


class TeacherSettings(Settings):
    """One teacher model, and the domains that it teaches."""

    path: UserPath | None = Field(None, min_length=1, description="A model's folder, or its name on the hub.")
    url: ServerUrl | None = Field(
        None, description="In place of a path: an inference server that gives prompts' log-probabilities."
    )
    dialect: ServerName = Field("vllm", description="What that server speaks.")
    api_key_variable: str | None = Field(
        None, description="Environment variable with the key of that server; absent: it asks for none."
    )
    timeout_s: Seconds = Field(300.0, description="How long that server may take for one row.")
    domains: list[str] = Field(
        [],
        description="Domains that it teaches: of tasks, or the examples' column `domain`. Empty: all others.",
    )

    @model_validator(mode="after")
    def _is_somewhere(self) -> Self:
        if (self.path is None) == (self.url is None):
            raise ValueError("a teacher is either at a 'path' or at a 'url'")
        unread = self.changed("api_key_variable", "dialect", "timeout_s")
        if self.url is None and unread:
            raise ValueError(f"{', '.join(unread)}: read where the teacher is at a 'url' only: leave it out")
        return self


class FeedbackSettings(Settings):
    """The student as its own teacher, which has seen the reply's outcome (SDPO, arXiv:2601.20802)."""

    text: str = Field(
        "What followed that answer: {feedback}\n{solution}Answer again.",
        description="User message to the teacher before it reads the reply: {feedback} is what the environment said "
        "after the reply, {solution} a reply of the same group that solved the task, if there is one.",
    )
    solution: str = Field(
        "A right answer was: {reply}\n",
        description="Form of such a reply in the message; empty: it is left out.",
    )
    longest: Count = Field(2048, description="Characters of feedback and of a solution; more is cut.")


class DistillSettings(LearningFromExamples):
    """`roll-train distill`: the student's distributions come nearer to a teacher's."""

    teachers: dict[str, TeacherSettings] = Field({}, description="By names of your own.")
    feedback: FeedbackSettings | None = Field(
        None, description="In place of teachers: the student itself, which reads the outcome of its reply."
    )
    divergence: Divergence = Field("reverse_kl", description="What is made small at every token.")
    weight: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        0.5, description="Of the mixture in jsd and the skewed divergences (DistiLLM: 0.1)."
    )
    estimate: Literal["full", "top_k", "sampled"] = Field(
        "full",
        description="Over which tokens: the whole vocabulary, the teacher's likeliest `top_k` and all others as one, "
        "or the sampled token alone (reverse_kl on the student's own tokens).",
    )
    top_k: Amount = Field(64, description="Of estimate top_k.")
    temperature: PositiveFloat = Field(1.0, description="Divides the logits of teacher and student.")
    likelihood: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        0.0,
        description="With data: share of the examples' own negative log-likelihood in the loss (ROLL: 0.5).",
    )
    largest_ratio: PositiveFloat = Field(
        5.0, description="estimate sampled: bound of the weight of tokens that an older student sampled."
    )

    @property
    def on_policy(self) -> bool:
        """Whether the student's own tokens are learnt from, and not examples."""
        return not self.data

    @model_validator(mode="after")
    def _has_a_teacher(self) -> Self:
        if bool(self.teachers) == (self.feedback is not None):
            raise ValueError(
                "distill needs either 'teachers' or 'feedback', which has the student teach itself"
            )
        if sum(not teacher.domains for teacher in self.teachers.values()) > 1:
            raise ValueError("several teachers without 'domains': only one of them can teach all others")
        named = [domain for teacher in self.teachers.values() for domain in teacher.domains]
        if twice := sorted({domain for domain in named if named.count(domain) > 1}):
            raise ValueError(f"domain {twice[0]} has two teachers: name it at one of them")
        return self

    @model_validator(mode="after")
    def _estimate_is_possible(self) -> Self:
        served = any(teacher.url for teacher in self.teachers.values())
        if served and self.estimate != "sampled":
            raise ValueError(
                f"estimate '{self.estimate}' needs the teachers' models here, and a 'url' scores tokens: take 'sampled'"
            )
        if self.estimate == "sampled" and (self.divergence != "reverse_kl" or not self.on_policy):
            raise ValueError(
                "estimate 'sampled' is of the reverse_kl on the student's own tokens: leave data and divergence out, "
                "or take 'full' or 'top_k'"
            )
        if self.feedback is not None and self.estimate != "sampled":
            raise ValueError("feedback estimates by the sampled tokens: set estimate to 'sampled'")
        return self

    @model_validator(mode="after")
    def _numbers_are_read(self) -> Self:
        mixes = self.divergence in ("jsd", "skewed_forward_kl", "skewed_reverse_kl")
        unread = {
            "weight": not mixes,
            "top_k": self.estimate != "top_k",
            "temperature": self.estimate == "sampled",
            "largest_ratio": self.estimate != "sampled",
            "likelihood": self.on_policy,
            "held_out": self.on_policy,
            "held_out_every": self.on_policy,
            "epochs": self.on_policy,
            "batch": self.on_policy,
            "batch_tokens": self.on_policy,
            "longer": self.on_policy,
        }
        for name, odd in unread.items():
            if odd and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is not read with these settings of distill: leave it out")
        return self
