"""PettingZoo adapter: the classic games of several players, in self-play or against a scripted opponent."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from rollgym.envs.adapters.pettingzoo_sheets import SHEETS
from rollgym.envs.adapters.seats import OpponentName, Seat, SeatedGame
from rollgym.envs.core.kwargs import OPERATOR, OneOf, RenderMode
from rollgym.envs.core.profiles import bare_word
from rollgym.envs.core.text_game import ActionsPerTurn, FormatPenalty, ProfileName, Refusal, StepLimit
from rollgym.extras import import_extra

_MOST_LISTED = 40


class PettingZooAdapter(SeatedGame[int]):
    """A classic game of PettingZoo in text; needs the extra `pettingzoo`. Other kwargs are the game's own.

    Raises:
        ValueError: If an argument makes no sense.
        MissingExtraError: If PettingZoo, or what the game needs, is not installed.
    """

    metadata: dict[str, Any] = SeatedGame.metadata | {
        "description": "A classic game of PettingZoo, played in text.",
        "max_episode_steps": 1_000,
    }

    def __init__(
        self,
        game: Annotated[
            str,
            OneOf(*SHEETS),
            OPERATOR,
            Field(description="The name of its module, such as `tictactoe_v3`."),
        ],
        *,
        opponent: OpponentName = "self",
        seat: Seat = None,
        max_episode_steps: StepLimit = 1000,
        profile: ProfileName = "native",
        format_penalty: FormatPenalty = None,
        max_actions_per_turn: ActionsPerTurn = 1,
        render_mode: RenderMode = None,
        **kwargs: Any,
    ) -> None:
        if game not in SHEETS:
            raise ValueError(f"game must be one of {', '.join(SHEETS)}, not {game!r}")
        self._sheet = SHEETS[game]
        self._env = import_extra(f"pettingzoo.classic.{game}", "pettingzoo").env(**kwargs)
        super().__init__(
            self._sheet.form,
            self._sheet.example,
            self._env.possible_agents,
            opponent=opponent,
            seat=seat,
            max_episode_steps=max_episode_steps,
            profile=profile,
            format_penalty=format_penalty,
            max_actions_per_turn=max_actions_per_turn,
            render_mode=render_mode,
        )
        self._gained: dict[str, float] = {}
        self._legal: dict[str, int] = {}
        self._last_actor = self._seats[0]

    def close(self) -> None:
        """Close the PettingZoo game behind the adapter."""
        self._env.close()

    def _start(self, seed: int) -> None:
        self._env.reset(seed=seed)
        self._gained = dict.fromkeys(self._seats, 0.0)
        self._look()

    def _acting(self) -> str | None:
        ended = zip(self._env.terminations.values(), self._env.truncations.values(), strict=True)
        over = all(terminated or truncated for terminated, truncated in ended)
        return None if over else str(self._env.agent_selection)

    def _cut(self) -> bool:
        return any(self._env.truncations.values()) and not any(self._env.terminations.values())

    def _act(self, action: int) -> None:
        self._last_actor = str(self._env.agent_selection)
        self._env.step(action)
        for agent, reward in self._env.rewards.items():
            self._gained[agent] += float(reward)
        self._look()

    def _look(self) -> None:
        """Note what can be done now."""
        agent = self._acting()
        self._legal = {}
        if agent is not None:
            observation = self._env.observe(agent)
            mask = observation["action_mask"] if isinstance(observation, Mapping) else None
            actions = range(int(self._env.action_space(agent).n))
            legal = [action for action in actions if mask is None or mask[action]]
            names = self._sheet.names(self._env.unwrapped, agent, legal)
            self._legal = dict(zip(names, legal, strict=True))

    def _scores(self) -> Mapping[str, float]:
        return self._gained

    def _view(self) -> str:
        agent = self._acting() or self._seat or self._last_actor
        return self._sheet.view(self._env.unwrapped, agent, self._env.observe(agent))

    def parse_action(self, text: str) -> int | Refusal:
        word = " ".join(bare_word(text).replace(",", " ").split())
        for name, action in self._legal.items():
            if name.lower() == word:
                return action
        names = ", ".join(list(self._legal)[:_MOST_LISTED])
        return Refusal(f"Legal are: {names}{', ...' if len(self._legal) > _MOST_LISTED else ''}.")

    def available_actions(self) -> list[str]:
        return list(self._legal)

    def describe_action(self, action: int) -> str:
        return next((name for name, number in self._legal.items() if number == action), str(action))

    def describe_rules(self) -> str:
        return self._sheet.rules
