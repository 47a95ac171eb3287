"""vLLM as a server of the trainer."""

import os
import sys

from rollgym.trainer.config.inference import InferenceSettings, LaunchSettings
from rollgym.trainer.config.server_kinds import vllm_lora_rank
from rollgym.trainer.inference import vllm_probe
from rollgym.trainer.inference.server_program import SERVED_NAME, Command, ServedModel, ServerProgram


def _command(inference: InferenceSettings, launch: LaunchSettings, model: ServedModel, port: int) -> Command:
    words = [
        *(launch.command or [sys.executable, "-m", "vllm.entrypoints.cli.main"]),
        *("serve", str(model.folder), "--served-model-name", SERVED_NAME),
        *("--host", launch.host, "--port", str(port)),
        *("--max-model-len", str(model.max_length), "--dtype", inference.dtype),
        *("--tensor-parallel-size", str(launch.tensor_parallel)),
        # Log-probabilities of the distribution that tokens are drawn from, and requests of token ids.
        *("--logprobs-mode", "processed_logprobs", "--enable-scale-out"),
        # How tokens are drawn is said by each request, never by a file of the model's.
        *("--generation-config", "vllm", "--disable-uvicorn-access-log"),
    ]
    # Pauses and weight updates are routes of this mode alone.
    variables = {"VLLM_SERVER_DEV_MODE": "1"}
    if launch.memory_fraction is not None:
        words += ["--gpu-memory-utilization", str(launch.memory_fraction)]
    if inference.quantization is not None:
        words += ["--quantization", inference.quantization]
    if model.broadcast:
        words += ["--weight-transfer-config", f'{{"backend": "{model.broadcast}"}}']
    if inference.sleep_level:
        words.append("--enable-sleep-mode")
    if inference.routed_experts:
        words.append("--enable-return-routed-experts")
    if model.lora_rank:
        words += ["--enable-lora", "--max-lora-rank", str(vllm_lora_rank(model.lora_rank))]
        words += ["--max-loras", str(model.adapters)]
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if key := os.environ.get(inference.api_key_variable):
        variables["VLLM_API_KEY"] = key
    return words, variables


VLLM = ServerProgram(
    probe=vllm_probe.probe,
    look=vllm_probe.look,
    try_out=vllm_probe.try_out,
    sign_of_life=vllm_probe.SIGN_OF_LIFE,
    engine_sign=vllm_probe.ENGINE_SIGN,
    command=_command,
    row_switch=lambda tokens: f"--max-model-len {tokens}",
    exactly=lambda _: "start vLLM with --logprobs-mode processed_logprobs",
)
"""What the trainer needs to start and use a vLLM server; found by its kind."""
