"""A key-value store as tools: the part of a tool environment that keeps something."""

from collections.abc import Mapping

from envs.tools.tool import Tool, ToolError, parameters

_KEY = {"type": "string", "minLength": 1, "maxLength": 100}
_VALUE = {"type": "string", "maxLength": 10_000}
_MOST_KEYS = 1_000


class Store:
    """Texts by key."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def fill(self, texts: Mapping[str, str]) -> None:
        """Begin anew with these."""
        self._texts = dict(texts)

    @property
    def texts(self) -> dict[str, str]:
        """What is stored, sorted by key."""
        return dict(sorted(self._texts.items()))

    def tools(self) -> tuple[Tool, ...]:
        """Return the tools that read and change it."""
        return (
            Tool("store_list", "List the keys of the store.", parameters(), self._list),
            Tool("store_get", "Return the value of a key.", parameters(["key"], key=_KEY), self._get),
            Tool(
                "store_set",
                "Store a value under a key; what was there is replaced.",
                parameters(["key", "value"], key=_KEY, value=_VALUE),
                self._set,
            ),
            Tool("store_delete", "Remove a key and its value.", parameters(["key"], key=_KEY), self._delete),
        )

    def _list(self) -> list[str]:
        return sorted(self._texts)

    def _get(self, key: str) -> str:
        self._require(key)
        return self._texts[key]

    def _set(self, key: str, value: str) -> str:
        if key not in self._texts and len(self._texts) >= _MOST_KEYS:
            raise ToolError(f"the store is full: it holds {_MOST_KEYS} keys")
        self._texts[key] = value
        return "stored"

    def _delete(self, key: str) -> str:
        self._require(key)
        del self._texts[key]
        return "deleted"

    def _require(self, key: str) -> None:
        if key not in self._texts:
            raise ToolError(f"there is no key {key!r}; store_list gives those that are there")
