"""Playing many episodes at once."""

import time

from rollgym.clients.audit.arena import Arena, PlannedEpisode, Watch
from rollgym.clients.audit.policies import constant_policy, script_policy
from rollgym.clients.client.client import EnvClient
from tests.support.client_envs import Walk
from tests.support.client_server import ServerProcess

RIGHT = constant_policy("right")


async def test_episodes_are_those_of_local_play_in_the_order_of_the_games(server: ServerProcess) -> None:
    seeds = list(range(20))
    async with EnvClient(server.url) as client:
        arena = Arena(client, "Walk-v0", {}, Watch(), 200)
        played = await arena.play([PlannedEpisode(RIGHT, seed) for seed in seeds], width=7)
    assert [episode.seed for episode in played] == seeds
    for episode in played:
        env = Walk()
        env.reset(seed=episode.seed)
        ended, rewards = False, []
        while not ended:
            _, reward, ended, *_ = env.step("right")
            rewards.append(reward)
        assert [mark.reward for mark in episode.marks[1:]] == rewards
        assert episode.ended
        assert episode.solved


async def test_a_deadline_favours_no_short_episodes(server: ServerProcess) -> None:
    """The first game is not over, so that nothing is kept, although all others are."""
    games = [
        PlannedEpisode(RIGHT, 0),
        *(PlannedEpisode(script_policy(["right"]), seed) for seed in range(1, 50)),
    ]
    async with EnvClient(server.url) as client:
        arena = Arena(client, "Walk-v0", {"risk": 0}, Watch(), 1_000_000)
        deadline = time.monotonic() + 1.0
        assert await arena.play(games, width=2, deadline=deadline) == []
        rest = await arena.play(games[1:], width=2)
    assert len(rest) == 49


async def test_a_step_that_fails_ends_its_episode_only(server: ServerProcess) -> None:
    watch = Watch()
    async with EnvClient(server.url) as client:
        arena = Arena(client, "Walk-v0", {"risk": 0}, watch, 5)
        games = [
            PlannedEpisode(script_policy(["right", "raise", "right"]), 0),
            PlannedEpisode(RIGHT, 1),
            PlannedEpisode(RIGHT, 2),
        ]
        played = await arena.play(games, width=1)
    assert played[0].problem is not None
    assert played[0].problem.code == "env_error"
    assert [episode.steps for episode in played] == [1, 5, 5]
    assert "as you wish" in watch.first("broke off")
