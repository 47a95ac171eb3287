"""ReasoningGym-v0: the procedural data sets of reasoning-gym, each with its own scorer."""

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, Any

from pydantic import Field

from rollgym.envs.core.kwargs import RenderMode
from rollgym.envs.core.splits import TaskSplit
from rollgym.envs.verifiers.base import GeneratingVerifier, Verdict, shortened
from rollgym.envs.verifiers.extraction import last_box, last_tag, without_thoughts
from rollgym.envs.verifiers.pool import CallFailed, CallTimeout, NoProcess, PoolShare
from rollgym.extras import install_line

_CALL = "rollgym.envs.verifiers.reasoning_gym_call:call"
_NAME = re.compile("[a-z0-9_]{1,64}")
_LARGEST_SEED = 2**31
_FULL = 1.0 - 1e-9
_SHOWN = 60
_LONGEST_ANSWER = 10_000


class ReasoningGymEnv(GeneratingVerifier):
    """A data set of reasoning-gym.

    Tasks are generated, and answers scored, in a process of their own under a wall clock: some scorers search, and some
    raise on odd answers. A response is read outside its thoughts: the last answer tag, else the last box, else
    all of it.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = GeneratingVerifier.metadata | {
        "description": "The procedural data sets of reasoning-gym with their own scorers.",
        "reward": "What the data set's own scorer gives, from 0 to 1.",
        # The library is in another process, and answers take their time there.
        "inline": False,
        "needs": "the package reasoning-gym",
        "example_reply": "<answer>{answer}</answer>",
        "baselines": {"random": [0.01, 0.015], "constant action": 0, "echo": [0, 0.000282], "blind": 0},
    }
    # Each costs a call of another process.
    tries = 200

    def __init__(
        self,
        *,
        dataset: Annotated[
            str,
            Field(
                pattern=f"^{_NAME.pattern}$",
                description="The data set's name, such as `chain_sum` or `countdown`.",
            ),
        ] = "chain_sum",
        config: Annotated[
            Mapping[str, Any] | None,
            Field(max_length=32, description="Its settings, as reasoning-gym names them."),
        ] = None,
        split: TaskSplit = None,
        timeout_s: Annotated[
            float, Field(ge=0.1, le=30, description="Wall clock of one generated task or one scored answer.")
        ] = 10.0,
        render_mode: RenderMode = None,
    ) -> None:
        super().__init__(split=split, render_mode=render_mode)
        if {"seed", "size"} & set(config or {}):
            raise ValueError("config must not have 'seed' or 'size': the seed is that of the reset")
        self._dataset = dataset
        self._config = dict(config or {})
        self._timeout_s = timeout_s
        self._share = PoolShare(_CALL)

    def generate_task(self) -> dict[str, Any]:
        """Draw a task of the data set.

        Raises:
            ValueError: If reasoning-gym is not installed, or has no such data set.
        """
        seed = int(self.np_random.integers(_LARGEST_SEED))
        return self.checked_task({"dataset": self._dataset, "config": self._config, "seed": seed})

    def checked_task(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the task that `dataset`, `config` and `seed` name."""
        named = self._named(fields)
        drawn = self._call(named)
        return {**fields, **named, "question": drawn["question"], "answer": drawn["answer"]}

    def instruction(self) -> str:
        """Return how to answer."""
        return "Answer the question. Put nothing but the final answer between <answer> and </answer>."

    def score(self, response: str, task: Mapping[str, Any]) -> Verdict:
        """Score what a response gives as its answer with the data set's own scorer."""
        try:
            named = self._named(task)
        except ValueError as error:
            return Verdict(0.0, "error", f"bad_task: {error}")
        text = without_thoughts(response)
        found = last_tag(text) or last_box(text)
        said = text.strip() if found is None else found.text
        if not said:
            return Verdict(0.0, "unparsable", "no_answer: the response gives none")
        if len(said) > _LONGEST_ANSWER:
            return Verdict(
                0.0, "unparsable", f"no_such_answer: it is longer than {_LONGEST_ANSWER} characters"
            )
        try:
            result = self._call({**named, "answer": said})
        except (TimeoutError, RuntimeError, ValueError) as failed:
            return self._blamed(named, task, failed)
        if "raised" in result:
            return self._blamed(named, task, RuntimeError(f"the scorer raised {result['raised']}"))
        score = min(1.0, max(0.0, float(result["score"])))
        shown = shortened(said, _SHOWN)
        if score >= _FULL:
            return Verdict(1.0, "correct", f"scored: {shown}")
        return Verdict(score, "partial" if score > 0 else "wrong", f"scored: {shown}")

    def close(self) -> None:
        """Give the process back."""
        self._share.close()

    def _blamed(self, named: Mapping[str, Any], task: Mapping[str, Any], failed: Exception) -> Verdict:
        """Tell whose fault the missing score is: the response's, where another answer of this task has one.

        That is the task's own answer, or else an empty one.
        """
        if isinstance(failed.__cause__, NoProcess):
            return Verdict(0.0, "error", f"scoring_failed: {failed}")
        own = task.get("answer")
        try:
            other = self._call({**named, "answer": own if isinstance(own, str) else ""})
        except TimeoutError as late:
            return Verdict(0.0, "timeout", f"scoring_timeout: {late}")
        except (RuntimeError, ValueError) as error:
            return Verdict(0.0, "error", f"scoring_failed: {error}")
        if "raised" in other:
            return Verdict(0.0, "error", f"scorer_raised: {failed}")
        return Verdict(0.0, "unparsable", f"no_such_answer: {failed}")

    def _named(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return what names a task.

        Raises:
            ValueError: Something of it is missing, or makes no sense.
        """
        dataset = fields.get("dataset", self._dataset)
        config, seed = fields.get("config", self._config), fields.get("seed")
        if not isinstance(dataset, str) or not _NAME.fullmatch(dataset):
            raise ValueError("the field 'dataset' must name a data set of reasoning-gym")
        if not isinstance(config, Mapping) or {"seed", "size"} & set(config):
            raise ValueError(
                "the field 'config' must hold settings of the data set, without 'seed' and 'size'"
            )
        if type(seed) is not int or not 0 <= seed < _LARGEST_SEED:
            raise ValueError(f"a task needs the field 'seed', a whole number from 0 to {_LARGEST_SEED - 1}")
        return {"dataset": dataset, "config": dict(config), "seed": seed}

    def _call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Call reasoning-gym.

        Raises:
            ValueError: It is not installed, or has no such task.
            TimeoutError: It took too long.
            RuntimeError: Its process failed.
        """
        if find_spec("reasoning_gym") is None:
            raise ValueError(f"ReasoningGym-v0 needs reasoning-gym: {install_line('reasoning-gym')}")
        try:
            result: dict[str, Any] = self._share.pool.call(request, self._timeout_s)
        except CallTimeout as late:
            raise TimeoutError(f"{request['dataset']} gave {late}") from late
        except CallFailed as failed:
            raise RuntimeError(f"{request['dataset']}: {failed}") from failed
        if "refused" in result:
            raise ValueError(result["refused"])
        return result
