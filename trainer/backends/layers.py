"""A model's layers in training: compiled (torch.compile), or recomputed for the gradient."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rollgym.trainer.backends.heads import Head, PolicyHead
from rollgym.trainer.backends.prefix_cache import take_replays
from rollgym.trainer.core.errors import ConfigError


class GradientCheckpointing:
    """Lets the library compute activations again, which it does where a layer is in training mode.

    Only the layers themselves are put there, and nothing below them: a part that draws in training mode what it
    computes in evaluation (routers, dropout) computes what replies are sampled with.

    Args:
        model: What is trained: a language model, or a critic with one as its body.
        enabled: Whether it does; if not, nothing is changed.

    Raises:
        ConfigError: If the library cannot with this family.
    """

    def __init__(self, model: nn.Module, *, enabled: bool) -> None:
        self._bodies = bodies_of(model) if enabled else []
        for body in self._bodies:
            # Later releases of transformers have another name for it.
            named_now = hasattr(body, "activation_checkpointing_enable")
            enable = body.activation_checkpointing_enable if named_now else body.gradient_checkpointing_enable
            try:
                enable({"use_reentrant": False})
            except ValueError as error:
                raise ConfigError(f"model.gradient_checkpointing: {error} Leave it out") from error
            take_replays(body)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Enable checkpointing of activations inside the context."""
        modules = [module for body in self._bodies for module in body.modules()]
        layers = [module for module in modules if isinstance(module, GradientCheckpointingLayer)]
        for layer in layers:
            layer.training = True
        try:
            yield
        finally:
            for layer in layers:
                layer.training = False


def bodies_of(model: nn.Module) -> list[PreTrainedModel]:
    """Return the language models in what is trained: the policy itself, or a critic's body."""
    if isinstance(model, PreTrainedModel):
        return [model]
    return [module for module in model.children() if isinstance(module, PreTrainedModel)]


def layers_of(body: nn.Module) -> list[nn.Module]:
    """Return a language model's layers: what the library says must not be cut in two."""
    names = set(getattr(body, "_no_split_modules", None) or [])
    return [module for module in body.modules() if type(module).__name__ in names]


_INDUCTOR = "inductor"
_CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def compiler_of(setting: str | None, device: torch.device) -> str | None:
    """Return what compiles layers on a device: what `model.compile` names; None if nothing does.

    Args:
        setting: `model.compile`.
        device: The device that computes them.
    """
    if setting != "auto":
        return setting
    has_compiler = device.type != "cpu" and find_spec("triton") is not None
    return _INDUCTOR if has_compiler and _INDUCTOR in torch.compiler.list_backends() else None


def keep_compiled() -> None:
    """Have inductor keep what it compiles where the next run finds it, if the user has not said where.

    By default torch keeps it among temporary files, which are gone when the machine, or the container, starts again;
    once torch has chosen that folder in this process, the variable names it.
    """
    said = os.environ.get(_CACHE_VARIABLE)
    is_torchs_own = said is not None and Path(said).parent == Path(tempfile.gettempdir())
    if said is None or (is_torchs_own and Path(said).name.startswith("torchinductor_")):
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        os.environ[_CACHE_VARIABLE] = str(home / "rollgym" / "compiled")


class CompiledLayers:
    """Has training steps run compiled layers, each by itself, as a model's layers share their code.

    What makes log-probabilities of a policy's logits is compiled, too: it goes over all of a vocabulary for every
    token, in several passes if it is not.

    Sampling with the same weights runs the layers uncompiled.

    Rows are of many lengths: layers are compiled for any length, and once more where rows share what they begin with.

    Args:
        head: What is trained, and what is read off it; nothing wraps it yet.
        backend: What compiles, by torch's name, such as `inductor`; None leaves the layers as they are.

    Attributes:
        compiler: What compiles.

    Raises:
        ConfigError: If torch has no such backend.
    """

    def __init__(self, head: Head, backend: str | None) -> None:
        self._layers: list[nn.Module] = []
        self._policy: PolicyHead | None = None
        self.compiler = backend
        if backend is None:
            return
        if backend not in torch.compiler.list_backends(exclude_tags=()):
            known = ", ".join(torch.compiler.list_backends())
            raise ConfigError(f"model.compile {backend}: torch has no such backend; it has {known}")
        if backend == _INDUCTOR:
            keep_compiled()
        self._layers = [layer for body in bodies_of(head.model) for layer in layers_of(body)]
        for layer in self._layers:
            layer.compile(backend=backend, dynamic=True)
        self._compiled = [layer._compiled_call_impl for layer in self._layers]
        if isinstance(head, PolicyHead):
            self._policy, self._plain = head, head.numbers_of_logits
            self._of_logits = torch.compile(head.numbers_of_logits, backend=backend, dynamic=True)
        self._use(compiled=False)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the compiled layers inside the context, the uncompiled ones outside."""
        self._use(compiled=True)
        try:
            yield
        finally:
            self._use(compiled=False)

    def _use(self, *, compiled: bool) -> None:
        for number, layer in enumerate(self._layers):
            layer._compiled_call_impl = self._compiled[number] if compiled else None
        if self._policy is not None:
            self._policy.numbers_of_logits = self._of_logits if compiled else self._plain
