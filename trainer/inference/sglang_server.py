"""SGLang as a server of the trainer."""

import os
import sys

from rollgym.trainer.config.inference import InferenceSettings, LaunchSettings
from rollgym.trainer.inference import sglang_probe
from rollgym.trainer.inference.dialect import Capabilities
from rollgym.trainer.inference.server_program import SERVED_NAME, Command, ServedModel, ServerProgram
from rollgym.trainer.inference.sglang_probe import TOKENS_KEPT_FREE


def _command(inference: InferenceSettings, launch: LaunchSettings, model: ServedModel, port: int) -> Command:
    words = [
        *(launch.command or [sys.executable, "-m", "sglang.launch_server"]),
        *("--model-path", str(model.folder), "--served-model-name", SERVED_NAME),
        *("--host", launch.host, "--port", str(port)),
        *("--context-length", str(model.max_length + TOKENS_KEPT_FREE), "--dtype", inference.dtype),
        *("--tp-size", str(launch.tensor_parallel)),
        # Without it each event of a stream repeats all tokens so far, and replies are not streamed.
        "--incremental-streaming-output",
    ]
    if launch.memory_fraction is not None:
        words += ["--mem-fraction-static", str(launch.memory_fraction)]
    if inference.quantization is not None:
        words += ["--quantization", inference.quantization]
    if inference.sleep_level:
        words.append("--enable-memory-saver")
    if inference.routed_experts:
        words.append("--enable-return-routed-experts")
    if model.lora_rank:
        words += ["--enable-lora", "--max-lora-rank", str(model.lora_rank), "--lora-target-modules", "all"]
        words += ["--max-loras-per-batch", str(model.adapters)]
    if key := os.environ.get(inference.api_key_variable):
        words += ["--api-key", key]
    return words, {
        # Otherwise a health check makes it draw a token, and blocks for as long as it is paused.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        # What it keeps free may pass the model's own length: no row reaches there.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }


def _exactly(capabilities: Capabilities) -> str:
    """Return how to have SGLang report log-probabilities of the distribution that tokens are drawn from."""
    remedies = []
    if capabilities.logprobs_of == "model":
        remedies.append("start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB")
    if capabilities.masked_top_k:
        remedies.append(f"give top_k a value of 1 to {capabilities.masked_top_k} beside top_p")
    return ", or ".join(remedies) or "this SGLang has none after top-p and top-k"


SGLANG = ServerProgram(
    probe=sglang_probe.probe,
    look=sglang_probe.look,
    try_out=sglang_probe.try_out,
    sign_of_life=sglang_probe.SIGN_OF_LIFE,
    engine_sign=sglang_probe.ENGINE_SIGN,
    command=_command,
    row_switch=lambda tokens: f"--context-length {tokens + TOKENS_KEPT_FREE}",
    exactly=_exactly,
)
"""What the trainer needs to start and use an SGLang server; found by its kind."""
