"""The verifier of Arithmetic-v0 with NeMo Gym's resources server: `POST /verify`, the response a whole model response.

Its launcher wants Ray and a head server; what it adds around the application is added here by the same calls.
"""

from lake import serve
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient
from omegaconf import OmegaConf
from resources_servers.gymnasium import extract_text

from rollgym.envs.verifiers.arithmetic import ArithmeticEnv

_VERIFIER = ArithmeticEnv()


class SumVerifyRequest(BaseVerifyRequest):
    question: str
    answer: str


class SumVerifyResponse(BaseVerifyResponse):
    outcome: str


class SumServer(SimpleResourcesServer):
    async def verify(self, body: SumVerifyRequest) -> SumVerifyResponse:
        verdict = _VERIFIER.score(
            extract_text(body.response), {"question": body.question, "answer": body.answer}
        )
        return SumVerifyResponse(**body.model_dump(), reward=verdict.score, outcome=verdict.outcome)


if __name__ == "__main__":
    nowhere = BaseServerConfig(host="127.0.0.1", port=0)
    server = SumServer(
        config=BaseResourcesServerConfig(host="127.0.0.1", port=0, entrypoint="app.py", name="sums"),
        server_client=ServerClient(head_server_config=nowhere, global_config_dict=OmegaConf.create({})),
    )
    app = server.setup_webserver()
    server.setup_liveness(app)
    server.setup_exception_middleware(app)
    serve(app)
