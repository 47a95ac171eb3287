"""The adapters of one server: the one that draws, and old ones that replies under way still need."""

from uuid import uuid4

from trainer.inference.base import SamplingParams
from trainer.inference.dialect import GenerationCall
from trainer.inference.errors import InferenceError
from trainer.inference.server_link import ServerLink
from trainer.inference.under_way import UnderWay


class ServedAdapters:
    """Account of the adapters of one server.

    Args:
        link: Talks to it.
        under_way: Replies that it draws.

    Attributes:
        current: Name of the one that draws new replies; None for the base model.
    """

    def __init__(self, link: ServerLink, under_way: UnderWay) -> None:
        self._link = link
        self._under_way = under_way
        self.current: str | None = None
        self._retired: set[str] = set()

    async def load(self, folder: str, version: int) -> None:
        """Load the adapter of a version from a folder, under a name that was never used; from now on it draws.

        Raises:
            InferenceError: If the server did not take it; the old one stays.
        """
        name = f"policy-{version}-{uuid4().hex[:8]}"
        try:
            await self._link.converse(self._link.dialect.load_adapter(name, folder))
        except InferenceError:
            # It may have been loaded all the same.
            self._retired.add(name)
            raise
        if self.current is not None:
            self._retired.add(self.current)
        self.current = name

    def unload_unused(self) -> None:
        """Have the server forget old ones that no reply needs any more; nobody waits for it."""
        for name in self._retired - {each.adapter for each in self._under_way.calls}:
            self._retired.discard(name)
            self._link.leave(self._link.dialect.unload_adapter(name))

    async def unload_all(self) -> None:
        """Have the server forget all that this run has loaded."""
        names = self._retired | ({self.current} if self.current is not None else set())
        self._retired, self.current = set(), None
        for name in names:
            await self._link.converse(self._link.dialect.unload_adapter(name))

    async def has(self, name: str) -> bool:
        """Ask with one token whether the server knows an adapter: a request may be refused for other reasons."""
        call = GenerationCall(uuid4().hex, [0], SamplingParams(1), 0, adapter=name)
        answer = await self._link.http.call(self._link.dialect.generate(call))
        return answer.ok
