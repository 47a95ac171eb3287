"""An agent of one's own: `rollout.agent=examples.extensions.agent:two_tries`."""

from rollgym import play_episode


async def two_tries(session, task, member, actor, max_turns, attempt):
    """Play with the policy as the built-in agent does, for at most half of the turns.

    Args:
        session: The environment: `reset` and `step`.
        task: What is played.
        member: Which of the group's episodes this is.
        actor: Asks the policy, and writes the record.
        max_turns: Turns after which an episode is truncated.
        attempt: How often this episode failed before.

    Returns:
        The Trajectory.
    """
    return await play_episode(session, task, member, actor, max(1, max_turns // 2), attempt)
