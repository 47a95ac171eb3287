"""Recipes by which ranks have no model: what is tried is how they answer and end.

They import nothing that a rank itself does not, since each of these tests starts ranks of its own.
"""

import os
import signal
import time
from datetime import timedelta

import torch


class Patient:
    """Something in a rank that does what a test asks it to, and no more."""

    def __init__(self, group):
        self._group = group

    def meet(self):
        """Wait for all the other ranks, as long as it takes."""
        return self._group.largest(self._group.rank)

    def take(self, content):
        """Be given something, and wait for all the others."""
        return self.meet()

    def compute(self, seconds):
        """Be busy without an end in sight."""
        time.sleep(seconds)

    def fail(self, rank, message):
        """Raise in one rank, while the others wait for it."""
        if self._group.rank == rank:
            raise ValueError(message)
        return self.meet()

    def die(self, rank, word):
        """End one rank after a last word, while the others wait for it."""
        if self._group.rank == rank:
            os.write(2, word.encode())
            os.kill(os.getpid(), signal.SIGKILL)
        return self.meet()


def patient(group, backends):
    """Make one."""
    return Patient(group)


class Apart:
    """Ranks of which some meet in a group of their own, made as libraries make theirs."""

    def __init__(self, group):
        self._group = group
        self._own = torch.distributed.new_group([0, 1])

    def meet(self, absent):
        """Wait for all others in that group, but for one who never comes."""
        if self._group.rank != absent:
            torch.distributed.all_reduce(torch.zeros(1), group=self._own)
        else:
            time.sleep(600)


def apart(group, backends):
    """Make one; from then on, ranks wait for each other no longer than a moment."""
    group.timeout = timedelta(seconds=3)
    return Apart(group)


def restless(group, backends):
    """Make one who is patient; from then on, ranks wait for each other no longer than a moment."""
    group.timeout = timedelta(seconds=3)
    return Patient(group)
