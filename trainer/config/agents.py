"""How agents that are programs or services reach the policy."""

import os
import re
import shlex
import shutil
import warnings
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, GetCoreSchemaHandler, field_validator
from pydantic_core import core_schema

from rollgym.clients.process.modules import FormerNameWarning
from rollgym.sandbox.core.kinds import SANDBOXES, kind_named
from rollgym.suggestions import alternatives, did_you_mean
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.strict import Count, Seconds, ServerUrl, Settings, UserPath

AgentKind = Literal["coroutine", "service", "program"]

_SANDBOXES = tuple(each for each in SANDBOXES if each.holds_agents)
_NO_SANDBOX = "none"
SANDBOX_NAMES = tuple(name for each in _SANDBOXES for name in each.names)
"""How the sandboxes are named that agents' programs can run in."""
_ATTRIBUTE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def agent_kind(agent: str) -> AgentKind:
    """Return what `rollout.agent` names: a user's coroutine, a service, or a program's command line."""
    if agent.startswith(("http://", "https://")):
        return "service"
    return "coroutine" if _ATTRIBUTE.fullmatch(agent) else "program"


@dataclass(frozen=True, slots=True)
class ToolFormats:
    """An annotation of a name: `auto`, or a format of calls that chat templates write, ours or of a package."""

    @property
    def known(self) -> list[str]:
        """The names that ship."""
        # Readers of replies, which few runs need for their settings.
        from rollgym.clients.replies.formats.table import OURS

        return ["auto", *(form.name for form in OURS if form.template_marks)]

    def names(self) -> list[str]:
        """Return all names, ours first; nothing of a package is imported."""
        from rollgym.clients.replies.formats.table import FORMATS, OURS

        ours = {form.name for form in OURS}
        return [*self.known, *(name for name in FORMATS if name not in ours)]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, core_schema.str_schema())

    def _checked(self, name: str) -> str:
        from rollgym.clients.replies.formats.table import format_named

        names = self.names()
        if name not in names:
            hint = did_you_mean(name, names, 3) or f"there are {', '.join(names)}"
            raise ValueError(f"there is no such format of calls; {hint}")
        if name != "auto":
            format_named(name)
        return name


class AgentsSettings(Settings):
    """The endpoint of `rollout.agent`, if that is a command line or an address."""

    host: str = Field("127.0.0.1", min_length=1, description="Where the endpoint listens.")
    port: int = Field(0, ge=0, le=65_535, description="Its port; 0 takes a free one.")
    public_url: ServerUrl | None = Field(
        None, description="Its address as agents reach it, where that is another one: behind a proxy, say."
    )
    model: str = Field("policy", min_length=1, description="What the policy is called in the API.")
    sampling: Literal["run", "refuse"] = Field(
        "run",
        description="What becomes of an agent's own temperature, top_p and the like: passed over, and named in the "
        "answer's header x-rollgym-ignored, or refused. What is trained has one distribution, the run's. Structured "
        "outputs (response_format) are served by 'run' and refused by 'refuse'.",
    )
    tool_format: Annotated[str, ToolFormats()] = Field(
        "auto",
        description="How the policy's family writes calls of tools; auto reads it off the chat template.",
    )
    concurrency: Count = Field(64, description="Agents at one time; further episodes wait.")
    grace_s: Seconds = Field(
        10.0, description="How long a program may run after it has said that it is done, before it is ended."
    )
    max_body_mb: Count = Field(32, description="Largest request in MiB.")
    environment: dict[str, str] = Field(
        {}, description="Further environment variables of an agent's program."
    )
    sandbox: str = Field(
        _NO_SANDBOX,
        description=f"Where an agent's program runs: '{_NO_SANDBOX}' (as the trainer's user), "
        f"{alternatives([repr(name) for name in SANDBOX_NAMES])}. In a sandbox it reaches the endpoint at 127.0.0.1, "
        "and nothing else.",
    )
    sandbox_read_only: list[UserPath] = Field(
        [],
        description="Files and directories that it sees there, read-only, besides the system's, its interpreter and "
        "the files of its command line: its modules and packages.",
    )
    sandbox_memory_mb: Count = Field(2048, description="MiB of memory of all its processes there.")
    sandbox_disk_mb: Count = Field(
        256, description="MiB of files that it may write there; they go with the episode."
    )

    @field_validator("tool_format", mode="before")
    @classmethod
    def _former_name_is_understood(cls, value: object) -> object:
        if value != "qwen_xml":
            return value
        warnings.warn(
            "agents.tool_format: 'qwen_xml' is called 'qwen-xml' now", FormerNameWarning, stacklevel=2
        )
        return "qwen-xml"

    @field_validator("sandbox")
    @classmethod
    def _sandbox_is_a_boundary(cls, value: str) -> str:
        if value != _NO_SANDBOX and kind_named(value) not in _SANDBOXES:
            raise ValueError(f"'{value}' is none of {', '.join((_NO_SANDBOX, *SANDBOX_NAMES))}")
        return value

    @field_validator("sandbox_read_only")
    @classmethod
    def _shown_paths_are_absolute(cls, value: list[str]) -> list[str]:
        for path in value:
            if not path.startswith("/"):
                raise ValueError(f"'{path}' must be an absolute path: it has the same name in the sandbox")
        return value

    @property
    def sandboxed(self) -> bool:
        """Whether programs run in a sandbox."""
        return self.sandbox != _NO_SANDBOX

    @property
    def runs_images(self) -> bool:
        """Whether programs are those of an image, which may not be on this machine."""
        kind = kind_named(self.sandbox)
        return kind is not None and kind.of_images

    @field_validator("public_url")
    @classmethod
    def _is_http(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError(f"'{value}' is no http address")
        return value


def command_line(agent: str, *, here: bool = True) -> list[str]:
    """Split a command line into its arguments.

    Args:
        agent: The command line.
        here: Whether the program must exist on this machine.

    Raises:
        ConfigError: If its quotes do not match, or the program is not found.
    """
    try:
        # No shell expands `~` here; as in a shell, the `~name` of an unknown user stays unchanged.
        words = [os.path.expanduser(word) for word in shlex.split(agent)]
    except ValueError as error:
        raise ConfigError(f"rollout.agent: {error} in '{agent}'") from error
    if not words or (here and shutil.which(words[0]) is None):
        raise ConfigError(
            f"rollout.agent: '{words[0] if words else agent}' is no program that can be run, no module:attr and no "
            "http address"
        )
    return words
