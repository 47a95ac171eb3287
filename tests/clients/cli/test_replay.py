"""`roll-env replay`: an episode is proved to be the same, and one that is not is told where."""

from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.clients.cli.replay import EpisodeError, first_steps, read_episode, shorten
from rollgym.clients.client.client import EnvClient
from tests.support.client_server import ServerProcess
from tests.support.roll_env import Done, roll_env

STEADY = ["--kwarg", "risk=0"]


def saved(server: ServerProcess, file: Path, actions: str = "left\nright\nup\n") -> dict[str, Any]:
    done = roll_env(
        *("play", "Walk-v0", "--url", server.url, *STEADY, "--seed", "3", "--save", str(file)), stdin=actions
    )
    assert done.returncode == 0, done.stderr
    assert f"saved 3 steps of seed 3 in {file}" in done.stdout
    return orjson.loads(file.read_bytes())


def replay(server: ServerProcess, file: Path, *arguments: str, stdin: str = "") -> Done:
    return roll_env("replay", str(file), "--url", server.url, *arguments, stdin=stdin)


def test_what_was_played_is_the_same_again(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "episode.json"
    episode = saved(server, file)
    done = replay(server, file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith(("reset", "step"))] == [
        f"reset  digest {episode['reset_digest']} ok",
        *(
            f"step {step}  action {action!r}  reward {reward}  digest {digest} ok"
            for step, (action, reward, digest) in enumerate(
                zip(episode["actions"], rewards(done), episode["digests"], strict=True)
            )
        ),
    ]
    assert " after right\n" in done.stdout, "the observations are shown"
    assert "SAME: 3 of 3 steps" in done.stdout


def rewards(done: Done) -> list[str]:
    return [line.split("reward ")[1].split()[0] for line in done.stdout.splitlines() if "reward " in line]


def test_a_server_of_its_own_and_the_shorter_ways_to_say_it(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "episode.json"
    saved(server, file)
    here = ["--env", "Walk-v0=tests.support.client_envs:Walk"]
    done = roll_env("replay", str(file), *here, "--quiet")
    assert (done.returncode, done.stdout.strip()) == (0, "SAME: 3 of 3 steps; every digest is the same")
    done = roll_env("replay", "-", "--url", server.url, "--json", "--steps", "2", stdin=file.read_text())
    assert done.returncode == 0, done.stderr
    assert orjson.loads(done.stdout) == {
        **{"env_id": "Walk-v0", "seed": 3, "result": "same", "steps": 2, "same": 2},
        **{"at": None, "detail": "every digest is the same", "notes": []},
    }
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("field", "index", "value", "at", "same"),
    [
        ("digests", 1, "0123456789abcdef", "step 1", 1),
        ("actions", 2, "elsewhere", "step 2", 2),
        ("reset_digest", None, "0123456789abcdef", "the reset", 0),
        ("seed", None, 4, "the reset", 0),
    ],
)
def test_what_was_tampered_with_is_found(
    server: ServerProcess, tmp_path: Path, field: str, index: int | None, value: Any, at: str, same: int
) -> None:
    file = tmp_path / "episode.json"
    episode = saved(server, file)
    if index is None:
        episode[field] = value
    else:
        episode[field][index] = value
    file.write_bytes(orjson.dumps(episode))
    done = replay(server, file, "--json")
    assert done.returncode == 1
    told = orjson.loads(done.stdout)
    assert (told["result"], told["at"], told["same"]) == ("differs", at, same)
    readable = replay(server, file)
    assert readable.returncode == 1
    assert f"DIFFERS at {at}, after {same} of 3 steps: its digest is " in readable.stdout
    assert f"step {same + 1}" not in readable.stdout, "it stops at the first difference"


def test_what_may_explain_a_difference_is_told(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "episode.json"
    episode = saved(server, file)
    file.write_bytes(orjson.dumps({**episode, "env_version": "1", "env_id": "Dice-v0"}))
    done = replay(server, file, "--quiet")
    assert "note: recorded with version 1, played with version 3" in done.stdout
    assert "note: Dice-v0 does not declare that seed and actions decide what happens" in done.stdout


def test_what_the_environment_refuses_has_a_place(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "episode.json"
    episode = saved(server, file)
    episode["actions"][1] = "raise"
    file.write_bytes(orjson.dumps(episode))
    done = replay(server, file, "--quiet")
    assert done.returncode == 1
    assert done.stdout.startswith("\nFAILED at step 1, after 1 of 3 steps: env_error: ")
    arm = {**episode, "env_id": "Arm-v0", "kwargs": {}, "env_version": "0"}
    file.write_bytes(orjson.dumps(arm))
    assert "DIFFERS at the reset" in replay(server, file, "--quiet").stdout


def test_a_reader_goes_on_with_enter_and_leaves_with_q(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "episode.json"
    saved(server, file)
    done = replay(server, file, "--interactive", stdin="\n\n\n")
    assert done.returncode == 0
    assert "SAME: 3 of 3 steps" in done.stdout
    done = replay(server, file, "--interactive", stdin="\nq\n")
    assert done.returncode == 0
    assert "SAME: 1 of 3 steps; you left before the end" in done.stdout
    assert "step 1" not in done.stdout


async def test_arrays_and_a_fork_that_was_seeded_anew(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "episode.json"
    async with EnvClient(server.url) as client:
        session = await client.make("Arm-v0")
        ended, seed = True, 0
        while ended:
            await session.reset(seed := seed + 1)
            first = await session.step(np.full(2, 0.5, np.float32))
            ended = first.terminated or first.truncated
        (copy,) = await session.fork(reseed=7)
        await copy.step(np.zeros(2, np.float32))
        episode = await copy.episode_record()
    assert episode.reseeds, "the fork was seeded anew"
    file.write_bytes(orjson.dumps(episode.model_dump(mode="json")))
    done = replay(server, file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SAME: 2 of 2 steps" in done.stdout
    assert '"camera":"uint8[20, 20, 3] from ' in done.stdout


def test_an_episode_can_be_saved_while_it_is_played(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "so far.json"
    typed = f"left\n:save {file}\n:save\n:save {tmp_path / 'no' / 'such.json'}\nright\n"
    done = roll_env("play", "Walk-v0", "--url", server.url, *STEADY, "--seed", "3", stdin=typed)
    assert done.returncode == 0, done.stderr
    assert "saved 1 steps of seed 3" in done.stdout
    assert "expected :save FILE" in done.stdout
    assert "No such file or directory" in done.stdout
    assert orjson.loads(file.read_bytes())["actions"] == ["left"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a portable episode"),
        ('{"env_id": "Walk-v0"}', "env_version: Field required"),
        ('{"env_id": "Walk-v0", "env_version": "3", "format": 2}', "format: Input should be 1"),
        ('{"env_id": "Walk-v0", "env_version": "3"}', "never reset"),
    ],
)
def test_files_that_hold_no_episode(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "episode.json"
    file.write_text(content)
    done = roll_env("replay", str(file))
    assert done.returncode == 2
    assert message in done.stderr


def test_mistakes_are_told_before_a_server_is_started(tmp_path: Path) -> None:
    missing = roll_env("replay", str(tmp_path / "none.json"))
    assert (missing.returncode, "No such file" in missing.stderr) == (2, True)
    piped = roll_env("replay", "-", "--interactive")
    assert (piped.returncode, "keyboard" in piped.stderr) == (2, True)
    nowhere = roll_env("play", "FrozenLake-v0", "--save", str(tmp_path / "no" / "such.json"))
    assert (nowhere.returncode, "there is no directory" in nowhere.stderr) == (2, True)


def test_the_number_of_steps_is_checked(server: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "episode.json"
    saved(server, file)
    done = replay(server, file, "--steps", "4")
    assert (done.returncode, "from 0 to 3" in done.stderr) == (2, True)
    nothing = replay(server, file, "--steps", "0", "--quiet")
    assert (nothing.returncode, "SAME: 0 of 0 steps" in nothing.stdout) == (0, True)


@given(st.integers(0, 6), st.lists(st.integers(0, 6)))
def test_first_steps_are_an_episode(count: int, reseeds: list[int]) -> None:
    whole = {
        **{"format": 1, "env_id": "E", "env_version": "0", "seed": 1, "reset_digest": "0" * 16},
        **{"actions": list(range(6)), "digests": [f"{n:016x}" for n in range(6)]},
        "reseeds": [(step, 9) for step in sorted(reseeds)],
    }
    episode = first_steps(read_episode(orjson.dumps(whole)), count)
    again = read_episode(orjson.dumps(episode.model_dump(mode="json")))
    assert again == episode
    assert again.actions == list(range(count))


def test_observations_are_short() -> None:
    assert shorten("as it\nis") == "as it\nis"
    assert shorten(3) == "3"
    assert shorten(np.array([0.123456, np.nan], np.float32)) == '[0.1235,"NaN"]'
    assert shorten(np.arange(3)) == "[0,1,2]"
    assert shorten({"a": np.zeros((5, 5)), "b": (1, "x")}) == '{"a":"float64[5, 5] from 0 to 0","b":[1,"x"]}'
    with pytest.raises(EpisodeError):
        read_episode(b"")
