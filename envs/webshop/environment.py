"""WebShop-v0: buy what a customer asks for in a simulated web shop."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

import gymnasium
from pydantic import Field

from rollgym.clients.protocol.spaces import UnicodeText
from rollgym.envs.core.hooks import checked_options
from rollgym.envs.core.kwargs import OPERATOR, DeclaredKwargs, OneOf, RenderMode
from rollgym.envs.core.profiles import reply_format, said_actions
from rollgym.envs.core.splits import SPLIT, Split, checked_split
from rollgym.envs.core.text_game import StepLimit
from rollgym.envs.webshop.catalogue import GoalKind, open_catalogue
from rollgym.envs.webshop.expert import Expert, instruction_query
from rollgym.envs.webshop.goals import Goal
from rollgym.envs.webshop.rendering import (
    RULES,
    WORDINGS,
    as_compact_text,
    as_html,
    as_quoted_text,
    as_rich_text,
    as_text,
    codes,
    page_parts,
    wording_named,
)
from rollgym.envs.webshop.reward import noun_extractor
from rollgym.envs.webshop.shop import BACK, NEXT, Action, ShopVisit, parse_action

OBSERVATIONS = ("text", "text_rich", "html")
_CHINESE = re.compile(r"[\u4e00-\u9fff]")
_TEST_GOALS, _VALID_GOALS, _PART_AT_MOST = 500, 1000, 5
_RULES = (
    "You are shopping in a web shop. Find a product that fits the instruction, choose the options that it asks for, "
    "and buy it: the better the purchase fits, in kind, attributes, options and price, the higher the reward. "
    "search[KEYWORDS] searches from the start page; click[TEXT] presses a button, opens a product by its id, or "
    "chooses an option. click[buy now] buys and ends the visit."
)


class WebShopEnv(DeclaredKwargs, gymnasium.Env[str, str]):
    """A web shop with a customer's request.

    Raises:
        ValueError: If an argument makes no sense, or the files cannot be used.
    """

    metadata: dict[str, Any] = {
        "reset_options": ["expert", "goal_index", "labels", "split"],
        "render_modes": ["ansi"],
        "render_fps": 1,
        "kind": "episodic",
        "deterministic": True,
        "forkable": True,
        "expert": True,
        "metrics": {"steps": "last", "invalid_replies": "last", "score": "last"},
        "version": "0",
        "description": "Search a web shop, choose options and buy what a customer asks for.",
        "observation": (
            'The page of the shop as text; `info["available_actions"]` lists what can be clicked.'
        ),
        "actions": "`search[KEYWORDS]` or `click[TEXT]`, in the marks that the `profile` asks for.",
        "reward": (
            "0 until something is bought, then the share of the wanted attributes, options and "
            "price that it has, from 0 to 1. Success is 1."
        ),
        "max_episode_steps": 15,
        "baselines": {"random": [0.05, 0.283], "constant action": 0, "blind": [0, 0.0374], "expert": 1},
    }

    def __init__(
        self,
        *,
        goals: Annotated[
            GoalKind,
            OneOf("human", "synthetic"),
            Field(
                description='Requests in customers\' own words ("human"), or generated from products ("synthetic").'
            ),
        ] = "human",
        split: Annotated[
            str | None, SPLIT, Field(description="Only goals of this split; null for any.")
        ] = "train",
        sampling: Annotated[
            str,
            OneOf("uniform", "weighted"),
            Field(description='"uniform", or "weighted": goals with rare attributes more often.'),
        ] = "uniform",
        observation: Annotated[
            str | None,
            OneOf(*OBSERVATIONS, None),
            Field(
                description=(
                    '"text", "text_rich" or "html"; "text" if null. Not with the profile "compact", which'
                    " has its own."
                )
            ),
        ] = None,
        show_attributes: Annotated[
            bool, Field(description="Whether products have a page with their attributes.")
        ] = False,
        max_episode_steps: StepLimit = 15,
        profile: Annotated[
            str,
            OneOf(*WORDINGS),
            Field(description="How pages are shown, replies are read and purchases are paid."),
        ] = "native",
        format_penalty: Annotated[
            float | None,
            Field(
                description="Added to the reward of an action that is not possible; the profile's own if null."
            ),
        ] = None,
        data_dir: Annotated[
            str | None,
            OPERATOR,
            Field(description="A directory with WebShop's files; null for the made-up catalogue."),
        ] = None,
        num_products: Annotated[
            int | None, OPERATOR, Field(ge=1, description="Products to read from them; all if null.")
        ] = None,
        cache_dir: Annotated[
            str | None, OPERATOR, Field(description="Where catalogues are kept once they are built.")
        ] = None,
        noun_tagger: Annotated[
            str,
            OneOf("heuristic", "spacy"),
            OPERATOR,
            Field(description='What finds the nouns of titles: "heuristic", or "spacy" as WebShop does.'),
        ] = "heuristic",
        render_mode: RenderMode = None,
    ) -> None:
        if observation is not None and profile == "compact":
            raise ValueError("the profile 'compact' has its own observation: leave observation out")
        if num_products is not None and data_dir is None:
            raise ValueError("num_products is for the files of data_dir only")
        self.action_space = UnicodeText()
        self.observation_space = UnicodeText()
        self.render_mode = render_mode
        self.wording = wording_named(profile)
        self._compact = profile == "compact"
        self._observation_mode = observation or "text"
        self._penalty = self.wording.penalty if format_penalty is None else float(format_penalty)
        self._limit = max_episode_steps
        self._split = checked_split(split)
        self._by_weight = sampling == "weighted"
        self._show_attributes = show_attributes
        self._nouns = noun_extractor(noun_tagger)
        self._noun_tagger = noun_tagger
        self._catalogue = open_catalogue(data_dir, num_products, cache_dir)
        self._goals = self._catalogue.goals(goals)
        if not len(self._goals):
            other = "synthetic" if goals == "human" else "human"
            raise ValueError(f"the catalogue has no {goals} goals; try goals={other!r}")
        self._goal_index = 0
        self._shop = self._visit(0)
        self._expert: Expert | None = None
        self._labels = False
        self._steps = self._invalid = 0
        self._last = ""

    # -- Gymnasium -------------------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin a visit. Options are `goal_index`, `split`, `expert` and `labels`, for people who play."""
        super().reset(seed=seed)
        given = checked_options(self.metadata["reset_options"], options)
        index = given.get("goal_index")
        if index is None:
            among = goal_range(len(self._goals), checked_split(given.get("split", self._split)))
            index = self._goals.draw(self.np_random, among, by_weight=self._by_weight)
        elif type(index) is not int or not 0 <= index < len(self._goals):
            raise ValueError(
                f"goal_index must be a whole number from 0 to {len(self._goals) - 1}, not {index!r}"
            )
        self._goal_index = index
        self._shop = self._visit(index)
        anywhere = self.wording.search_anywhere
        self._expert = Expert(self._shop, search_anywhere=anywhere) if given.get("expert", False) else None
        self._labels = bool(given.get("labels", False))
        self._steps = self._invalid = 0
        self._last = ""
        info = self._info(valid=True, penalty=0.0)
        info["instruction"] = self._instruction()
        return self._observation(), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Search or click, if the reply names something that is possible here."""
        self._steps += 1
        # A fork may have been given another generator since the visit began.
        self._shop.generator = self.np_random
        said = self._read(action)
        valid = said is not None and self._possible(said) and self._shop.act(said)
        self._last = action if valid else ""
        self._invalid += not valid
        penalty = 0.0 if valid else self._penalty
        info = self._info(valid=valid, penalty=penalty)
        terminated = self._shop.score is not None
        truncated = not terminated and self._steps >= self._limit
        text = self._observation()
        if not valid:
            text = f"{self._why_not(said)}\n{text}"
        return text, self._pay() + penalty, terminated, truncated, info

    def render(self) -> Any:
        """Return the page as text, if the render mode is "ansi"."""
        if self.render_mode != "ansi":
            return None
        title = f"  ({self._last})" if self._last else ""
        return f"{title}\n{as_rich_text(page_parts(self._shop))}"

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read(self, reply: str) -> Action | None:
        if self.wording.refuses_chinese and _CHINESE.search(reply):
            return None
        texts = said_actions(reply, self.wording.reading)
        if not texts:
            return None
        text = texts[0].strip()
        if self._compact and (known := codes(self._shop).get(text)) is not None:
            return known
        return parse_action(text.lower() if self.wording.lower_case else text)

    def _possible(self, action: Action) -> bool:
        if action.name == "search":
            return self.wording.search_anywhere or self._shop.page == "index"
        return action.argument in self._clickables()

    def _clickables(self) -> list[str]:
        names = list(self._shop.clickables())
        if self.wording.hides_lonely_next and names == [BACK, NEXT]:
            return [BACK]
        return names

    def _why_not(self, said: Action | None) -> str:
        if said is None:
            return f"{self.wording.reading.invalid_note} Say one action, such as {self._listed()[0]}."
        if said.name == "search":
            return f"{self.wording.reading.invalid_note} There is no search bar here: click[{BACK}] first."
        possible = ", ".join(self._listed())
        return f"{self.wording.reading.invalid_note} {said.name}[{said.argument}] is not possible here, but {possible}."

    # -- showing ---------------------------------------------------------------------------------------------------

    def _listed(self) -> list[str]:
        """Return what can be done here, as actions that work; the search is for what the customer says."""
        if self._compact:
            return list(codes(self._shop)) or ["-"]
        if self._shop.page == "index":
            return [f"search[{instruction_query(self._shop) or 'KEYWORDS'}]"]
        return [f"click[{name}]" for name in self._clickables()]

    def _action_labels(self) -> dict[str, str]:
        """Return what people read on buttons: of a product its name and price, of a value its option, too."""
        shop = self._shop
        shown = map(shop.catalogue.product, shop.shown) if shop.page == "search_results" else ()
        labels = {each.asin.lower(): f"{each.title}, {each.price_tag}" for each in shown}
        for value, clickable in shop.clickables().items():
            if clickable.kind == "option":
                chosen = " ✓" if shop.options.get(clickable.name) == value else ""
                labels[value] = f"{clickable.name}: {value}{chosen}"
        actions = codes(shop) if self._compact else {text: parse_action(text) for text in self._listed()}
        return {
            text: labels.get(action.argument, action.argument)
            for text, action in actions.items()
            if action is not None and action.name == "click"
        }

    def _observation(self) -> str:
        if self._compact:
            return as_compact_text(self._shop)
        parts = page_parts(self._shop)
        if self._observation_mode == "html":
            page = as_html(parts, "WebShop")
        elif self._observation_mode == "text_rich":
            page = as_rich_text(parts)
        elif self.wording.quoted:
            page = as_quoted_text(parts, self._shop.goal.instruction)
        else:
            page = as_text(parts)
        if self.wording.template == "{page}":
            return page
        actions = ["search[KEYWORDS]"] if self._shop.page == "index" else self._listed()
        left = max(0, self._limit - self._steps)
        return self.wording.template.format(
            page=page, task=self._shop.goal.instruction, actions=", ".join(actions), left=left
        )

    def _instruction(self) -> str:
        if self._compact:
            return RULES
        return f"{_RULES} {reply_format(self.wording.reading, 'search[KEYWORDS], click[TEXT]', 'search[red shoes]')}"

    def _pay(self) -> float:
        if self._shop.score is None:
            return 0.0
        if self.wording.pays == "score":
            return self._shop.score.total
        return self.wording.perfect if self._shop.score.total == 1.0 else 0.0

    def _info(self, *, valid: bool, penalty: float) -> dict[str, Any]:
        shop = self._shop
        score = shop.score.total if shop.score is not None else 0.0
        opened = shop.product.asin if shop.item is not None else None
        info: dict[str, Any] = {
            "success": score == 1.0,
            "action_is_valid": valid,
            "format_penalty": penalty,
            "env_reward": score,
            "available_actions": self._listed() if shop.score is None else [],
            "metrics": {"steps": self._steps, "invalid_replies": self._invalid, "score": score},
            "anchor": f"{shop.url} {sorted(shop.visited)}",
            "state": {
                "page": shop.page,
                "goal_index": self._goal_index,
                "keywords": list(shop.keywords or ()),
                "results_page": shop.results_page,
                "asin": opened,
                "options": dict(shop.options),
            },
        }
        if self._labels:
            info["action_labels"] = self._action_labels()
        if shop.score is not None:
            info["score"] = shop.score.describe() | {"noun_tagger": self._noun_tagger}
            info["goal"] = _plain_goal(shop.goal)
        elif self._expert is not None:
            info["expert_action"] = self._expert_reply(self._expert.act())
        return info

    def _expert_reply(self, action: Action) -> str:
        if self._compact:
            for code, known in codes(self._shop).items():
                if known == action:
                    return code
        return f"{action.name}[{action.argument}]"

    def _visit(self, index: int) -> ShopVisit:
        return ShopVisit(
            self._catalogue,
            self._goals[index],
            self._catalogue.index.search,
            self._nouns,
            self.np_random,
            self._show_attributes,
        )


def goal_range(count: int, split: Split | None) -> range:
    """Return the goals of a split: the first are for tests, then for validation, the rest for training.

    Of WebShop's 12,087 human goals these are its published splits: 500, 1,000 and 10,587. Smaller sets give at most a
    fifth to each of the first two.

    Raises:
        ValueError: There are too few goals for splits.
    """
    test = min(_TEST_GOALS, count // _PART_AT_MOST)
    valid = min(_VALID_GOALS, count // _PART_AT_MOST)
    bounds = {
        None: range(count),
        "test": range(test),
        "valid": range(test, test + valid),
        "train": range(test + valid, count),
    }
    if not bounds[split]:
        raise ValueError(f"{count} goals are too few for a split {split!r}: use split None")
    return bounds[split]


def _plain_goal(goal: Goal) -> dict[str, Any]:
    options = dict(goal.options) if isinstance(goal.options, Mapping) else list(goal.options)
    return {
        "asin": goal.asin,
        "attributes": list(goal.attributes),
        "options": options,
        "price_upper": goal.price_upper,
    }
