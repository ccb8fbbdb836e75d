"""Keeps the experts of every MoE layer equally loaded, by setting the router's selection bias from outside the model.

`QuantileBalancer` (K3 report §2.3.3, appendix D) brackets a training step: `begin_step` tells the routers to count, `end_step` pools
the counts over the ranks, sets each bias to the quantile that would have balanced this step's batch, and says how the load was. The new
bias takes effect in the next step only. `LoadMeter` sums the loads of consecutive steps until they say something.

A router is a module named `….block_sparse_moe.gate` with `k`, `num_experts` and the float32 buffer `e_score_correction_bias` [E]. While
`collect` is true and the module is training, each forward adds to `load` int64 [E] (tokens per expert) and to `histogram` int32
[E, bins] (counts of the required bias from `hist_lo`, in bins of `hist_width`; see `ops/routing.py`), padding left out.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from openk3.errors import UserError
from openk3.ops.routing import histogram_range, observed_range, quantile_from_histogram

METHODS = ("quantile", "sign", "none")


@dataclass(frozen=True, eq=False)
class LayerBalance:
    """How one MoE layer's load fell over the global batch of a step. With q the mean load of an expert:"""

    layer: int
    load: Tensor  # int64 [E] on the CPU, tokens per expert
    q: float
    max_vio: float  # max load / q − 1; 0 is perfect
    min_load: float  # min load / q
    dead: int  # experts without a token
    bias_range: float  # max − min of the bias that comes next
    delta: float  # largest change of a bias in this step


class QuantileBalancer:
    """Sets the selection bias of all routers of a model once per optimizer step.

    method: "quantile" is K3's; "sign" adds γ·sign(mean load − load) as DeepSeek-V3 does (arXiv 2408.15664), a baseline that needs
    hundreds of steps; "none" only measures. ema: how much of the old bias stays, 0 replaces it; small batches (q in the tens) want 0.9.
    observed: shrink the histogram to the range that the last step's required biases had, for routers whose scores lie close together
    (tiny models, early training): K3's interval of length ≥ 2 in 1000 bins can't tell scores apart that differ by less than 0.002.

    Raises `UserError` for options out of range, a bias that isn't float32, and where each token goes to every expert.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        method: str = "quantile",
        bins: int = 1000,
        ema: float = 0.0,
        gamma: float = 1e-3,
        observed: bool = False,
    ):
        if method not in METHODS:
            raise UserError(f"unknown balancing method {method!r}: use one of {', '.join(METHODS)}")
        if not 0 <= ema < 1 or bins < 2 or gamma <= 0:
            raise UserError(f"balancing needs 0 ≤ ema < 1, at least 2 bins and gamma > 0, got ema {ema}, {bins} bins, gamma {gamma}")
        self.method, self.bins, self.ema, self.gamma, self.observed = method, bins, ema, gamma, observed
        self.gates: dict[str, Any] = {name: m for name, m in model.named_modules() if name.endswith("block_sparse_moe.gate")}
        for name, gate in self.gates.items():
            if gate.e_score_correction_bias.dtype != torch.float32:
                dtype = str(gate.e_score_correction_bias.dtype).removeprefix("torch.")
                raise UserError(f"{name}.e_score_correction_bias is {dtype}: keep it float32, rounding it changes which experts are picked")
            if gate.k >= gate.num_experts:
                raise UserError(f"{name} sends each token to {gate.k} of {gate.num_experts} experts: there is nothing to balance")
        self._seen: dict[str, tuple[float, float]] = {}  # per router: the required biases to expect next, if `observed`

    def begin_step(self) -> None:
        """Call before the first micro-batch: fixes each histogram's range for the step, zeroes the counts, starts counting."""
        for name, gate in self.gates.items():
            bias = gate.e_score_correction_bias
            gate.bins = self.bins
            gate.hist_lo, gate.hist_width = histogram_range(bias, self.bins, self._seen.get(name))
            gate.histogram = torch.zeros(gate.num_experts, self.bins, dtype=torch.int32, device=bias.device)
            gate.load = torch.zeros(gate.num_experts, dtype=torch.int64, device=bias.device)
            gate.collect = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No counting inside: for the backward pass under activation checkpointing, which runs the routers a second time."""
        before = [gate.collect for gate in self.gates.values()]
        for gate in self.gates.values():
            gate.collect = False
        try:
            yield
        finally:
            for gate, collect in zip(self.gates.values(), before, strict=True):
                gate.collect = collect

    @torch.no_grad()
    def end_step(self, group: "dist.ProcessGroup | None" = None) -> list[LayerBalance]:
        """Call after the last micro-batch, on every rank: updates the biases in place and returns the step's balance per layer.

        group: ranks that hold different tokens (data and context parallel, never copies of the same tokens); None: this process alone.
        A layer that saw no token keeps its bias.
        """
        if not self.gates:
            return []
        gates = list(self.gates.values())
        for gate in gates:
            gate.collect = False
        loads = torch.stack([gate.load for gate in gates])  # [layers, E]
        counts = torch.stack([gate.histogram for gate in gates])  # [layers, E, bins]
        if group is not None:
            dist.all_reduce(loads, group=group)
            if self.method == "quantile":
                dist.all_reduce(counts, group=group)
        old = torch.stack([gate.e_score_correction_bias for gate in gates])
        new = torch.stack([self._next(gate, load, count) for gate, load, count in zip(gates, loads, counts, strict=True)])
        new = torch.where(loads.sum(-1, keepdim=True) > 0, new, old)
        if self.method == "quantile":
            self._check_counts(loads, counts)
            if self.observed:
                self._look(counts, new - old)
        for gate, bias in zip(gates, new, strict=True):
            gate.e_score_correction_bias.copy_(bias)  # in place: a new tensor would leave a stale one in checkpoints and wrappers
        return self._report(loads, old, new)

    def state_dict(self) -> dict[str, Any]:
        """What the next step needs beside the biases, which are saved with the model."""
        return {"seen": {name: list(ends) for name, ends in self._seen.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seen = {name: (low, high) for name, (low, high) in state["seen"].items()}

    def _next(self, gate: Any, load: Tensor, histogram: Tensor) -> Tensor:
        bias = gate.e_score_correction_bias
        if self.method == "quantile":
            return bias.lerp(quantile_from_histogram(histogram, gate.k, gate.hist_lo, gate.hist_width), 1 - self.ema)
        if self.method == "sign":
            return bias + self.gamma * torch.sign(load.float().mean() - load)
        return bias

    def _check_counts(self, loads: Tensor, counts: Tensor) -> None:
        """Both counts are of the same tokens, or one of them was masked, or counted twice, without the other."""
        routed = (counts[:, 0].sum(-1) * torch.tensor([g.k for g in self.gates.values()], device=counts.device)).tolist()
        for name, total, expected in zip(self.gates, loads.sum(-1).tolist(), routed, strict=True):
            if total != expected:
                raise RuntimeError(f"{name} counted {total} assignments to experts, but its histogram holds tokens for {expected}")

    def _look(self, counts: Tensor, shift: Tensor) -> None:
        ends = [
            torch.stack(observed_range(count, torch.as_tensor(gate.hist_lo), torch.as_tensor(gate.hist_width), change))
            for gate, count, change in zip(self.gates.values(), counts, shift, strict=True)
        ]
        self._seen = {name: (low, high) for name, (low, high) in zip(self.gates, torch.stack(ends).tolist(), strict=True)}

    def _report(self, loads: Tensor, old: Tensor, new: Tensor) -> list[LayerBalance]:
        spread = (new.amax(-1) - new.amin(-1)).tolist()
        delta = (new - old).abs().amax(-1).tolist()
        return [
            LayerBalance(_layer_index(name, order), load, **_measure(load), bias_range=spread[order], delta=delta[order])
            for order, (name, load) in enumerate(zip(self.gates, loads.cpu(), strict=True))
        ]


class LoadMeter:
    """Sums each layer's loads over consecutive steps until an expert's mean load reaches `min_q`, then reports and starts again.

    Loads fluctuate like 1/√q, so MaxVio over a small batch measures the batch: among 64 experts at q = 100 it's about 0.3 with a
    perfect router.
    """

    def __init__(self, min_q: float = 1000.0):
        self.min_q = min_q
        self._loads: Tensor | None = None  # int64 [layers, E]
        self._last: list[LayerBalance] = []

    def add(self, layers: Sequence[LayerBalance]) -> dict[str, Any] | None:
        """Take a step's balance; a record once enough is summed, else None. A model without experts never reports."""
        if not layers:
            return None
        loads = torch.stack([layer.load for layer in layers])
        if self._loads is not None:
            loads = loads + self._loads
        self._loads, self._last = loads, list(layers)
        return self.flush() if loads.sum(-1).min() >= self.min_q * loads.shape[-1] else None

    def flush(self) -> dict[str, Any] | None:
        """The record of what is summed so far, however little (None: nothing), and a new start.

        Keys: layers (load / q per expert, per layer), layer_ids, q, max_vio, dead and bias_range per layer, worst_max_vio, dead_experts.
        """
        if self._loads is None:
            return None
        measured = [_measure(load) for load in self._loads]
        record = {
            "layers": [(load / max(m["q"], 1e-9)).tolist() for load, m in zip(self._loads, measured, strict=True)],
            "layer_ids": [layer.layer for layer in self._last],
            "q": min(m["q"] for m in measured),
            "max_vio": [m["max_vio"] for m in measured],
            "dead": [m["dead"] for m in measured],
            "bias_range": [layer.bias_range for layer in self._last],
            "worst_max_vio": max(m["max_vio"] for m in measured),
            "dead_experts": sum(m["dead"] for m in measured),
        }
        self._loads = None
        return record


def _measure(load: Tensor) -> dict[str, Any]:
    q = load.sum().item() / load.numel()
    most, least = load.max().item(), load.min().item()
    return {
        "q": q,
        "max_vio": most / q - 1 if q else 0.0,
        "min_load": least / q if q else 0.0,
        "dead": int((load == 0).sum().item()),
    }


def _layer_index(name: str, order: int) -> int:
    found = re.search(r"layers\.(\d+)\.", name)
    return int(found.group(1)) if found else order
