"""Templates: what a judge is asked, as data."""

import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rollgym.clients.protocol.yaml_text import read_yaml
from rollgym.envs.verifiers.judging.verdicts import Reading
from rollgym.user_paths import expand_user

_PLACE = re.compile(r"\{\{(\w+)\}\}")
_CANDIDATE = frozenset({"candidate", "first", "second"})


class Template(BaseModel):
    """What a judge is asked, and how its verdict is read.

    Attributes:
        fields: Fields that a task must have.
        optional: Fields that it may have; they are empty where it has not.
        swap: Whether the judge is asked twice, with candidate and reference in either order.
        system: The judge's instructions.
        user: What it judges.
        verdict: How its reply is read.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    fields: tuple[str, ...]
    optional: tuple[str, ...] = ()
    swap: bool = False
    system: str = Field(min_length=1)
    user: str = Field(min_length=1)
    verdict: Reading

    @model_validator(mode="after")
    def _places(self) -> "Template":
        places = set(_PLACE.findall(self.user))
        fields = {*self.fields, *self.optional}
        if self.swap and "reference" not in self.fields:
            raise ValueError("a template that swaps needs the field reference")
        wanted = fields - {"reference"} | {"first", "second"} if self.swap else fields | {"candidate"}
        if places != wanted:
            raise ValueError(f"`user` needs the places {', '.join(sorted(wanted))}, and no others")
        if set(_PLACE.findall(self.system)) != {"nonce"}:
            raise ValueError("`system` needs the place nonce, and no other: it tells data from instructions")
        return self

    @property
    def digest(self) -> str:
        """What tells it from other templates, whatever they are called."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    def messages(
        self, fields: Mapping[str, str], candidate: str, nonce: str, *, swapped: bool = False
    ) -> list[dict[str, str]]:
        """Return the messages to a judge.

        Args:
            fields: The task's, as text.
            candidate: The answer to judge.
            nonce: In the markers; whoever wrote the texts cannot know it.
            swapped: Whether the candidate comes second.
        """
        texts = {**dict.fromkeys(self.optional, ""), **fields, "candidate": candidate}
        if self.swap:
            pair = (texts["reference"], candidate) if swapped else (candidate, texts["reference"])
            texts |= dict(zip(("first", "second"), pair, strict=True))

        def fenced(place: re.Match[str]) -> str:
            name = "answer" if place[1] in _CANDIDATE else place[1]
            return f"<{name}-{nonce}>\n{texts[place[1]]}\n</{name}-{nonce}>"

        # In one pass: what stands in a text is no place.
        return [
            {"role": "system", "content": _PLACE.sub(nonce, self.system)},
            {"role": "user", "content": _PLACE.sub(fenced, self.user)},
        ]


@cache
def shipped_templates() -> Mapping[str, Template]:
    """Return the templates that come with the project, by name."""
    text = resources.files(__package__).joinpath("templates.yaml").read_text(encoding="utf-8")
    return MappingProxyType(read_templates(text, "templates.yaml"))


def templates_of(file: str | None) -> Mapping[str, Template]:
    """Return the shipped templates and those of an operator's file, which win.

    Raises:
        ValueError: The file cannot be read, or is not what it should be.
    """
    if file is None:
        return shipped_templates()
    try:
        text = Path(expand_user(file)).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ValueError(f"templates_file cannot be read: {error}") from error
    return {**shipped_templates(), **read_templates(text, "templates_file")}


def read_templates(text: str, name: str) -> dict[str, Template]:
    """Read templates from YAML.

    Raises:
        ValueError: It is none, or a template is not what it should be.
    """
    try:
        found = read_yaml(text, name)
    except yaml.YAMLError as error:
        raise ValueError(f"{name} is no YAML: {error}") from error
    if not isinstance(found, Mapping):
        raise ValueError(f"{name} must map names to templates")
    templates = {}
    for key, value in found.items():
        try:
            templates[str(key)] = Template.model_validate(value)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"template {key!r} of {name}: {where} {first['msg']}".strip()) from error
    return templates
