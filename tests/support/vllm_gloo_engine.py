"""A transfer engine for a real vLLM that takes broadcasts over gloo, where there is no accelerator for NCCL.

Everything but the group is vLLM's own: its routes, its sessions of updates, its loading. It is imported in vLLM's
process alone, by a plugin that `written` writes down.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any

BACKEND = "gloo"
_PATIENCE = timedelta(seconds=120)


def written(folder: Path) -> Path:
    """Write a distribution that names this module as vLLM's plugin; vLLM finds it by `PYTHONPATH`."""
    information = folder / "rollgym_gloo-1.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: rollgym-gloo\nVersion: 1\n")
    (information / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nrollgym_gloo = tests.support.vllm_gloo_engine:register\n"
    )
    return folder


def register() -> None:
    """Tell vLLM of the engine."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, _engine())


def _engine() -> Any:
    import torch
    import torch.distributed as distributed
    from torch.distributed import PrefixStore, TCPStore
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

    class GlooWeightTransferEngine(NCCLWeightTransferEngine):
        def init_transfer_engine(self, init_info: Any) -> None:
            store = TCPStore(
                init_info.master_address, init_info.master_port, init_info.world_size, timeout=_PATIENCE
            )
            prefixed = PrefixStore("weight_transfer", store)
            self.group = distributed.ProcessGroupGloo(
                prefixed, init_info.rank_offset, init_info.world_size, _PATIENCE
            )

        def receive_weights(self, update_info: Any) -> None:
            options = distributed.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            described = zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True)
            for name, dtype, shape in described:
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                self.group.broadcast([tensor], options).wait()
                self.model.load_weights([(name, tensor)])

    return GlooWeightTransferEngine
