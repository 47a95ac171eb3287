"""A policy that sums up its history: summaries are turns of its own, and the environment never hears of them."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator

import pytest

from rollgym.trainer.config.rollout import SUMMARY_REQUEST, PromptSettings
from rollgym.trainer.inference.base import SamplingParams
from rollgym.trainer.inference.engine.torch_engine import TorchEngine
from rollgym.trainer.learn.batches import step_rows, trajectory_rows
from rollgym.trainer.models.tiny import TinyPolicySettings, build_tiny_model
from rollgym.trainer.records.rollout_log import RolloutLog
from rollgym.trainer.records.trajectory import PrefixBreak, Trajectory, TrajectoryOutcome
from rollgym.trainer.rollout.actors import ModelActor
from rollgym.trainer.rollout.context import context_policy
from rollgym.trainer.rollout.environments import EnvironmentPool
from rollgym.trainer.rollout.episodes import EpisodePlayer
from rollgym.trainer.rollout.log_replay import LoggedClient as RecallingClient
from rollgym.trainer.rollout.log_replay import LogReplay
from rollgym.trainer.rollout.prompts import ChatRenderer, PromptBuilder
from rollgym.trainer.tasks.task import Task
from tests.support.agent_policy import LoggedClient, ScriptedPolicy, assert_recorded
from tests.support.chat_templates import tokenizer_of
from tests.support.processes import env_server, read_lines, train, train_until

TOKENIZER = tokenizer_of("qwen2.5")
RENDERER = ChatRenderer(TOKENIZER)
LAKE = Task(5, "FrozenLake-v0", 7, {"size": 4, "max_episode_steps": 6})
REQUEST = "Sum up what you did."
ASKED = f"<|im_end|>\n<|im_start|>user\n{REQUEST}<|im_end|>\n<|im_start|>assistant\n"
ROOM = 2000


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with env_server("--allow-expert") as address:
        yield address


@pytest.fixture
async def pool(url: str) -> AsyncIterator[EnvironmentPool]:
    async with EnvironmentPool(url, None, "msgpack", timeout_s=20.0) as pool:
        yield pool


def settings_of(above=120, tokens=16, request=REQUEST, **others) -> PromptSettings:
    return PromptSettings(
        context="compaction",
        compact_above=above,
        summary_tokens=tokens,
        summary_request=request,
        instruction="none",
        **others,
    )


def player_of(
    pool, client, settings=None, *, log_replay=None, max_turns=6, max_length=ROOM, renderer=RENDERER
) -> EpisodePlayer:
    settings = settings or settings_of()

    def actor() -> ModelActor:
        prompts = PromptBuilder(renderer, context_policy(settings), settings)
        sampling = SamplingParams(max_new_tokens=16, stop_token_ids=renderer.stop_token_ids)
        return ModelActor(client, prompts, sampling, max_length, 3, "train")

    return EpisodePlayer(pool, actor, max_turns, log_replay=log_replay)


async def play(pool, client, settings=None, task=LAKE, **others) -> Trajectory:
    async with asyncio.timeout(60):
        return await player_of(pool, client, settings, **others).play(task, 0, 0)


def mover(summary="I walked."):
    """A policy that walks in circles, and sums up where it is asked to."""
    moves = itertools.cycle(["Right", "Down", "Left", "Up"])
    return lambda prompt: summary if prompt.endswith(ASKED) else f"<answer>{next(moves)}</answer>"


def rendered(*contents: str) -> list[int]:
    """The ids of a conversation in which user and assistant take turns."""
    roles = itertools.cycle(["user", "assistant"])
    return RENDERER.prompt(
        [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    )


async def test_a_summary_takes_the_place_of_the_history(pool):
    policy = ScriptedPolicy(TOKENIZER, mover())
    trajectory = await play(pool, policy)
    assert_recorded(trajectory, policy.log)
    assert (trajectory.outcome, len(trajectory.steps)) == (TrajectoryOutcome.TRUNCATED, 6), (
        "summaries are no steps"
    )
    assert trajectory.summaries == len(trajectory.segments) - 1 > 1
    assert [each.prefix_break for each in trajectory.segments] == [None] + [
        PrefixBreak.SUMMARY
    ] * trajectory.summaries
    boards = [turn.observation for turn in trajectory.steps]
    assert len(set(boards)) > 1
    for place, turn in enumerate(trajectory.turns):
        segment = trajectory.segments[turn.segment]
        assert set(segment.turn_index[turn.start : turn.end]) == {place}
        if not turn.is_summary:
            assert turn.anchor is not None
            continue
        assert (turn.observation, turn.reply, turn.reward) == (REQUEST, "I walked.", 0.0)
        after = trajectory.turns[place + 1]
        assert (after.segment, after.is_summary) == (turn.segment + 1, False)
        opened = trajectory.segments[after.segment]
        assert opened.ids[: after.start] == rendered(boards[0], "I walked.", after.observation)
        # It was asked before the board was shown that it does not replace.
        asked = TOKENIZER.decode(segment.ids[: turn.start])
        before = trajectory.turns[place - 1]
        assert asked.endswith(f"{before.observation}<|im_end|>\n<|im_start|>assistant\n{before.reply}{ASKED}")


async def test_only_contexts_that_are_too_long_are_summed_up(pool):
    policy = ScriptedPolicy(TOKENIZER, mover())
    whole = await play(pool, policy, PromptSettings(instruction="none"))
    assert whole.summaries == 0
    longest = max(len(request.prompt_ids) for request, _ in policy.log.calls)
    assert await play(pool, ScriptedPolicy(TOKENIZER, mover()), settings_of(above=longest)) == whole
    compacted = await play(pool, ScriptedPolicy(TOKENIZER, mover()), settings_of(above=longest - 1))
    assert [turn.is_summary for turn in compacted.turns] == [False] * 5 + [True, False]
    assert [turn.reply for turn in compacted.steps] == [turn.reply for turn in whole.turns]


async def test_the_text_of_the_request_is_ours_where_settings_do_not_say(pool):
    policy = ScriptedPolicy(TOKENIZER, lambda prompt: "<answer>Right</answer>")
    trajectory = await play(pool, policy, settings_of(request=None))
    asked = [turn.observation for turn in trajectory.turns if turn.is_summary]
    assert set(asked) == {SUMMARY_REQUEST}


@pytest.mark.parametrize("nothing", ["", "  \n"])
async def test_an_empty_summary_stands_for_nothing(pool, nothing):
    trajectory = await play(pool, ScriptedPolicy(TOKENIZER, mover(nothing)))
    assert trajectory.summaries > 0
    place = next(place for place, turn in enumerate(trajectory.turns) if turn.is_summary)
    assert trajectory.turns[place].end > trajectory.turns[place].start, (
        "what it sampled is trained all the same"
    )
    after = trajectory.turns[place + 1]
    assert trajectory.segments[after.segment].ids[: after.start] == RENDERER.prompt(
        [{"role": "user", "content": board} for board in (trajectory.turns[0].observation, after.observation)]
    )


async def test_a_summary_that_is_cut_stands_as_far_as_it_goes(pool):
    policy = ScriptedPolicy(TOKENIZER, mover("I walked and walked and walked."))
    trajectory = await play(pool, policy, settings_of(tokens=5))
    place = next(place for place, turn in enumerate(trajectory.turns) if turn.is_summary)
    summary, after = trajectory.turns[place : place + 2]
    assert summary.finish_reason == "length"
    assert summary.end - summary.start == 5
    assert 0 < len(summary.reply) < len("I walked and walked and walked.")
    assert trajectory.segments[after.segment].ids[: after.start] == rendered(
        trajectory.turns[0].observation, summary.reply, after.observation
    )
    assert {request.sampling.max_new_tokens for request, _ in policy.log.calls} == {16, 5}


async def test_a_summary_without_room_ends_the_episode_as_other_prompts_do(pool):
    trajectory = await play(pool, ScriptedPolicy(TOKENIZER, mover()), max_length=140)
    assert trajectory.outcome is TrajectoryOutcome.CONTEXT_OVERFLOW
    assert "the request for a summary before turn" in trajectory.detail
    assert "passes model.max_length 140" in trajectory.detail


async def test_every_turn_is_a_segment_where_the_template_rewrites_the_past(pool):
    tokenizer = tokenizer_of("qwen3")
    renderer = ChatRenderer(tokenizer)
    assert not renderer.append_only
    policy = ScriptedPolicy(tokenizer, mover("<think>hm</think>I walked."))
    trajectory = await play(pool, policy, settings_of(tokens=30), renderer=renderer)
    assert_recorded(trajectory, policy.log)
    place = next(place for place, turn in enumerate(trajectory.turns) if turn.is_summary)
    after = trajectory.turns[place + 1]
    prompt = tokenizer.decode(trajectory.segments[after.segment].ids[: after.start])
    assert "<|im_start|>assistant\nI walked.<|im_end|>" in prompt, (
        "what it thought is left out, as of any turn"
    )
    assert trajectory.segments[after.segment].prefix_break is PrefixBreak.SUMMARY


async def test_the_same_seed_gives_the_same_episode_with_a_real_engine(pool):
    shape = TinyPolicySettings(len(TOKENIZER), hidden_size=16, layers=1, heads=2, max_length=ROOM)
    model = build_tiny_model(shape, 0)
    async with TorchEngine(model, max_rows=4, max_length=ROOM) as engine:
        client = LoggedClient(engine)
        first = await play(pool, client)
        assert_recorded(first, client.log)
        assert len(first.segments) > 2
        assert first.summaries == len(first.segments) - 1
        requests = [request for request, _ in client.log.calls]
        assert len({request.seed for request in requests}) == len(requests)
        assert len({request.request_id for request in requests}) == len(requests)
    # To the bit only where as much is known of prompts before: behind what is known, sums are of other shapes.
    async with TorchEngine(model, max_rows=4, max_length=ROOM) as another:
        assert await play(pool, another) == first
    assert Trajectory.from_record(json.loads(json.dumps(first.as_record()))) == first


async def test_summaries_are_trained_as_other_turns_are(pool):
    trajectory = await play(pool, ScriptedPolicy(TOKENIZER, mover()))
    rows = trajectory_rows(0, trajectory)
    assert len(rows) == len(trajectory.segments)
    assert len({row.sequence for row in rows}) == 1, "segments are one sequence of the loss"
    trained = {turn for row in rows for turn, flag in zip(row.turn_index, row.mask, strict=True) if flag}
    assert trained == set(range(len(trajectory.turns)))
    assert len(step_rows(0, trajectory)) == len(trajectory.turns)


class KilledError(Exception):
    """The process ends here."""


class Mortal(ScriptedPolicy):
    """A policy whose process is killed after so many replies."""

    left = 10**6

    async def generate(self, request):
        if self.left == 0:
            raise KilledError
        self.left -= 1
        return await super().generate(request)


@pytest.mark.parametrize("replies", range(1, 8))
async def test_an_episode_goes_on_with_the_summaries_that_the_log_has(tmp_path, pool, replies):
    whole = await play(pool, ScriptedPolicy(TOKENIZER, mover()))
    folder = tmp_path / "log"

    def recall_of() -> LogReplay:
        return LogReplay(RolloutLog(folder, durable=False, say=pytest.fail))

    script = mover()
    first, log_replay = Mortal(TOKENIZER, script), recall_of()
    first.left = replies
    with pytest.raises(KilledError):
        await play(pool, RecallingClient(first, log_replay), log_replay=log_replay)
    log_replay.log.close()
    second, log_replay = ScriptedPolicy(TOKENIZER, script), recall_of()
    resumed = await play(pool, RecallingClient(second, log_replay), log_replay=log_replay)
    assert resumed == whole
    assert log_replay.counters["replies"] == replies
    assert len(second.log.calls) == len(whole.turns) - replies, "nothing is drawn twice"
    log_replay.log.close()


def members_differ(trajectory):
    """Rewards that differ in every group: a policy that begins from noise earns none that do."""
    return [trajectory.member * 0.1 for _ in trajectory.turns]


CONFIG = """
seed: 3
steps: 3
threads: 1
deterministic: true
tasks:
  - {env_id: FrozenLake-v0, kwargs: {size: 4, split: train, max_episode_steps: 6, format_penalty: -0.1}}
model: {hidden_size: 32, layers: 1, heads: 2, max_length: 256}
prompt: {context: compaction, compact_above: 70, summary_tokens: 4, instruction: none}
rollout: {groups_per_step: 2, group_size: 3, max_turns: 6, max_new_tokens: 3}
evaluation:
  every: 0
  sets:
    lake: {env_id: FrozenLake-v0, kwargs: {size: 4, split: test, max_episode_steps: 6}, episodes: 4}
checkpoint: {every: 1, resume: auto}
tracking: {tensorboard: false, digests: true}
"""


@pytest.mark.slow
def test_a_run_trains_summaries_and_its_records_are_played_and_replayed(tmp_path, url):
    (tmp_path / "run.yaml").write_text(CONFIG)
    common = ["--config", str(tmp_path / "run.yaml"), "--env-url", url]
    train(*common, f"output_dir={tmp_path}/run")
    episodes = [Trajectory.from_record(line) for line in read_lines(tmp_path / "run" / "episodes.jsonl")]
    assert all(len(each.segments) > 1 and each.summaries > 0 for each in episodes)
    for each in episodes:
        shares = {tuple(turn.advantages) for turn in each.turns}
        assert len({value for share in shares for value in share}) == 1, "segments share the episode's reward"
    for line in read_lines(tmp_path / "run" / "metrics.jsonl"):
        if "rollout/turns" in line:
            of_step = [each for each in episodes if each.task.index // 2 == line["step"] - 1]
            assert line["rollout/turns"] == pytest.approx(
                sum(len(each.steps) for each in of_step) / len(of_step)
            )
            assert line["rollout/prefix_breaks_summary"] > 0
            assert line["rollout/turns"] <= 6
    again = tmp_path / "again.jsonl"
    words = [
        "--policy",
        "recorded",
        "--recorded",
        f"{tmp_path}/run/episodes.jsonl",
        "--output",
        str(again),
        "--episodes",
        "18",
    ]
    train("rollout", *words, *common)
    for before, after in zip(episodes, map(Trajectory.from_record, read_lines(again)), strict=True):
        assert [turn.reply for turn in before.steps] == [turn.reply for turn in after.turns]
        assert before.total_reward == after.total_reward
    output = train("replay", str(tmp_path / "run"), "--from-start", "--step", "0", "--step", "1")
    assert output.count("as recorded") == 2


@pytest.mark.slow
@pytest.mark.exhaustive
def test_deterministic_runs_with_summaries_are_equal_and_killed(tmp_path, url):
    (tmp_path / "run.yaml").write_text(CONFIG)
    reward = f"rollout.reward={__name__}:members_differ"
    common = ["--config", str(tmp_path / "run.yaml"), "--env-url", url, reward]
    train(*common, f"output_dir={tmp_path}/whole")
    expected = read_lines(tmp_path / "whole" / "digests.jsonl")
    assert len({line["weights"] for line in expected}) == 3
    train(*common, f"output_dir={tmp_path}/same", fresh=True)
    assert read_lines(tmp_path / "same" / "digests.jsonl") == expected
    killed = [*common, f"output_dir={tmp_path}/killed"]
    train_until("step 2:", *killed)
    assert "resuming" in train(*killed, fresh=True)
    assert read_lines(tmp_path / "killed" / "digests.jsonl") == expected
    output = train(
        "replay", str(tmp_path / "killed"), "--from-start", "--step", "0", "--step", "1", "--step", "2"
    )
    assert output.count("as recorded") == 3
