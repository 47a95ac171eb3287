"""Players of sessions at gateways, over plain HTTP, so that nothing but the servers can save what they play."""

from typing import Any

import httpx

from rollgym.clients.protocol.errors import ProblemError
from tests.support.client_server import ServerProcess


class Player:
    """Plays one session over plain HTTP, so that nothing but the servers can save it."""

    def __init__(self, url: str, env_id: str = "Walk-v0", **kwargs: Any) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=60)
        self.env_id = env_id
        self.kwargs = kwargs
        self.session_id = ""
        self.seen: list[Any] = []

    async def begin(self, seed: int) -> "Player":
        body = {"env_id": self.env_id, "kwargs": self.kwargs, "reset": {"seed": seed}}
        made = await self.ask("POST", "/v1/sessions", body)
        self.session_id = made["session_id"]
        self.seen = [made["reset"]]
        return self

    async def step(self, action: Any, *, url: str | None = None) -> dict[str, Any]:
        number = self.seen[-1]["step"]
        body = {"action": action, "episode": self.seen[-1]["episode"], "step": number}
        self.seen.append(await self.ask("POST", f"{url or ''}/v1/sessions/{self.session_id}/step", body))
        return self.seen[-1]

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        answer = await self.http.request(method, path, json=body)
        if answer.status_code >= 400:
            raise ProblemError.from_problem(answer.json())
        return answer.json() if answer.content else None

    async def episode(self) -> Any:
        return await self.ask("GET", f"/v1/sessions/{self.session_id}/episode")


async def undisturbed(url: str, seed: int, actions: list[str], **kwargs: Any) -> list[Any]:
    player = await Player(url, **kwargs).begin(seed)
    for action in actions:
        await player.step(action)
    await player.ask("DELETE", f"/v1/sessions/{player.session_id}")
    await player.http.aclose()
    return player.seen


async def sessions_at(nodes: list[ServerProcess]) -> int:
    async with httpx.AsyncClient() as http:
        infos = [(await http.get(f"{node.url}/v1/info")).json() for node in nodes]
    return sum(info["capacity"]["sessions"] for info in infos)
