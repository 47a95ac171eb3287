"""The base of every settings class: unknown keys are refused with a suggestion, values never change after loading."""

import difflib
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


class Settings(BaseModel):
    """A frozen group of settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _suggest_near_keys(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for key in values:
            if key not in cls.model_fields:
                near = difflib.get_close_matches(str(key), cls.model_fields, n=1)
                hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(cls.model_fields)}"
                raise ValueError(f"unknown key '{key}'; {hint}")
        return values
