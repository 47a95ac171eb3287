"""An inference client that records its replies in the rollout log, and replays those that the log has."""

from rollgym.trainer.inference.base import GenerationRequest, GenerationResult, InferenceClient
from rollgym.trainer.inference.forwarding import ForwardingClient
from rollgym.trainer.rollout.recall import Recall


class LoggedClient(ForwardingClient):
    """An inference client that logs each reply before it returns it, and replays those that the log has.

    Args:
        client: The client that samples new replies.
        recall: The run's episodes.
    """

    def __init__(self, client: InferenceClient, recall: Recall) -> None:
        super().__init__(client)
        self._recall = recall

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Return the logged reply, or a new one once it is logged.

        Raises:
            WriteError: If the disk does not take it.
        """
        tape = self._recall.tape(request.session_key)
        if tape is None:
            return await self._client.generate(request)
        recalled = tape.reply(request)
        if recalled is not None:
            return recalled
        result = await self._client.generate(request)
        tape.replied(request, result)
        await self._recall.log.commit()
        return result

    async def generate_together(self, requests: list[GenerationRequest]) -> list[GenerationResult]:
        """Return the replies of one batch. It is computed whole if the log lacks any of them.

        Sums depend on a batch's composition, so those that the log lacks come out as they would have, and the others as
        they are in the log.
        """
        tapes = [self._recall.tape(request.session_key) for request in requests]
        recalled = [
            None if tape is None else tape.reply(request)
            for tape, request in zip(tapes, requests, strict=True)
        ]
        if all(result is not None for result in recalled):
            return [result for result in recalled if result is not None]
        results = await self._client.generate_together(requests)
        for index, (tape, known) in enumerate(zip(tapes, recalled, strict=True)):
            if known is not None:
                results[index] = known
            elif tape is not None:
                tape.replied(requests[index], results[index])
        await self._recall.log.commit()
        return results
