"""The training loop. Read `Trainer.run` and `Trainer.step`: the rest is setting up, looking and saving.

A run is decided by tokens (it repeats itself bit for bit) or by minutes (its schedule follows the clock of training seconds, which
stops while the run evaluates or saves). What a listener shows of it is the command line's business.
"""

import dataclasses
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from openk3 import checkpoint
from openk3.config import K3Config
from openk3.data.corpus import load_corpus
from openk3.data.packing import PackedDataset, tokenize_documents, user_cache
from openk3.errors import UserError
from openk3.model.generate import Sampling
from openk3.model.k3 import K3ForCausalLM
from openk3.optim.balance import LoadMeter, QuantileBalancer
from openk3.optim.muon import MuonAdamW, clip_grad_norm
from openk3.optim.schedule import lr_at
from openk3.optim.specs import describe, specs_for
from openk3.presets import PRESETS, preset
from openk3.report import write_report
from openk3.text.tokenizer import Tokenizer
from openk3.train import runfolder
from openk3.train.evaluate import score, scoring_context
from openk3.train.listener import Listener
from openk3.train.options import TrainOptions
from openk3.train.probe import probe
from openk3.train.samples import code_prompts, parses_as_python
from openk3.train.workers import Workers, keep_freed_memory

SAMPLING = Sampling(temperature=0.6, top_p=0.95)         # of the completions at the end of a run


def train(options: TrainOptions, listener: Listener | None = None) -> Path:
    """Train as told; give back the run folder. Ctrl-C (SIGINT) ends the run after the current step, saved: `resume` goes on."""
    listener = listener or Listener()
    options = (_resumed(options) if options.resume else options).check()
    trainer = Trainer(options, listener)
    finished = trainer.run()
    trainer.close(finished)
    return options.folder


class Trainer:
    def __init__(self, options: TrainOptions, listener: Listener):
        self.options, self.listener, self.folder = options, listener, options.folder
        self.device = pick_device(options.device)
        self.dtype = pick_dtype(options.dtype, self.device)
        if options.threads:
            torch.set_num_threads(options.threads)
        if self.device.type == "cpu":
            keep_freed_memory()
        saved = runfolder.load_resume(self.folder) if options.resume else None
        self._claim_folder()
        self.corpus = load_corpus(options.data or None, exclude=options.exclude)
        for note in self.corpus.notes:
            listener.message(note)
        self.tokenizer = self._tokenizer()
        train_tokens = tokenize_documents(self.corpus.train, self.tokenizer, user_cache())
        if train_tokens.note:
            listener.message(train_tokens.note)
        self.data = PackedDataset(train_tokens.tokens, train_tokens.offsets, options.seq_len, options.batch_size, options.seed)
        torch.manual_seed(options.seed)
        self.config = self._config()
        self.model = K3ForCausalLM(self.config).init_weights(options.seed).to(self.device)
        self.model.model.compute_dtype = self.dtype
        specs = specs_for(self.model, options.optimizer, options.router_lr)
        self.groups = describe(specs)
        half = torch.bfloat16 if self.dtype == torch.bfloat16 else None
        self.optimizer = MuonAdamW(specs, lr=options.lr, weight_decay=options.weight_decay, ns_dtype=half)
        self.workers = Workers(self.device, options.workers, options.batch_size)
        self.rows = options.micro_batch or -(-options.batch_size // self.workers.count)
        self.balancer = QuantileBalancer(self.model, method=options.balance, ema=options.balance_ema)
        self.meter = LoadMeter()
        self.load: dict | None = None                               # expert load over the last steps that say something
        self.step_number, self.tokens, self.seconds = 0, 0, 0.0
        self.marks = {"eval": 0.0, "save": 0.0}                     # training seconds at which each was last done
        self.stop = threading.Event()
        if saved is not None:
            self._restore(saved)
        self.metrics = runfolder.Metrics(self.folder / "metrics.jsonl", self.step_number if saved else None)
        self._write_train_json()

    # what it is made of

    def _claim_folder(self) -> None:
        options, folder = self.options, self.folder
        if not options.resume and (folder / "metrics.jsonl").exists():
            if not options.overwrite:
                raise UserError(f"{folder} already holds a run: --resume goes on with it, --overwrite begins anew, "
                                "--out names another folder")
            for name in ("metrics.jsonl", "model.safetensors", "report.html", "train.json"):
                (folder / name).unlink(missing_ok=True)
        with runfolder.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def _tokenizer(self) -> Tokenizer:
        path = self.folder / "tokenizer.json"
        if self.options.resume:
            return Tokenizer.load(path)
        if self.options.tokenizer is not None:
            tokenizer = Tokenizer.load(self.options.tokenizer)
        else:
            self.listener.message(f"training a tokenizer of {self.options.vocab_size} entries on {self.corpus.train_bytes / 1e6:.1f} MB")
            tokenizer = Tokenizer.train((d.text for d in self.corpus.train), self.options.vocab_size)
        with runfolder.writing(path):
            tokenizer.save(path)
        return tokenizer

    def _config(self) -> K3Config:
        name = self.options.config
        if self.options.resume:
            return K3Config.load(self.folder)
        config = K3Config.load(name) if name not in PRESETS and Path(name).exists() else preset(name)
        t = self.tokenizer
        config = config.with_vocab(t.vocab_size, bos=t.bos_id, eos=t.eos_id, pad=t.pad_id, media_placeholder=t.media_pad_id)
        if config.vision_config is not None:
            raise UserError(f"{name}: it has a vision tower, and `openk3 train` trains on text; take vision_config out of the config")
        config.save(self.folder)
        return config

    def _write_train_json(self) -> None:
        count = self.config.parameter_count()
        summary = {**self.corpus.summary(), "tokens": int(self.data.tokens_per_epoch), "vocab_size": self.tokenizer.vocab_size}
        described = runfolder.describe(self.options.to_json(), self.device, summary, {"total": count.total, "active": count.active},
                                        self.groups)
        described["dtype"] = str(self.dtype).removeprefix("torch.")
        runfolder.write_json(self.folder / "train.json", described)

    # the loop

    @property
    def progress(self) -> float:
        """How much of the run is done, 0 … 1."""
        return min(1.0, self._part(self.tokens, self.seconds))

    def _midway(self) -> float:
        """Progress at the middle of the step that begins: at its start the first one's rate would be 0."""
        return self._part(self.tokens + self.options.batch_size * self.options.seq_len / 2,
                          self.seconds + self.seconds / max(1, 2 * self.step_number) + 0.1)

    def _part(self, tokens: float, seconds: float) -> float:
        """What part of the budget these are, whichever of the two decides."""
        minutes = self.options.budget_minutes
        if minutes is not None:
            return seconds / (60 * minutes)
        assert self.options.tokens is not None
        return tokens / self.options.tokens

    def run(self) -> bool:
        """Train until the budget is spent (True) or Ctrl-C (False)."""
        self.model.train()
        with self._interruptible():
            while self.progress < 1 and not self.stop.is_set():
                self.step()
                if self._due("eval", self.options.eval_every):
                    self.look()
                if self._due("save", self.options.save_every):
                    self.save()
        return not self.stop.is_set()

    def step(self) -> None:
        """One optimizer step over a batch, in micro-batches whose gradients and expert counts add up."""
        started = time.perf_counter()
        options, model = self.options, self.model
        lr = lr_at(self._midway(), peak=options.lr, warmup=options.warmup, floor=options.floor, shape=options.schedule)
        batch = next(self.data)
        counted = max(1, int((batch.targets != -100).sum()))
        self.balancer.ema = self._ema(lr)
        self.balancer.begin_step()
        total = self.workers.backward(model, micro_batches(batch, self.rows), counted)
        norm = float(clip_grad_norm(model.parameters(), options.clip or None))
        if not np.isfinite(total + norm):
            raise UserError(f"step {self.step_number + 1}: the loss is {total}, the gradient norm {norm}; lower --lr (now {options.lr}) "
                            f"and resume from the last save in {self.folder}")
        self.optimizer.set_lr(lr)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        balance = self.balancer.end_step()
        took = time.perf_counter() - started
        self.step_number, self.tokens, self.seconds = self.step_number + 1, self.tokens + batch.tokens, self.seconds + took
        metrics = {
            "step": self.step_number, "tokens": self.tokens, "loss": total, "lr": lr, "grad_norm": norm,
            "tokens_per_s": batch.tokens / took, "elapsed_s": self.seconds,
            "max_vio": max((b.max_vio for b in balance), default=None), "min_load": min((b.min_load for b in balance), default=None)}
        self.metrics.write("step", **metrics)
        if record := self.meter.add(balance):
            self.load = record
            self.metrics.write("balance", step=self.step_number, **record)
        self.listener.step(metrics, self.progress)

    def _ema(self, lr: float) -> float:
        """How much of the balancing bias stays at this step: little at first, while its level is found; then more as the rate falls.
        The bias is a mean over so many steps: a long one is more exact, a short one follows the routers, which move as the rate says."""
        steady = self.options.balance_ema ** max(0.1, (lr / self.options.lr) ** 0.5)
        return min(steady, self.step_number / (self.step_number + 9))

    def look(self) -> None:
        """Score a held-out sample and see what the parts are doing; the clock of training stands still."""
        documents = sorted((d.text for d in self.corpus.held_out), key=len)         # quantiles of length: small and large ones
        count = min(len(documents), max(1, self.options.eval_documents))
        self._score([documents[(2 * n + 1) * len(documents) // (2 * count)] for n in range(count)], "sample")
        ids = torch.from_numpy(np.asarray(self.data.tokens[: self.options.seq_len]).astype(np.int64))[None].to(self.device)
        self.metrics.write("probe", step=self.step_number, **probe(self.model, ids))

    def _score(self, documents: list[str], subset: str) -> float:
        found = score(self.model, self.tokenizer, documents, context=scoring_context(self.options.seq_len),
                      on_progress=self.listener.scoring)
        metrics = {"step": self.step_number, "tokens": self.tokens, "elapsed_s": self.seconds,
                   "bits_per_byte": found.bits_per_byte, "subset": subset, "bytes": found.bytes}
        self.metrics.write("eval", **metrics)
        self.listener.evaluated(metrics)
        return found.bits_per_byte

    # remembering

    def save(self) -> None:
        """Everything the next step depends on, whole or not at all."""
        runfolder.save_resume(self.folder, {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "data": self.data.state_dict(),
            "balancer": self.balancer.state_dict(), "load": self.load,
            "step": self.step_number, "tokens": self.tokens, "seconds": self.seconds, "marks": dict(self.marks),
            "random": torch.get_rng_state(), "corpus": self.corpus.digest})

    def _restore(self, saved: dict) -> None:
        if saved["corpus"] != self.corpus.digest:
            raise UserError(f"{self.folder}: the corpus has changed since the run began; give it as it was, or begin a new run")
        try:
            self.model.load_state_dict(saved["model"])
        except RuntimeError as e:
            raise UserError(f"{self.folder}/resume: a state of another shape than config.json says; begin a new run") from e
        self.optimizer.load_state_dict(saved["optimizer"])
        self.data.load_state_dict(saved["data"])
        self.balancer.load_state_dict(saved["balancer"])
        self.load = saved["load"]
        self.step_number, self.tokens, self.seconds, self.marks = saved["step"], saved["tokens"], saved["seconds"], saved["marks"]
        torch.set_rng_state(saved["random"])

    def close(self, finished: bool) -> None:
        """Save; when the budget is spent also evaluate, sample and write the report."""
        self.save()
        checkpoint.save(self.model, self.folder)
        if finished:
            self._finish()
        self.metrics.close()
        self._write_train_json()
        write_report(self.folder)

    def _finish(self) -> None:
        self.look()
        bits = self._score([d.text for d in self.corpus.held_out], "full") if self.options.final_eval else None
        parse_rate = self._sample() if self.options.samples else None
        load = self.load or self.meter.flush()
        count = self.config.parameter_count()
        self.metrics.write(
            "final", step=self.step_number, bits_per_byte=bits, xz_bits_per_byte=self.corpus.xz_bits_per_byte,
            max_vio=load and load["worst_max_vio"], dead_experts=load and load["dead_experts"],
            parse_rate=parse_rate, tokens=self.tokens, elapsed_s=self.seconds, parameters_total=count.total, parameters_active=count.active)

    def _sample(self) -> float | None:
        """Complete the beginnings of held-out documents; the part of the Python ones that parses, None without any."""
        python = all(d.name.endswith(".py") for d in self.corpus.held_out)
        prompts = code_prompts([(d.name, d.text) for d in self.corpus.held_out], self.options.samples)
        self.listener.message(f"completing the beginnings of {len(prompts)} held-out files")
        ids = [[self.tokenizer.bos_id, *self.tokenizer.encode(p)] for p in prompts]
        new = self.model.generate(ids, 128, sampling=SAMPLING, stop_ids=(self.tokenizer.eos_id,), seed=self.options.seed)
        parsed = []
        for prompt, row in zip(prompts, new, strict=True):
            completion = self.tokenizer.decode(row, skip_special=True)
            parses = parses_as_python(prompt + completion) if python else None
            parsed.append(parses)
            self.metrics.write("sample", step=self.step_number, prompt=prompt, completion=completion, parses=parses)
        return sum(parsed) / len(parsed) if python and parsed else None

    def _due(self, what: str, every: float) -> bool:
        if not every or self.seconds - self.marks[what] < every or self.progress >= 1:
            return False
        self.marks[what] = self.seconds
        return True

    @contextmanager
    def _interruptible(self):
        """The first Ctrl-C lets the step end and saves; a second one ends at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def stop(signum, frame):
            if self.stop.is_set():
                raise KeyboardInterrupt
            self.stop.set()
            self.listener.message("stopping after this step; Ctrl-C again ends at once")

        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def micro_batches(batch, rows: int):
    """(ids, targets, cu_seqlens) of `rows` rows at a time."""
    width = batch.input_ids.shape[1]
    for start in range(0, batch.input_ids.shape[0], rows):
        first, last = start * width, min(start + rows, batch.input_ids.shape[0]) * width
        inside = batch.cu_seqlens[(batch.cu_seqlens >= first) & (batch.cu_seqlens <= last)] - first
        yield batch.input_ids[start : start + rows], batch.targets[start : start + rows], inside


def pick_device(name: str) -> torch.device:
    """auto: the first accelerator that's there. Errors: one that isn't."""
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if there[kind])
    if not there.get(name, False):
        raise UserError(f"--device {name}: there's no such device here; this machine has {', '.join(k for k, v in there.items() if v)}")
    return torch.device(name)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto: bfloat16 where the hardware multiplies it quickly (CUDA, CPUs with AMX), else float32."""
    if name != "auto":
        return getattr(torch, name)
    fast = device.type == "cuda" or (device.type == "cpu" and torch.cpu._is_amx_tile_supported())
    return torch.bfloat16 if fast else torch.float32


def _resumed(options: TrainOptions) -> TrainOptions:
    """The options the run began with; a longer budget may be given."""
    saved = TrainOptions.of_run(options.folder)
    device = options.device if options.device != "auto" else saved.device
    changed = {"resume": True, "overwrite": False, "out": options.folder, "device": device}
    if options.minutes is not None or options.tokens is not None:
        changed |= {"minutes": options.minutes, "tokens": options.tokens}
    return dataclasses.replace(saved, **changed)
