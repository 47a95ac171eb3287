"""Learning from a teacher's distributions."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from rollgym.trainer.algorithms.modes import Divergence
from rollgym.trainer.config.server_kinds import ServerName
from rollgym.trainer.config.supervised import LearningFromExamples
from rollgym.trainer.core.strict import Amount, Count, Seconds, ServerUrl, Settings, UserPath


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
        description="What the teacher is told as the user before it reads the reply: {feedback} is what the "
        "environment said after it, {solution} a reply of the same group that solved the task, if there is one.",
    )
    solution: str = Field(
        "A right answer was: {reply}\n", description="How such a reply is told; empty: it is not."
    )
    longest: Count = Field(2048, description="Characters of feedback and of a solution; more is cut.")


class DistillSettings(LearningFromExamples):
    """`roll-train distill`: the student's distributions come nearer to a teacher's."""

    teachers: dict[str, TeacherSettings] = Field({}, description="By names of your own.")
    feedback: FeedbackSettings | None = Field(
        None, description="In place of teachers: the student itself, told what became of its reply."
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
