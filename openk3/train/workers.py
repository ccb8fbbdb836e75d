"""Forward and backward of a step's micro-batches, side by side on the CPU's cores, and the memory they work in.

A small model's operations are too short for two cores to share: on the nano, two workers with one thread each do a step in about two
thirds of the time that one worker with two threads takes. Each worker returns its gradients, and they're summed in the order of the
micro-batches, so the result doesn't depend on who was first.
"""

import ctypes
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3                # glibc's malloc.h

MicroBatch = tuple[Tensor, Tensor, Tensor]                 # ids and targets [B, T], cu_seqlens


class Workers:
    """`count` threads with a core each. count 0: as many as torch has threads, on a CPU with a row for each; elsewhere one."""

    def __init__(self, device: torch.device, count: int, rows: int):
        self.device, self.threads = device, torch.get_num_threads()
        self.count = count or (min(self.threads, rows) if device.type == "cpu" else 1)
        self.pool = ThreadPoolExecutor(self.count, "openk3-worker") if self.count > 1 else None

    def backward(self, model, batches: Iterable[MicroBatch], counted: int) -> float:
        """Add the gradients of the summed loss over `counted` targets to the parameters' `.grad`; give back the mean loss in nats."""
        params = [p for p in model.parameters() if p.requires_grad]

        def run(batch: MicroBatch) -> tuple[float, tuple[Tensor | None, ...]]:
            ids, targets, cu_seqlens = (x.to(self.device) for x in batch)
            with torch.enable_grad():
                loss = model.loss(ids, targets, cu_seqlens, reduction="sum") / counted
                return float(loss.detach()), torch.autograd.grad(loss, params, allow_unused=True)

        if self.pool is None:
            return sum(_add(params, *run(batch)) for batch in batches)
        torch.set_num_threads(max(1, self.threads // self.count))      # threads that the pool starts inherit it
        try:
            return sum(_add(params, *found) for found in self.pool.map(run, batches))
        finally:
            torch.set_num_threads(self.threads)


def _add(params: list[Tensor], loss: float, grads: tuple[Tensor | None, ...]) -> float:
    fresh = [(p, g) for p, g in zip(params, grads, strict=True) if g is not None and p.grad is None]
    known = [(p.grad, g) for p, g in zip(params, grads, strict=True) if g is not None and p.grad is not None]
    for p, g in fresh:
        p.grad = g
    if known:
        torch._foreach_add_([a for a, _ in known], [b for _, b in known])
    return loss


def keep_freed_memory() -> None:
    """Tell glibc's malloc to keep what is freed: by default every tensor of megabytes is mapped anew and its pages faulted in again,
    which costs a training step on the CPU up to a third of its time. Nothing happens where there's another malloc."""
    if sys.platform == "linux":
        try:
            mallopt = ctypes.CDLL(None).mallopt
        except (OSError, AttributeError):
            return
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
