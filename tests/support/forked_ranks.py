"""Ranks whose processes are forked from one that has imported what they need."""

import os

import torch

from rollgym.trainer.backends.local_ranks import LocalRanks
from tests.support.preloaded import RANK, can_be_forked, fork


class ForkedRanks(LocalRanks):
    """Ranks on the processor that start in no time; in all else those that a user has."""

    def _launched(self, pipe, said, environment):
        # Who forks must not have woken an accelerator.
        if torch.accelerator.is_available() or not can_be_forked(RANK, environment):
            return super()._launched(pipe, said, environment)
        return fork(
            RANK, ["3", str(os.getpid())], environment, stdout=said, passed=pipe, start_new_session=True
        )
