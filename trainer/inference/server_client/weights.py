"""Which weights and adapters one server has, as far as it says: whether a token may be used, and which version drew it.

Weights are called by the run and the version, so that those of two runs that update one server stay distinct.
"""

import asyncio
from uuid import uuid4

from rollgym.trainer.inference.base import SamplingParams
from rollgym.trainer.inference.errors import (
    ForeignWeightsError,
    MalformedReplyError,
    WeightsError,
    WeightsLostError,
)
from rollgym.trainer.inference.server_client.in_flight import InFlightReplies, OngoingReply
from rollgym.trainer.inference.server_client.link import ServerLink
from rollgym.trainer.inference.servers.chunks import GenerationCall, GenerationChunk
from rollgym.trainer.inference.servers.dialect import GroupAddress

_UNNAMED = "default"
"""What servers call weights that they started with."""


class ServedWeights:
    """Tracks which weights one server has, by the names that it reports.

    Args:
        link: Talks to it.
        under_way: Replies that it draws.
        version: Version of the weights that it started with.

    Attributes:
        version: The policy version that answers now.
        group: The group that tensors come to it by; None if it has joined none.
    """

    def __init__(self, link: ServerLink, under_way: InFlightReplies, version: int) -> None:
        self._link = link
        self._under_way = under_way
        self.version = version
        self.group: GroupAddress | None = None
        self._run = uuid4().hex[:8]
        self._labels = {_UNNAMED: version}
        self._starts_with = {_UNNAMED}
        self._synced = False
        self._distrust: WeightsError | None = None
        self._confirming = asyncio.Lock()
        self._confirmed_at = -1.0
        self._troubles_seen = 0

    def meet(self) -> None:
        """Compare what a server that was just asked calls its weights with what this run has sent."""
        label = self._link.capabilities.weight_label
        if label not in self._labels:
            # It may have been started again, and is in no group then.
            self.group = None
        if label is not None and not self._synced:
            self._starts_with = {_UNNAMED, label}
        if label is not None and label not in self._labels:
            if self._link.need.way is None:
                self._labels = {label: self.version}
            else:
                self._distrust = WeightsLostError(
                    f"{self._link.url} serves weights called {label[:40]!r}, which this run has not sent: send its own "
                    "first"
                )
        self._troubles_seen = self._link.http.troubles

    @property
    def sent(self) -> bool:
        """Whether the server ever took whole weights from this run."""
        return self._synced

    # Trust

    @property
    def distrusted(self) -> WeightsError | None:
        """Why nothing may be sampled, if so."""
        return self._distrust

    def trust(self) -> None:
        """Raise what is wrong with the weights, if something is."""
        if self._distrust is not None:
            raise type(self._distrust)(str(self._distrust)) from self._distrust

    def distrust(self, error: WeightsError) -> None:
        """Refuse all requests with `error` until an update has succeeded; those under way fail, too."""
        self._distrust = error
        self._link.http.interrupt(error)
        # Requests that wait must fail with this error.
        self._under_way.release()

    def lose(self, message: str, label: str | None = None) -> WeightsLostError:
        """Note that the server has other weights than it was sent, and return the error that says so.

        Args:
            message: What was seen.
            label: What the server calls its weights, if it says.
        """
        # A restarted server has left its group.
        self.group = None
        error: WeightsLostError
        if self._synced and label is not None and label not in self._starts_with:
            error = ForeignWeightsError(f"{message}: somebody else updates it, such as another run")
        else:
            error = WeightsLostError(
                f"{message}: it was started again, or somebody else updates it. Send the weights"
            )
        if self._distrust is None:
            self.distrust(error)
        return error

    def forget(self) -> None:
        """The server gave its weights back."""
        self._distrust = WeightsError(f"{self._link.url} gave its weights back: send them before it goes on")
        self._labels = {}

    # Versions

    def label(self, version: int) -> str:
        """The name under which the server receives the weights of a version."""
        return f"{self._run}-{version}"

    def expect(self, version: int) -> None:
        """Tokens of a version may come from now on: a reply can end before its update does."""
        self._labels[self.label(version)] = version

    def taken(self, version: int) -> None:
        """The server has the weights of a version."""
        calls = self._under_way.calls
        oldest = min((each.submitted_version for each in calls), default=version)
        # A restarted server has its initial weights again, even if their version number is the same.
        begun_before = bool(calls) and not self._synced
        self._labels = {
            label: known
            for label, known in self._labels.items()
            if oldest <= known <= version and (begun_before or label not in self._starts_with)
        }
        self.version, self._synced, self._distrust = version, True, None
        self._troubles_seen = self._link.http.troubles

    def taken_as_adapter(self, version: int) -> None:
        """The server has an adapter of a version, beside weights that stay."""
        self.version, self._distrust = version, None

    async def versions_of(self, stretch: GenerationChunk, ongoing: OngoingReply) -> list[int]:
        """Return the version that drew each token of a stretch.

        Raises:
            WeightsLostError: If one of them was drawn by weights that this run did not send.
            MalformedReplyError: If the server does not say what it must.
        """
        submitted = ongoing.submitted_version
        if ongoing.adapter is not None or self._link.need.way is None:
            return [submitted] * len(stretch.token_ids)
        if stretch.labels is None:
            if stretch.token_ids and self._link.need.mode in ("keep", "recompute"):
                raise MalformedReplyError(
                    f"{self._link.url} does not say which weights drew the tokens of a reply"
                )
            if stretch.token_ids:
                await self.confirm()
            return [submitted] * len(stretch.token_ids)
        known = {label: self._labels.get(label, -1) for label in set(stretch.labels)}
        for label, version in known.items():
            if version < submitted:
                raise self.lose(
                    f"{self._link.url} drew tokens with weights called {label[:40]!r} after those of version "
                    f"{submitted}",
                    label,
                )
        return [known[label] for label in stretch.labels]

    async def confirm_after_trouble(self) -> None:
        """Ask what the weights are called, if the server was away: it may have those of its start.

        Raises:
            WeightsLostError: If they are not this run's.
        """
        if self._troubles_seen != self._link.http.troubles and self._link.need.way in ("disk", "broadcast"):
            troubles = self._link.http.troubles
            await self.confirm()
            self._troubles_seen = troubles

    async def confirm(self) -> None:
        """Ask the server for the name of its weights. Concurrent callers share one request.

        Raises:
            WeightsLostError: If they are not this run's.
        """
        loop = asyncio.get_running_loop()
        wanted = loop.time()
        async with self._confirming:
            if self._confirmed_at >= wanted:
                return
            started = loop.time()
            version = self.version
            label = await self._link.converse(self._link.dialect.weight_label())
            if label is None and self._synced and self._troubles_seen != self._link.http.troubles:
                raise self.lose(
                    f"{self._link.url} was away, and its release does not say which weights it serves"
                )
            if label is not None and self._labels.get(label, -1) < version:
                raise self.lose(
                    f"{self._link.url} serves weights called {label[:40]!r}, and not version {version}", label
                )
            self._confirmed_at = started


class ServedAdapters:
    """Tracks which adapters one server has loaded.

    Args:
        link: Talks to it.
        under_way: Replies that it draws.

    Attributes:
        current: Name of the one that draws new replies; None for the base model.
    """

    def __init__(self, link: ServerLink, under_way: InFlightReplies) -> None:
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
        except BaseException:
            # The server may have loaded it nevertheless, for instance if the call was cancelled.
            self._retired.add(name)
            raise
        if self.current is not None:
            self._retired.add(self.current)
        self.current = name

    def unload_unused(self) -> None:
        """Unload, in the background, old adapters that no reply needs any more."""
        if not self._retired:
            return  # This is the way of nearly all replies, which need not look at all others in flight.
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
