"""What clients of inference servers ask in tests, and the weights of a hash model in each form that servers take."""

import pytest
import torch
from safetensors.numpy import save_file

from rollgym.trainer.inference.base import GenerationRequest, SamplingParams
from tests.support.inference_server.models import HashModel

PROMPT = [72, 101, 108, 108, 111]
BOTH = pytest.mark.parametrize("dialect", ["vllm", "sglang"])
# The paths by which a server is asked for a reply, and told of weights.
GENERATE = {"vllm": "/inference/v1/generate", "sglang": "/generate"}
UPDATE_OF = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}


def request(name="r", tokens=6, seed=1, **sampling):
    return GenerationRequest(name, PROMPT, SamplingParams(tokens, **sampling), seed, session_key="episode 7")


def logprobs_of(seed, ids, start=5):
    """What the model of a seed says of ids, with nothing kept from before."""
    rows = HashModel(seed).prompt_logprobs(PROMPT + ids)
    return [float(row[token]) for row, token in zip(rows[start - 1 :], (PROMPT + ids)[start:], strict=False)]


class Weights:
    """The hash model of a seed, in each of the forms that a server may take it in."""

    def __init__(self, seed, folder=None):
        self._model = HashModel(seed)
        self._folder = folder

    def tensors(self):
        for name, array in self._model.weights.items():
            yield name, torch.from_numpy(array.copy())

    def require_held(self):
        pass

    async def folder(self):
        return self._model.write(self._folder / "weights")

    async def adapter_folder(self):
        folder = self._folder / f"adapter-{self._model.seed}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text("{}")
        save_file(self._model.weights, folder / "adapter_model.safetensors")
        return folder
