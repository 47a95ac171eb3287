"""FrozenLake with NeMo Gym's Gymnasium server: HTTP, the session in a cookie, the action a whole model response.

Its launcher wants Ray and a head server; what it adds around the application is added here by the same calls.
"""

from typing import Any

from lake import Lake, serve
from nemo_gym.base_resources_server import BaseResourcesServerConfig
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.openai_utils import NeMoGymResponse
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf
from resources_servers.gymnasium import GymnasiumServer, extract_text


class LakeServer(GymnasiumServer):
    async def reset(
        self, metadata: dict[str, Any], session_id: str | None = None
    ) -> tuple[str, dict[str, Any]]:
        lake = self.session_state[session_id] = Lake()
        return lake.reset(metadata.get("seed"))

    async def step(
        self, action: NeMoGymResponse, metadata: dict[str, Any], session_id: str | None = None
    ) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return self.session_state[session_id].step(extract_text(action))


if __name__ == "__main__":
    nowhere = BaseServerConfig(host="127.0.0.1", port=0)
    server = LakeServer(
        config=BaseResourcesServerConfig(host="127.0.0.1", port=0, entrypoint="app.py", name="lake"),
        server_client=ServerClient(head_server_config=nowhere, global_config_dict=OmegaConf.create({})),
    )
    app = server.setup_webserver()
    server.setup_liveness(app)
    server.setup_exception_middleware(app)
    serve(app)
