"""Every option of a training run, with its default: the one place where they stand."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from openk3.errors import UserError


@dataclass(frozen=True)
class TrainOptions:
    """Train a model from scratch on your text, or on the Python standard library's source."""

    data: tuple[Path, ...] = ()
    """Files, folders or JSONL (a `text` field a line). None: the standard library's source on this machine."""
    exclude: tuple[str, ...] = ()
    """Patterns of files to leave out, such as "*.svg" or "vendor"."""
    config: str = "nano"
    """A preset (`openk3 config` lists them) or a config.json."""
    out: Path | None = None
    """The run folder. None: runs/CONFIG."""
    resume: bool = False
    """Go on with the run in --out, with its options; what is given besides --out and a longer --minutes or --tokens is ignored."""
    overwrite: bool = False
    """Begin anew in a run folder that already holds a run."""

    minutes: float | None = None
    """Train for this long; the schedule follows the clock. Neither this nor --tokens: 12 minutes."""
    tokens: int | None = None
    """Train on this many tokens; such a run repeats itself bit for bit."""
    vocab_size: int = 4096
    """Of the byte-level BPE trained on the corpus, control tokens included."""
    tokenizer: Path | None = None
    """Use this tokenizer.json (or a folder that has one) instead of training one."""
    seq_len: int = 128
    """Tokens a row; documents are packed into rows, and nothing crosses a document's border."""
    batch_size: int = 48
    """Rows a step."""
    micro_batch: int | None = None
    """Rows at once; the step's gradients are summed over them. None: all."""

    optimizer: Literal["per-head-muon", "muon", "adamw"] = "per-head-muon"
    """For matrices; vectors, embeddings and the head take AdamW."""
    lr: float = 0.01
    """Peak learning rate."""
    router_lr: float = 0.25
    """The routers' rate, as a part of the others'. They're balanced a step late: what moves slower is followed more closely."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup: float = 0.02
    """Part of the run in which the rate rises."""
    floor: float = 0.0
    """Rate at the end, as a part of the peak."""
    weight_decay: float = 0.1
    clip: float = 1.0
    """Largest gradient norm; 0: no clipping."""
    balance: Literal["quantile", "sign", "none"] = "quantile"
    """How expert load is kept even."""
    balance_ema: float = 0.9
    """How much of the balancing bias stays at a step at the peak rate; more stays as the rate falls. 0: nothing, as in K3, whose steps
    have thousands of tokens an expert."""

    seed: int = 0
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of activations and products; weights and optimizer stay float32. auto: bfloat16 where the hardware multiplies it, else float32."""
    threads: int = 0
    """CPU threads; 0: torch's choice."""
    workers: int = 0
    """Micro-batches side by side; 0: one a CPU thread, as far as the rows go."""

    eval_every: float = 60.0
    """Seconds of training between looks at a held-out sample; 0: at the end only."""
    eval_documents: int = 8
    """Held-out documents in that sample."""
    save_every: float = 60.0
    """Seconds of training between saves of the state to resume from; 0: only at Ctrl-C and at the end."""
    samples: int = 32
    """Completions drawn at the end."""
    final_eval: bool = True
    """Score all of the held-out text at the end."""

    def check(self) -> "TrainOptions":
        """Itself, if every value is in range. Errors: one that isn't, in one line."""
        for name, fine, want in (
            ("minutes", self.minutes is None or self.minutes > 0, "more than 0"),
            ("tokens", self.tokens is None or self.tokens > 0, "more than 0"),
            ("batch_size", self.batch_size > 0, "1 or more"),
            ("micro_batch", self.micro_batch is None or 0 < self.micro_batch <= self.batch_size, "between 1 and --batch-size"),
            ("seq_len", self.seq_len > 1, "2 or more"),
            ("lr", self.lr > 0, "more than 0"),
            ("router_lr", self.router_lr > 0, "more than 0"),
            ("balance_ema", 0 <= self.balance_ema < 1, "in [0, 1)"),
            ("warmup", 0 <= self.warmup < 1, "in [0, 1)"),
            ("floor", 0 <= self.floor <= 1, "in [0, 1]"),
            ("clip", self.clip >= 0, "0 or more"),
            ("threads", self.threads >= 0, "0 or more"),
            ("workers", self.workers >= 0, "0 or more"),
        ):
            if not fine:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)} is out of range: give a value {want}")
        if self.minutes is not None and self.tokens is not None:
            raise UserError("--minutes and --tokens are both given: choose one")
        if self.micro_batch and self.batch_size % self.micro_batch:
            raise UserError(f"--batch-size {self.batch_size} is no multiple of --micro-batch {self.micro_batch}")
        return self

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / Path(self.config).stem

    @property
    def budget_minutes(self) -> float | None:
        """Minutes to train, None when tokens decide."""
        return self.minutes if self.minutes is not None else (None if self.tokens is not None else 12.0)

    def to_json(self) -> dict:
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def of_run(cls, folder: Path) -> "TrainOptions":
        """Those that a run folder's train.json holds. Errors: there's none, or it can't be read."""
        path = folder / "train.json"
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8"))["options"])
        except FileNotFoundError:
            raise UserError(f"{path}: no such file; there's no run in {folder}: `openk3 train` makes one") from None
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise UserError(f"{path}: can't be read ({e})") from None

    @classmethod
    def from_json(cls, saved: dict) -> "TrainOptions":
        """What `to_json` wrote. Errors: a field that this version doesn't know."""
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(saved) - known)
        if unknown:
            raise UserError(f"train.json: this openk3 doesn't know the option {unknown[0]!r}; resume with the version that wrote it")
        value: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in saved.items()}
        for name in ("out", "tokenizer"):
            value[name] = None if value.get(name) is None else Path(value[name])
        value["data"] = tuple(Path(p) for p in value.get("data", ()))
        return cls(**value)


def _plain(value):
    if isinstance(value, Path):
        return str(value)
    return [_plain(v) for v in value] if isinstance(value, tuple) else value




@dataclass(frozen=True)
class CompareOptions:
    """What all configs of a comparison share."""

    out: Path = Path("runs/compare")
    """Where the runs and comparison.json go; a comparison that was interrupted goes on there."""
    seeds: int = 3
    minutes: float = 3.0
    """Of each run that counts."""
    rates: tuple[float, ...] = (0.005, 0.01, 0.02)
    """Learning rates that each config is tuned over."""
    tune_minutes: float = 1.0
    """Of each tuning run."""
    data: tuple[Path, ...] = ()
    """Files, folders or JSONL; none: the standard library's source."""
    exclude: tuple[str, ...] = ()
    batch_size: int = TrainOptions.batch_size
    seq_len: int = TrainOptions.seq_len
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    optimizer: Literal["per-head-muon", "muon", "adamw"] = "per-head-muon"
