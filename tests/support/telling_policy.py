"""A policy that tells its replies while they are sampled."""

import asyncio

from tests.support.agent_policy import (
    ScriptedPolicy,
)

# -- over the wire -----------------------------------------------------------------------------------------------------


class TellingPolicy(ScriptedPolicy):
    """Tells its tokens one by one; before the last ones it waits for a gate."""

    async def generate(self, request):
        gate, self._gate = self._gate, None
        try:
            result = await super().generate(request)
        finally:
            self._gate = gate
        try:
            for place, each in enumerate(result.token_ids):
                if gate is not None and place == len(result.token_ids) - 2:
                    await gate.wait()
                if request.on_tokens is not None:
                    request.on_tokens([each])
        except asyncio.CancelledError:
            self.cancelled += 1
            self.log.calls.pop()
            raise
        return result
