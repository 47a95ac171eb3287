"""Has Megatron-Core believe that the processor is its CUDA device, so that its own code runs where there is none.

For tests alone, in processes of their own: it changes torch for good. It shows the mathematics and who exchanges what,
not kernels, streams or NCCL.
"""

import contextlib

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _OnProcessor(TorchFunctionMode):
    """Rewrites what is asked of torch: factories on "cuda", copies to it, and the names of tensors' types."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.")
        return function(*args, **kwargs)


class _Stream:
    """A stream of a device whose work is done when it is given."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, other):
        """Nothing is under way."""

    def synchronize(self):
        """Nothing is under way."""

    def record_event(self, *_):
        """Return what is waited for in vain: itself."""
        return self

    def wait_event(self, event):
        """Nothing is under way."""


def install() -> None:
    """Change torch in this process."""
    if getattr(install, "done", False):
        return
    install.done = True
    one = _Stream()
    torch.cuda.current_device = lambda: _CPU
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.empty_cache = lambda: None
    torch.cuda.Stream = _Stream
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_: one
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    torch.cuda.manual_seed = lambda seed: None
    torch.cuda.get_rng_state = lambda *_: torch.zeros(1, dtype=torch.uint8)
    torch.cuda.set_rng_state = lambda *_: None
    import megatron.core.tensor_parallel.random as randomness
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    randomness._get_cuda_rng_state = lambda *_, **__: torch.zeros(1, dtype=torch.uint8)
    randomness._set_cuda_rng_state = lambda *_, **__: None
    # What comes from the device for the host's own use comes as numbers of numpy.
    dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )
    _OnProcessor().__enter__()
