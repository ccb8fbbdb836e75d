"""Per-Head Muon for matrices and AdamW for the rest, as one optimizer with one learning rate (K3 report §2.5; arXiv 2502.16982).

Muon, for each matrix W [r, c] (a head's rows, one expert, or a whole projection, as its `ParamSpec` says), with gradient G:

    M ← μM + (1−μ)G,   D = (1−μ)G + μM (Nesterov),   W ← W − η (0.2·√max(r, c) · NewtonSchulz(D) + λW)

The factor gives the update the root mean square of AdamW's, about 0.2, so both share η. Newton–Schulz doesn't see the scale of D, so a
head whose gradient is a hundred times larger moves no further than the others, which it would within one whole matrix.

Matrices of one shape are stacked over heads, experts and layers into batches for Newton–Schulz: one by one they're too small to keep
a CPU or a GPU busy.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer

from openk3.errors import UserError
from openk3.ops.orthogonalize import newton_schulz
from openk3.optim.specs import ParamSpec

# What the iterates and Gram matrices of one batched Newton–Schulz may take. On a CPU they should stay in the cores' own caches; elsewhere
# the batch should fill the device.
CPU_BYTES_PER_THREAD = 2 << 20
DEVICE_BYTES = 1 << 30

Piece = tuple[Tensor, ...]  # parameter, gradient and momentum of some blocks: [n, r, c] each


class MuonAdamW(Optimizer):
    """Updates each parameter by the rule of its `ParamSpec`; parameters without a gradient are left alone.

    lr drives both rules, times a spec's `lr_scale`; set it between steps by `set_lr` or any torch scheduler. weight_decay is
    decoupled, and 0 for "adamw-no-decay". ns_dtype None computes Newton–Schulz in float32; bfloat16 pays where the machine has matrix
    units for it. `state_dict()` and `load_state_dict()` continue bit by bit; loading checks the parameters' names.
    """

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        coefficients: str = "quintic-muon",
        ns_dtype: torch.dtype | None = None,
    ):
        grouped: dict[tuple[str, float], list[ParamSpec]] = defaultdict(list)
        for spec in specs:
            grouped[spec.treatment, spec.lr_scale].append(spec)
        groups: list[dict[str, Any]] = []
        for (treatment, lr_scale), members in grouped.items():
            group = {"params": [(s.name, s.param) for s in members], "treatment": treatment, "lr_scale": lr_scale}
            if treatment == "muon":
                group |= {"rows": [s.rows for s in members], "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
                group |= {"ns_steps": ns_steps, "coefficients": coefficients, "ns_dtype": ns_dtype}
            else:
                group |= {"betas": betas, "eps": eps, "weight_decay": 0.0 if treatment == "adamw-no-decay" else weight_decay}
                group["fused"] = True  # also tells torch's load_state_dict to keep step counts beside their parameters
            groups.append(group)
        super().__init__(groups, {"lr": lr})

    def set_lr(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            (self._muon if group["treatment"] == "muon" else self._adamw)(group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        ours, theirs = ([g.get("param_names") for g in groups] for groups in (self.param_groups, state_dict["param_groups"]))
        if ours != theirs:
            changed = sorted({n for g in ours for n in g or ()} ^ {n for g in theirs for n in g or ()})
            what = f"parameters differ, such as {changed[0]}" if changed else "the same parameters are grouped otherwise"
            raise UserError(f"the saved optimizer belongs to another model or optimizer option: {what}")
        super().load_state_dict(state_dict)

    def _adamw(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        for p in params:
            if not self.state[p]:
                self.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32, device=p.device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        states = [self.state[p] for p in params]
        adamw(
            params,
            [p.grad for p in params],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"] * group["lr_scale"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _muon(self, group: dict[str, Any]) -> None:
        stacks: dict[tuple, list[Piece]] = defaultdict(list)
        for p, rows in zip(group["params"], group["rows"], strict=True):
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros_like(p, memory_format=torch.contiguous_format)
            shape = (-1, rows or p.shape[-2], p.shape[-1])
            stacks[shape[1:], p.dtype, p.device].append((p.view(shape), p.grad.reshape(shape), state["momentum"].view(shape)))
        for (shape, dtype, device), pieces in stacks.items():
            item = (group["ns_dtype"] or torch.promote_types(dtype, torch.float32)).itemsize
            work = 2 * min(shape) * sum(shape) * item  # of one matrix: two iterates r × c, two Gram matrices of the short side
            budget = CPU_BYTES_PER_THREAD * torch.get_num_threads() if device.type == "cpu" else DEVICE_BYTES
            for chunk in _chunks(pieces, max(1, budget // work)):
                _muon_update(chunk, group)


def _chunks(pieces: Iterable[Piece], limit: int) -> Iterator[list[Piece]]:
    """The same blocks in the same order, `limit` at a time: long pieces are cut, short ones put together."""
    chunk: list[Piece] = []
    room = limit
    for piece in pieces:
        start, blocks = 0, piece[0].shape[0]
        while start < blocks:
            taken = min(room, blocks - start)
            chunk.append(tuple(t[start : start + taken] for t in piece))
            start, room = start + taken, room - taken
            if room == 0:
                yield chunk
                chunk, room = [], limit
    if chunk:
        yield chunk


def _muon_update(chunk: list[Piece], group: dict[str, Any]) -> None:
    params, grads, momenta = (list(tensors) for tensors in zip(*chunk, strict=True))
    sizes = [p.shape[0] for p in params]
    stacked = params[0].new_empty(sum(sizes), *params[0].shape[1:])  # D [n, r, c]
    direction = list(stacked.split(sizes))
    torch._foreach_lerp_(momenta, grads, 1 - group["momentum"])
    if group["nesterov"]:
        torch._foreach_copy_(direction, grads)
        torch._foreach_lerp_(direction, momenta, group["momentum"])
    else:
        torch._foreach_copy_(direction, momenta)
    update = newton_schulz(stacked, group["ns_steps"], group["coefficients"], dtype=group["ns_dtype"])
    lr = group["lr"] * group["lr_scale"]
    torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
    torch._foreach_add_(params, list(update.split(sizes)), alpha=-lr * 0.2 * math.sqrt(max(stacked.shape[1:])))


def clip_grad_norm(params: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """Scale the gradients so that their common 2-norm is at most `max_norm` (None: only measure); the norm before, 0-dim."""
    if max_norm is None:
        return torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    return torch.nn.utils.clip_grad_norm_(params, max_norm)
