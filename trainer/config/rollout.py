"""Settings of the episodes that are played for training, and of the worked turns that their prompts show first."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Discriminator, Field, Tag, TypeAdapter, ValidationError, field_validator, model_validator

from rollgym.clients.protocol.yaml_text import read_yaml
from rollgym.trainer.config.agents import agent_kind
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.strict import (
    Amount,
    Count,
    JsonObject,
    Seconds,
    ServerUrl,
    Settings,
    UserPath,
    Weight,
)

_KEY = "prompt.examples"
_LARGEST = 2**20
_MOST = 1000


class ExampleMessage(Settings):
    """A message of a worked turn."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = Field("", description="Its text.")
    tool_calls: list[JsonObject] | None = Field(
        None, description="Calls of tools, for chat templates that write them."
    )
    tool_call_id: str | None = Field(None, description="Which call a tool's message answers.")
    name: str | None = Field(None, description="Name of the tool that answers.")


def _form(value: Any) -> str:
    return "str" if isinstance(value, str) else "list"


ExampleMessages = Annotated[list[ExampleMessage], Field(min_length=1, max_length=_MOST)]
# Which of the two is meant is plain from the value: an error in a message is reported for the message alone.
WorkedExamples = Annotated[
    Annotated[ExampleMessages, Tag("list")] | Annotated[UserPath, Tag("str")], Discriminator(_form)
]
_MESSAGES: TypeAdapter[list[ExampleMessage]] = TypeAdapter(ExampleMessages)


def read_examples(
    examples: Sequence[ExampleMessage] | str | None, placement: str
) -> Sequence[ExampleMessage]:
    """Return the messages of worked turns.

    Args:
        examples: The messages, or the file that holds them, in YAML or JSON; None without examples.
        placement: Place of the environment's instruction (`prompt.instruction`).

    Raises:
        ConfigError: If a file cannot be read, or the messages are not whole turns.
    """
    if examples is None:
        return ()
    messages = _in_file(Path(examples)) if isinstance(examples, str) else examples
    where = f"{_KEY}: {examples}" if isinstance(examples, str) else _KEY
    if problem := _problem(messages, placement):
        raise ConfigError(f"{where}: {problem}")
    return messages


def _problem(messages: Sequence[ExampleMessage], placement: str) -> str | None:
    roles = [each.role for each in messages]
    if roles[0] == "system" and placement == "system":
        return (
            "it begins with a system message, and the environment's instruction would be another: set "
            "prompt.instruction to none or first_user, or leave the system message out"
        )
    turns = roles[1:] if roles[0] == "system" else roles
    if "system" in turns:
        return "a system message can only be the first"
    if not turns or turns[0] != "user" or turns[-1] != "assistant":
        return "worked turns begin with a message of the user, and end with one of the assistant"
    empty = next(
        (index for index, each in enumerate(messages) if not (each.content or each.tool_calls)), None
    )
    return None if empty is None else f"message {empty} says nothing: give it a content"


def _in_file(path: Path) -> list[ExampleMessage]:
    try:
        if not os.path.isfile(path):  # a pipe would be waited for, perhaps for ever
            raise ConfigError(
                f"{_KEY}: there is no file {path}; paths are taken from the directory of the command"
            )
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise ConfigError(f"{_KEY}: {path} is larger than the examples of a prompt can be")
        values = read_yaml(content.decode(), path.name)
    except OSError as error:
        raise ConfigError(f"{_KEY}: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{_KEY}: {path} is not text in UTF-8: {error.reason}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{_KEY}: {path} is neither YAML nor JSON: {error}") from error
    try:
        return _MESSAGES.validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{_KEY}: {path}: {place + ': ' if place else ''}{first['msg']}") from error


SUMMARY_TOKENS = 256
"""Longest summary of a policy that compacts its context, by default."""

SUMMARY_REQUEST = (
    "Your context is nearly full. Write a summary of the episode so far: what you were asked to do, what you have "
    "done, what you have learnt, and what is left to do. The first message and the latest one stay; of all between "
    "them you will see this summary alone."
)
"""The request for such a summary, by default."""

_OF_COMPACTION = ("compact_above", "summary_tokens", "summary_request")
_SET_BY_US = frozenset({"conversation", "tools", "tokenize", "add_generation_prompt", "return_dict"})


class PromptSettings(Settings):
    """The parts of an episode that the policy is shown."""

    context: Literal["full_history", "last_turns", "single_turn", "compaction"] = Field(
        "full_history",
        description="With `compaction` the policy writes a summary if its context grows too long, and continues with "
        "the first observation, the summary and the latest observation.",
    )
    turns: Amount | None = Field(
        None, description="Turns that `last_turns` keeps, the current one included; 3 if absent."
    )
    compact_above: Amount | None = Field(
        None,
        description="Tokens of a prompt above which the policy is asked for a summary first; `compaction` needs it.",
    )
    summary_tokens: Amount | None = Field(
        None, description=f"Longest summary of `compaction`, in tokens; {SUMMARY_TOKENS} if absent."
    )
    summary_request: str | None = Field(
        None,
        min_length=1,
        description="What `compaction` asks the policy for a summary with; a text of ours if absent.",
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
    chat_template: UserPath | None = Field(
        None,
        min_length=1,
        description="File with a Jinja template that replaces the tokenizer's, such as one that keeps the thoughts of "
        "earlier turns where the model's own drops them. It is saved with the tokenizer.",
    )
    examples: WorkedExamples | None = Field(
        None,
        description="A few worked turns that every prompt shows before the episode: messages (role, content), or a "
        "YAML or JSON file with a list of them. A system message among them, the first, needs another `instruction` "
        "than `system`.",
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
        named = [name for name in _OF_COMPACTION if getattr(self, name) is not None]
        if named and self.context != "compaction":
            raise ValueError(
                f"{named[0]} is read by context 'compaction' only, not by '{self.context}': set that, or leave "
                f"{named[0]} out"
            )
        if self.context == "compaction" and self.compact_above is None:
            raise ValueError(
                "context 'compaction' does not know when to ask for a summary: set prompt.compact_above, in tokens"
            )
        if self.custom_context is not None and self.context != "full_history":
            raise ValueError(
                f"custom_context takes the place of context '{self.context}': leave out one of them"
            )
        return self


class TaskSettings(Settings):
    """One environment of the mixture that a run plays."""

    env_id: str = Field(min_length=1)
    kwargs: JsonObject = Field({}, description="What the environment is made with.")
    options: JsonObject | None = Field(None, description="Options of every reset.")
    weight: Weight = Field(1.0, description="Share of the tasks, relative to the other entries.")
    domain: str = Field("", description="Name in the metrics; the environment's id if empty.")
    url: ServerUrl | None = Field(None, description="Server of this entry; the run's default if absent.")


class CurriculumSettings(Settings):
    """Shares of domains that follow the policy's success: more of what it solves now and then."""

    smoothing: float = Field(
        0.9, ge=0.0, lt=1.0, description="Of the running mean of a domain's success: what it keeps each step."
    )
    floor: float = Field(
        0.1, gt=0.0, le=1.0, description="Smallest factor of a domain's weight; 1 leaves weights as they are."
    )


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
        description="Groups that are started beyond those that a step needs. When the step is full, those that are due "
        "and not ready are stopped. When groups_per_step of them are aside, they start again, in a round that waits "
        "for them. All lengths are trained, long ones later; their first samples are discarded.",
    )
    max_turns: Amount = 30
    max_new_tokens: Amount = 64
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
        300.0, description="How long the run waits for a server that is gone; then it is saved and ends."
    )
    max_attempts: Amount = Field(3, description="Attempts at an episode before its group is dropped.")
    max_failed_groups: Count = Field(
        8,
        description="Groups of one environment that may be dropped in a row because it fails; one more ends the run.",
    )
    max_steps_without_learning: Count | None = Field(
        200,
        description="Steps in a row with nothing to learn from (no optimizer step, all episodes paid alike, or replies "
        "that no longer differ) after which the run ends, if the policy is not better than at first. Steps whose "
        "episodes are all solved do not count; null: it never ends for that. A policy that solves a share p of its "
        "episodes is ended by chance with a probability of about (1 - p) to the number of episodes in these steps: "
        "with 64 a step and p 0.001, three times in a million. Raise it if steps have fewer episodes.",
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
        description="What the sampled tokens of running episodes survive, so that a resumed run continues with them: "
        "nothing, a kill of the trainer's process, or a crash of the machine (every reply waits for the disk).",
    )
    agent: str | None = Field(
        None,
        min_length=1,
        description="Who plays in place of ours: module:attr of a coroutine, the command line of a program that is run "
        "for each episode, or the http address of a service. The latter two reach the policy by OpenAI's API.",
    )
    reward: str | None = Field(
        None, description="module:attr of a function or coroutine: Trajectory -> list of turn rewards."
    )
    group_reward: str | None = Field(
        None,
        description="module:attr of a function or coroutine over a whole group: list of Trajectory -> for each a "
        "list of turn rewards. It has episode_timeout_s for it.",
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
