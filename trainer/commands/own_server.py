"""An environment server in this very process, for `roll-train rollout`: a debugger reaches the environments' code."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from env_server.process.embedding import ConfigurationError, serve_here
from trainer.core.errors import ConfigError
from trainer.core.plugins import load_attribute


@asynccontextmanager
async def server_in_this_process(environments: Sequence[str]) -> AsyncIterator[str]:
    """Serve the built-in environments and `environments` while the context is open, and give the server's URL.

    Raises:
        ConfigError: If an environment cannot be served, or a module cannot be imported.
    """
    for named in environments:
        # Whatever a module of the user's raises when it is imported is made readable here.
        load_attribute(named.rpartition("=")[2])
    async with AsyncExitStack() as stack:
        try:
            url = await stack.enter_async_context(serve_here(environments, allow_expert=True))
        except ConfigurationError as error:
            raise ConfigError(f"cannot serve {', '.join(environments)}: {error}") from error
        yield url
