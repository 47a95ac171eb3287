"""A prompt of one's own: `prompt.custom_context=examples.extensions.context:last_two`."""


def last_two(history, observation):
    """Show the policy the last two turns, whatever came before.

    Args:
        history: The turns so far: `observation`, which are messages, and `reply`.
        observation: The messages of this turn.

    Returns:
        The messages of the prompt.
    """
    messages = []
    for turn in history[-2:]:
        messages += [*turn.observation, {"role": "assistant", "content": turn.reply}]
    return [*messages, *observation]
