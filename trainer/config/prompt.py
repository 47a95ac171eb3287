"""What of an episode the policy is shown."""

from typing import Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from trainer.core.strict import JsonObject, Settings

_SET_BY_US = frozenset({"conversation", "tools", "tokenize", "add_generation_prompt", "return_dict"})


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
