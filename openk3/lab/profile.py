"""Where the time of a training step goes: each part of a trained model timed inside real steps, forward and backward apart.

A part's forward runs in a graph of its own, whose backward runs when the step's backward reaches it; both are timed there, and the time
of a part inside another (the recurrence inside a KDA layer) is taken off the outer one. So the parts add up to the step.
"""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from openk3 import checkpoint
from openk3.data.corpus import load_corpus
from openk3.data.packing import PackedDataset, tokenize_documents, user_cache
from openk3.model import attn_res, kda
from openk3.model.kda import KimiDeltaAttention
from openk3.model.latent_moe import Experts, LatentMoE, Router
from openk3.model.layers import MLP
from openk3.model.mla import GatedMLA, MultiHeadAttention
from openk3.optim.balance import QuantileBalancer
from openk3.optim.muon import MuonAdamW, clip_grad_norm
from openk3.optim.specs import specs_for
from openk3.text.tokenizer import Tokenizer
from openk3.train.loop import micro_batches, pick_device, pick_dtype
from openk3.train.options import TrainOptions
from openk3.train.workers import Workers, keep_freed_memory

PARTS: dict[type[nn.Module], str] = {
    KimiDeltaAttention: "KDA: projections, convolutions, gates", GatedMLA: "MLA", MultiHeadAttention: "attention",
    Router: "router", Experts: "experts", LatentMoE: "latent projections and norm", MLP: "dense and shared feed-forward",
}
RECURRENCE, DEPTH, HEAD, REST = "KDA: delta rule in chunks", "attention residuals", "head and loss", "embedding, norms, sums"


@dataclasses.dataclass(frozen=True)
class Part:
    """One kind of part, all layers together, in milliseconds a step."""

    name: str
    calls: int
    forward_ms: float
    backward_ms: float

    @property
    def ms(self) -> float:
        return self.forward_ms + self.backward_ms


@dataclasses.dataclass(frozen=True)
class Profile:
    """`rows` × `seq_len` tokens on `threads` threads, as one worker of the run has them; the optimizer has all threads.

    flops: of matrix products with weights, 6 per token and active parameter that is multiplied. peak: the rate in FLOP/s of one large
    product on these threads in the same process.
    """

    config: str
    rows: int
    seq_len: int
    threads: int
    dtype: str
    device: str
    parts: list[Part]
    flops: float
    peak: float

    def to_json(self) -> dict:
        """All of it, and the sums: ms of each part and of the step, FLOP/s reached."""
        ms = sum(part.ms for part in self.parts)
        parts = [{**dataclasses.asdict(part), "ms": part.ms, "share": part.ms / ms} for part in self.parts]
        return {**dataclasses.asdict(self), "parts": parts, "ms": ms, "flops_per_s": self.flops / ms * 1e3}


class Stopwatch:
    """Seconds by (part, phase), without those of the parts inside."""

    def __init__(self, device: torch.device):
        self.device, self.inner = device, [0.0]
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)

    @contextmanager
    def running(self, part: str, phase: str) -> Iterator[None]:
        self._wait()
        started = time.perf_counter()
        self.inner.append(0.0)
        yield
        self._wait()
        took = time.perf_counter() - started
        self.seconds[part, phase] += took - self.inner.pop()
        self.inner[-1] += took

    def timed(self, part: str, function: Callable) -> Callable:
        """The same function, its forward and its backward on this watch. Tensors may stand in tuples and lists, in and out."""
        def call(*args, **options):
            self.calls[part] += 1
            leaves, shape = tree_flatten((args, options))
            kept: list = []
            found = _Timed.apply(self, part, function, shape, kept, *leaves)
            outputs, where, out_shape = kept
            for place, value in zip(where, found, strict=True):
                outputs[place] = value
            return tree_unflatten(outputs, out_shape)
        return call

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _Timed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, watch, part, function, shape, kept, *leaves):
        inside = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in leaves]
        args, options = tree_unflatten(inside, shape)
        with watch.running(part, "forward"), torch.enable_grad():
            found = function(*args, **options)
        outputs, out_shape = tree_flatten(found)
        where = [n for n, x in enumerate(outputs) if isinstance(x, torch.Tensor) and x.requires_grad]
        ctx.watch, ctx.part, ctx.inside, ctx.outputs = watch, part, inside, [outputs[n] for n in where]
        kept.extend((outputs, where, out_shape))
        return tuple(outputs[n].detach() for n in where)

    @staticmethod
    def backward(ctx, *grads):
        with ctx.watch.running(ctx.part, "backward"):
            torch.autograd.backward(ctx.outputs, grads)
        return (None,) * 5 + tuple(x.grad if isinstance(x, torch.Tensor) else None for x in ctx.inside)


def profile(run: Path, steps: int = 8) -> Profile:
    """Train `steps` steps more on a copy of a finished run's model, with its data and options; the folder is only read.

    The best of the steps counts, part by part and phase by phase, after one that warms up. Errors: a folder that holds no run.
    """
    options = TrainOptions.of_run(run)
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, device)
    if device.type == "cpu":
        keep_freed_memory()
    model = checkpoint.load(run, dtype=torch.float32, device=device).train()
    model.model.compute_dtype = dtype
    workers = Workers(device, options.workers, options.batch_size)
    rows = options.micro_batch or -(-options.batch_size // workers.count)
    corpus, tokenizer = load_corpus(options.data or None, exclude=options.exclude), Tokenizer.load(run)
    tokens = tokenize_documents(corpus.train, tokenizer, user_cache())
    data = PackedDataset(tokens.tokens, tokens.offsets, options.seq_len, rows, options.seed)
    balancer = QuantileBalancer(model, method=options.balance, ema=options.balance_ema)
    optimizer = MuonAdamW(specs_for(model, options.optimizer, options.router_lr), lr=options.lr * 1e-3, weight_decay=options.weight_decay,
                          ns_dtype=torch.bfloat16 if dtype == torch.bfloat16 else None)
    all_threads = torch.get_num_threads()
    threads = max(1, all_threads // workers.count)
    best: dict[tuple[str, str], float] = {}
    calls: dict[str, int] = {}
    try:
        for step in range(steps + 1):
            watch = Stopwatch(device)
            ids, targets, cu_seqlens = (x.to(device) for x in next(micro_batches(next(data), rows)))
            balancer.begin_step()
            torch.set_num_threads(threads)
            with _watched(model, watch):
                with watch.running(REST, "forward"):
                    loss = model.loss(ids, targets, cu_seqlens)
                with watch.running(REST, "backward"):
                    loss.backward()
            torch.set_num_threads(all_threads)
            with watch.running("optimizer", "update"):
                clip_grad_norm(model.parameters(), options.clip or None)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            with watch.running("balancing", "update"):
                balancer.end_step()
            calls = dict(watch.calls)
            if step:
                best = {key: min(took, best.get(key, took)) for key, took in watch.seconds.items()}
        torch.set_num_threads(threads)
        peak = _peak(device, dtype)
    finally:
        torch.set_num_threads(all_threads)
    names = sorted({name for name, _ in best}, key=lambda n: -sum(t for (m, _), t in best.items() if m == n))
    parts = [Part(name, calls.get(name, 1), 1e3 * (best.get((name, "forward"), 0) + best.get((name, "update"), 0)),
                  1e3 * best.get((name, "backward"), 0)) for name in names]
    return Profile(Path(options.config).stem, rows, options.seq_len, threads, str(dtype).removeprefix("torch."), device.type, parts,
                   6.0 * model.config.parameter_count().active * rows * options.seq_len, peak)


@contextmanager
def _watched(model: nn.Module, watch: Stopwatch) -> Iterator[None]:
    """Every part of the model on the watch."""
    methods = [(m, "forward", PARTS[type(m)]) for m in model.modules() if type(m) in PARTS] + [(model, "token_loss", HEAD)]
    functions = [(kda, "kda_chunk", kda.kda_chunk, RECURRENCE), (attn_res, "mix", attn_res.mix, DEPTH)]
    for module, attribute, name in methods:
        setattr(module, attribute, watch.timed(name, getattr(module, attribute)))
    for home, attribute, function, name in functions:
        setattr(home, attribute, watch.timed(name, function))
    try:
        yield
    finally:
        for module, attribute, _ in methods:
            delattr(module, attribute)
        for home, attribute, function, _ in functions:
            setattr(home, attribute, function)


def _peak(device: torch.device, dtype: torch.dtype, size: int = 1024) -> float:
    """FLOP/s of a product of two square matrices: what these threads can do at best."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    watch, best = Stopwatch(device), float("inf")
    for _ in range(10):
        watch.seconds.clear()
        with watch.running("product", "forward"):
            torch.mm(a, b)
        best = min(best, watch.seconds["product", "forward"])
    return 2 * size**3 / best
