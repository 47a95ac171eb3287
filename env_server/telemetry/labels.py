"""The values that the label `env_id` of metrics may have."""

OTHER = "other"
"""The label of all environments that have none of their own."""


class EnvironmentLabels:
    """Gives environments that other servers register a label, the first ones one of their own.

    Counters live as long as the process. Whoever may register could otherwise fill its memory, and that of the
    database that collects them, with environments that come and go.

    Args:
        most: How many environments get a label of their own.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()
        self._others = False

    @property
    def given(self) -> set[str]:
        """The labels that environments were given so far."""
        return self._known | ({OTHER} if self._others else set())

    def of(self, env_id: str) -> str:
        """The label of an environment that is registered."""
        if env_id not in self._known:
            if len(self._known) >= self._most:
                self._others = True
                return OTHER
            self._known.add(env_id)
        return env_id
