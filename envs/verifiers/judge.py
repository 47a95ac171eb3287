"""Judge-v0: a language model as a judge, at any OpenAI-compatible endpoint that the operator names."""

import hashlib
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import orjson
from numpy.random import Generator
from pydantic import Field

from rollgym.clients.replies.thinking import strip_thinking
from rollgym.envs.core.kwargs import OPERATOR, RenderMode
from rollgym.envs.core.splits import TaskSplit
from rollgym.envs.verifiers.base import GeneratingVerifier, Verdict
from rollgym.envs.verifiers.judging.endpoint import JudgeClient, JudgeEndpoint, JudgeError, JudgeTimeoutError
from rollgym.envs.verifiers.judging.ledger import JudgingBudget, JudgingLedger, MemoryLedger, SharedLedger
from rollgym.envs.verifiers.judging.templates import Template, UnreadableVerdictError, templates_of

_URL, _MODEL = "ROLLGYM_JUDGE_URL", "ROLLGYM_JUDGE_MODEL"
_LONGEST_FIELD = 100_000
_MOST_CRITERIA = 64
_UNSET = (
    "no judge is set: the operator sets url and model (operator_kwargs of this environment, or the environment "
    f"variables {_URL} and {_MODEL})"
)


class _AbstainedError(Exception):
    """The judge cannot tell, or says this and then that."""


@dataclass(frozen=True, slots=True)
class _Case:
    """What is judged: a template with the texts for its places, and the weights of criteria."""

    template: Template
    fields: Mapping[str, str]
    weights: tuple[float, ...]


class JudgeEnv(GeneratingVerifier):
    """Responses judged by a language model. It is not deterministic, and its own failures score no response.

    Where the judge is, what its key is and what it may cost is the operator's alone; a task only says what is judged.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = GeneratingVerifier.metadata | {
        "description": "Answers compared, rated or checked by a language model that the operator names.",
        "observation": "A question.",
        "reward": (
            "What the judge says, from 0 to 1; where it fails, the outcome is `error`, which scores nothing."
        ),
        "inline": False,
        # It waits for a network.
        "thread": True,
        "deterministic": False,
        "forkable": False,
        "needs": "a judge: `url` and `model`",
        "baselines": {"random": 0, "constant action": 0},
    }

    def __init__(
        self,
        *,
        template: Annotated[
            str,
            Field(
                description=(
                    "How it is asked where a task does not say: `match`, `equivalence`, `score`, "
                    "`rubric`, or one of the operator's own."
                )
            ),
        ] = "match",
        split: TaskSplit = None,
        render_mode: RenderMode = None,
        url: Annotated[
            str | None,
            OPERATOR,
            Field(
                description="Base URL of the endpoint; the environment variable ROLLGYM_JUDGE_URL if unset."
            ),
        ] = None,
        model: Annotated[
            str | None, OPERATOR, Field(description="The judge; ROLLGYM_JUDGE_MODEL if unset.")
        ] = None,
        key_env: Annotated[
            str, OPERATOR, Field(description="Name of the environment variable that has the key.")
        ] = "ROLLGYM_JUDGE_KEY",
        temperature: Annotated[float, OPERATOR, Field(ge=0, description="Of the judge's replies.")] = 0.0,
        max_output_tokens: Annotated[
            int, OPERATOR, Field(ge=1, description="Longest reply of the judge.")
        ] = 1024,
        retries: Annotated[
            int,
            OPERATOR,
            Field(
                ge=0,
                description=(
                    "How often a request is repeated after 429, 5xx or a lost connection. After a reply "
                    "without a verdict, the judge is asked once more."
                ),
            ),
        ] = 3,
        timeout_s: Annotated[
            float, OPERATOR, Field(gt=0, description="How long a judgement may take, with all its requests.")
        ] = 50.0,
        abstain: Annotated[
            float | None,
            OPERATOR,
            Field(
                ge=0,
                le=1,
                description=(
                    "Score where the judge abstains or contradicts itself; unset, that is an `error`, "
                    "which scores nothing."
                ),
            ),
        ] = None,
        max_response_chars: Annotated[
            int, OPERATOR, Field(ge=1, description="A longer response is not judged.")
        ] = 20000,
        templates_file: Annotated[
            str | None, OPERATOR, Field(description="YAML file with templates of one's own.")
        ] = None,
        shared_dir: Annotated[
            str | None,
            OPERATOR,
            Field(
                description="Directory for what all processes share: scores found before, the budget, the places."
            ),
        ] = None,
        max_calls: Annotated[
            int | None,
            OPERATOR,
            Field(ge=1, description="Requests in all, for as long as `shared_dir` is kept."),
        ] = None,
        max_total_tokens: Annotated[int | None, OPERATOR, Field(ge=1, description="Tokens in all.")] = None,
        max_concurrent: Annotated[
            int | None, OPERATOR, Field(ge=1, description="Requests under way at a time.")
        ] = None,
    ) -> None:
        super().__init__(split=split, render_mode=render_mode)
        limits = (max_calls, max_total_tokens, max_concurrent)
        if shared_dir is None and any(limit is not None for limit in limits):
            raise ValueError(
                "max_calls, max_total_tokens and max_concurrent must be counted for all processes together: set "
                "shared_dir, too"
            )
        self._templates = templates_of(templates_file)
        self._template = self._template_named(template)
        self._timeout_s = timeout_s
        self._abstain = abstain
        self._most = max_response_chars
        self._endpoint = _endpoint(url, model, key_env, temperature, max_output_tokens, retries)
        self._client: JudgeClient | None = None
        self._ledger: JudgingLedger = (
            MemoryLedger()
            if shared_dir is None
            else SharedLedger(shared_dir, JudgingBudget(max_calls, max_total_tokens), max_concurrent)
        )

    def generate_task(self) -> dict[str, Any]:
        """Draw a question with its reference answer."""
        if set(self._template.fields) - {"question", "reference"}:
            raise ValueError(
                "questions are drawn for templates with the fields question and reference only: give the task's "
                "fields to reset"
            )
        question, reference = _KINDS[int(self.np_random.integers(len(_KINDS)))](self.np_random)
        return {"question": question, "reference": reference}

    def checked_task(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return a task that has what its template needs."""
        self._case(fields)
        if not isinstance(fields.get("question"), str):
            raise ValueError("a task needs the field 'question': what the policy is asked")
        return dict(fields)

    def instruction(self) -> str:
        """Return how to answer."""
        return (
            "Answer in your own words, and come to one clear answer. A judge reads what you say, and not what "
            "stands in think tags."
        )

    def score(self, response: str, task: Mapping[str, Any]) -> Verdict:
        """Have a response judged."""
        try:
            case = self._case(task)
        except ValueError as error:
            return Verdict(0.0, "error", str(error))
        candidate = strip_thinking(response).strip()
        if not candidate:
            return Verdict(0.0, "unparsable", "the response is blank")
        if len(candidate) > self._most:
            return Verdict(0.0, "unparsable", f"the response has over {self._most} characters")
        try:
            score = self._judge(case, candidate.encode(errors="replace").decode())
        except JudgeTimeoutError as error:
            return Verdict(0.0, "timeout", str(error))
        except JudgeError as error:
            return Verdict(0.0, "error", str(error))
        except _AbstainedError as error:
            if self._abstain is None:
                return Verdict(0.0, "error", str(error))
            return _verdict(self._abstain, str(error))
        return _verdict(score, "the judge's verdict")

    def close(self) -> None:
        """Close connections and files."""
        if self._client is not None:
            self._client.close()
            self._client = None
        self._ledger.close()

    def _template_named(self, name: Any) -> Template:
        if not isinstance(name, str) or name not in self._templates:
            raise ValueError(f"template must be one of {', '.join(self._templates)}, not {str(name)[:80]!r}")
        return self._templates[name]

    def _case(self, task: Mapping[str, Any]) -> _Case:
        template = self._template_named(task["template"]) if "template" in task else self._template
        fields: dict[str, str] = {}
        weights: tuple[float, ...] = (1.0,)
        for name in (*template.fields, *template.optional):
            value = task.get(name)
            if value is None and name in template.optional:
                continue
            if name == "rubric":
                fields[name], weights = _rubric(value)
            elif not isinstance(value, str) or (name in template.fields and not value.strip()):
                raise ValueError(f"a task needs the field {name!r}, as text")
            else:
                fields[name] = value.encode(errors="replace").decode()
            if len(fields[name]) > _LONGEST_FIELD:
                raise ValueError(f"{name} has at most {_LONGEST_FIELD} characters")
        return _Case(template, fields, weights)

    def _judge(self, case: _Case, candidate: str) -> float:
        """Return the score, found before or asked for now.

        Raises:
            JudgeError: The judge gave no verdict.
            _AbstainedError: It cannot tell.
        """
        endpoint = self._endpoint
        if endpoint is None:
            raise JudgeError(_UNSET)
        key = _key(case, candidate, endpoint)
        found = self._ledger.find(key)
        if found is not None:
            return found
        deadline = time.monotonic() + self._timeout_s
        orders = (False, True) if case.template.swap else (False,)
        scores = {self._ask(endpoint, case, candidate, deadline, swapped) for swapped in orders}
        if len(scores) > 1:
            raise _AbstainedError("the judge's verdict depends on which answer comes first")
        score = scores.pop()
        if score is None:
            raise _AbstainedError("the judge abstains")
        self._ledger.keep(key, score)
        return score

    def _ask(
        self, endpoint: JudgeEndpoint, case: _Case, candidate: str, deadline: float, swapped: bool
    ) -> float | None:
        if self._client is None:
            self._client = JudgeClient(endpoint)
        for last in (False, True):
            messages = case.template.messages(case.fields, candidate, secrets.token_hex(8), swapped=swapped)
            with self._ledger.slot(deadline):
                answer = self._client.ask(
                    messages, deadline, self._ledger.spend_call, self._ledger.spend_tokens
                )
            try:
                return case.template.verdict.read(answer.text, case.weights)
            except UnreadableVerdictError as error:
                if last:
                    raise JudgeError(str(error)) from error
        raise AssertionError("the last attempt returns or raises")


def _endpoint(
    url: str | None, model: str | None, key_env: str, temperature: float, max_output_tokens: int, retries: int
) -> JudgeEndpoint | None:
    url = url or os.environ.get(_URL)
    model = model or os.environ.get(_MODEL)
    if url is None and model is None:
        return None
    if url is None or model is None:
        raise ValueError(f"a judge needs both url and model (or {_URL} and {_MODEL})")
    return JudgeEndpoint(url, model, os.environ.get(key_env), temperature, max_output_tokens, retries)


def _key(case: _Case, candidate: str, endpoint: JudgeEndpoint) -> str:
    judged = [case.template.digest, dict(case.fields), list(case.weights), candidate]
    asked = [endpoint.url, endpoint.model, endpoint.temperature, endpoint.max_output_tokens]
    return hashlib.sha256(orjson.dumps([judged, asked], option=orjson.OPT_SORT_KEYS)).hexdigest()


def _rubric(value: Any) -> tuple[str, tuple[float, ...]]:
    """Return criteria as a numbered list, and what each counts for."""
    if not isinstance(value, list) or not 1 <= len(value) <= _MOST_CRITERIA:
        raise ValueError(f"a task needs the field 'rubric': a list of 1 to {_MOST_CRITERIA} criteria")
    lines, weights = [], []
    for number, each in enumerate(value, 1):
        criterion = each.get("criterion") if isinstance(each, Mapping) else each
        weight = each.get("weight", 1.0) if isinstance(each, Mapping) else 1.0
        if not isinstance(criterion, str) or not criterion.strip():
            raise ValueError("a criterion is a text, or {'criterion': text, 'weight': number}")
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight <= 1000:
            raise ValueError(f"the weight of a criterion must be over 0 and at most 1000, not {weight!r}")
        lines.append(f"{number}. {' '.join(criterion.encode(errors='replace').decode().split())}")
        weights.append(float(weight))
    return "\n".join(lines), tuple(weights)


def _verdict(score: float, detail: str) -> Verdict:
    if score >= 1.0:
        return Verdict(1.0, "correct", detail)
    return Verdict(score, "partial", detail) if score > 0 else Verdict(0.0, "wrong", detail)


_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas", "Karla", "Leo")
_MEASURES = (
    ("taller", "shortest", "tallest"),
    ("older", "youngest", "oldest"),
    ("faster", "slowest", "fastest"),
    ("heavier", "lightest", "heaviest"),
)
_HOUR = 60


def _clock(draw: Generator) -> tuple[str, str]:
    start = int(draw.integers(24 * _HOUR))
    hours, minutes = int(draw.integers(1, 9)), int(draw.integers(1, 60))
    end = (start + hours * _HOUR + minutes) % (24 * _HOUR)
    question = (
        f"A train leaves at {start // _HOUR:02}:{start % _HOUR:02} and is under way for {hours} hours and {minutes} "
        "minutes. At what time of day does it arrive?"
    )
    return question, f"{end // _HOUR:02}:{end % _HOUR:02}"


def _weekday(draw: Generator) -> tuple[str, str]:
    today, later = int(draw.integers(7)), int(draw.integers(8, 400))
    question = f"Today is {_DAYS[today]}. What day of the week is it {later} days from now?"
    return question, _DAYS[(today + later) % 7]


def _order(draw: Generator) -> tuple[str, str]:
    names = [_NAMES[int(index)] for index in draw.choice(len(_NAMES), size=4, replace=False)]
    more, least, most = _MEASURES[int(draw.integers(len(_MEASURES)))]
    said = [f"{left} is {more} than {right}." for left, right in pairwise(names)]
    said = [said[int(index)] for index in draw.permutation(len(said))]
    wanted, answer = ((least, names[-1]), (most, names[0]))[int(draw.integers(2))]
    return f"{' '.join(said)} Who is the {wanted}?", answer


def _number(draw: Generator) -> tuple[str, str]:
    left, right = int(draw.integers(12, 100)), int(draw.integers(3, 30))
    return f"How many eggs are in {left} boxes of {right} eggs each? Answer in words.", str(left * right)


_KINDS: Sequence[Callable[[Generator], tuple[str, str]]] = (_clock, _weekday, _order, _number)
