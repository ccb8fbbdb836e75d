"""Reads a run folder's files into plain records, and says in a few numbers how the run stands.

A run may still be going on, may have been stopped and resumed, or may have been written by another version: a half-written last
line, a missing kind of record, a field that is absent or of the wrong type never stop the reading. Numbers that aren't there are
NaN in records and None in the summary.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from openk3.config import K3Config
from openk3.errors import UserError

KINDS = ("step", "eval", "balance", "probe", "sample")


@dataclass
class Run:
    """What a run folder's `metrics.jsonl`, `train.json` and `config.json` hold.

    `records[kind]` lists the records of one of KINDS in the order they were written, `final` is the closing record of a finished
    run, and `notes` are sentences about what could not be read.
    """

    folder: Path
    records: dict[str, list[dict]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    final: dict | None = None
    train: dict = field(default_factory=dict)
    config: K3Config | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def series(self, kind: str, key: str) -> np.ndarray:
        """float64 [N]: one field of every record of a kind, NaN where it is missing."""
        return np.array([number(record.get(key)) for record in self.records[kind]], dtype=np.float64)

    def tokens(self, kind: str) -> np.ndarray:
        """float64 [N]: the tokens trained on by each record of a kind; from the steps around it where the record doesn't say."""
        tokens, steps = self.series(kind, "tokens"), self.series(kind, "step")
        known_steps, known_tokens = self.series("step", "step"), self.series("step", "tokens")
        known = np.isfinite(known_steps) & np.isfinite(known_tokens)
        missing = ~np.isfinite(tokens) & np.isfinite(steps)
        if known.any() and missing.any():
            tokens[missing] = np.interp(steps[missing], known_steps[known], known_tokens[known])
        return tokens

    def last(self, kind: str) -> dict:
        return self.records[kind][-1] if self.records[kind] else {}

    def train_section(self, name: str) -> dict:
        """A sub-object of train.json, empty where it is missing or isn't an object."""
        section = self.train.get(name)
        return section if isinstance(section, dict) else {}


def number(value: object) -> float:
    """A JSON number as float, infinite ones too; NaN for everything else, and for what no run measures (1e18 and beyond)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if abs(value) < 1e18 or abs(value) == math.inf else math.nan


def numbers(value: object) -> np.ndarray:
    """A JSON list of numbers as float64 [N]; empty for everything else."""
    return np.array([number(item) for item in value], dtype=np.float64) if isinstance(value, list) else np.zeros(0)


def items(value: object) -> list:
    """A JSON list; empty for everything else."""
    return value if isinstance(value, list) else []


def read_run(run_dir: Path) -> Run:
    """Read a run folder. UserError where there is no folder, no metrics.jsonl, or not one record in it."""
    folder = Path(run_dir)
    if not folder.is_dir():
        raise UserError(f"no run folder at {folder}: give the folder that training wrote, such as runs/NAME")
    run = Run(folder)
    _read_metrics(run)
    try:
        train = json.loads((folder / "train.json").read_bytes())
        run.train = train if isinstance(train, dict) else {}
    except FileNotFoundError:
        run.notes.append("There is no train.json, so options, machine and corpus are missing.")
    except (OSError, ValueError, RecursionError):
        run.notes.append("train.json could not be read, so options, machine and corpus are missing.")
    try:
        run.config = K3Config.load(folder)
    except UserError as error:
        run.notes.append(f"The model's outline is missing: {error}")
    return run


def _read_metrics(run: Run) -> None:
    path = run.folder / "metrics.jsonl"
    unreadable, whole_line = 0, True
    try:
        with path.open("rb") as lines:
            for line in lines:
                if not line.strip():
                    continue
                whole_line = line.endswith(b"\n")
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    unreadable += 1
                    continue
                whole_line = True
                if isinstance(record, dict):
                    _keep(run, record)
    except FileNotFoundError:
        raise UserError(f"{path} is missing: a report is made from what training logs there, so give the folder of a run") from None
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror or error}; check its permissions") from None
    unreadable -= not whole_line  # a last line without its end is being written at this moment, or was when the run was stopped
    if unreadable:
        lines = "1 line" if unreadable == 1 else f"{unreadable} lines"
        run.notes.append(f"{lines} of metrics.jsonl could not be read and were left out.")
    if run.final is None and not any(run.records.values()):
        raise UserError(f"{path} holds no records: wait for the run's first step, or give the folder of another run")


def _keep(run: Run, record: dict) -> None:
    kind = record.get("kind")
    if kind == "final":
        run.final = record
    if kind not in KINDS:
        return
    if kind == "step":
        step, last = number(record.get("step")), number(run.last("step").get("step"))
        if step <= last:  # resumed from an earlier point: what the abandoned branch logged from here on didn't lead to this model
            for other, records in run.records.items():
                run.records[other] = [r for r in records if not number(r.get("step")) >= step]
        run.final = None  # trained on since it was closed
    run.records[kind].append(record)


def last_loads(run: Run) -> tuple[list[str], list[np.ndarray]]:
    """Names and loads (float64 [E], in units of the fair share q) of each mixture layer in the last usable balance record."""
    for record in reversed(run.records["balance"]):
        loads = [numbers(layer) for layer in items(record.get("layers"))]
        if loads and all(load.size and np.isfinite(load).all() for load in loads):
            ids = items(record.get("layer_ids"))
            return [f"L{ids[i]}" if i < len(ids) else f"#{i}" for i in range(len(loads))], loads
    return [], []


def summary(run_dir: Path) -> dict:
    """How a run stands, in plain values for printing; None where the folder doesn't say. Raises as `read_run`.

    Keys: name, finished, step, tokens, elapsed_s (training seconds), tokens_per_s (median), loss (nats/token, last step),
    bits_per_byte with bits_subset ("full", "sample") and held_out_bytes, xz_bits_per_byte, saved (1 - bits/xz, full scores only), max_vio,
    dead_experts, experts (routed, over all layers), parse_rate, parameters_total, parameters_active, corpus, corpus_digest,
    device, verdict (one sentence).
    """
    return summarise(read_run(run_dir))


def summarise(run: Run) -> dict:
    """`summary` of a run that has been read."""
    final = run.final or {}
    corpus, machine, parameters = (run.train_section(name) for name in ("corpus", "machine", "parameters"))
    last_balance, last_step, last_eval = run.last("balance"), run.last("step"), run.last("eval")
    max_vio, dead = numbers(last_balance.get("max_vio")), numbers(last_balance.get("dead"))
    loads = last_loads(run)[1]
    speeds = run.series("step", "tokens_per_s")
    speeds = speeds[np.isfinite(speeds)]
    out = {
        "name": run.name,
        "finished": run.final is not None,
        "step": _whole(last_step.get("step")),
        "tokens": _whole(final.get("tokens"), last_step.get("tokens")),
        "elapsed_s": _first(final.get("elapsed_s"), last_step.get("elapsed_s")),
        "tokens_per_s": float(np.median(speeds)) if speeds.size else None,
        "loss": _first(last_step.get("loss")),
        "bits_per_byte": _first(final.get("bits_per_byte"), last_eval.get("bits_per_byte")),
        "bits_subset": "full" if _first(final.get("bits_per_byte")) is not None else _string(last_eval.get("subset")),
        "held_out_bytes": _whole(corpus.get("held_out_bytes")),
        "xz_bits_per_byte": _first(final.get("xz_bits_per_byte"), corpus.get("xz_bits_per_byte")),
        "max_vio": _first(final.get("max_vio"), np.nanmax(max_vio, initial=-np.inf)),
        "dead_experts": _whole(final.get("dead_experts"), dead.sum() if dead.size else None),
        "experts": sum(load.size for load in loads) or None,
        "parse_rate": _first(final.get("parse_rate"), _parse_rate(run)),
        "parameters_total": _whole(final.get("parameters_total"), parameters.get("total")),
        "parameters_active": _whole(final.get("parameters_active"), parameters.get("active")),
        "corpus": _string(corpus.get("name")),
        "corpus_digest": _string(corpus.get("digest")),
        "device": _string(machine.get("device")),
    }
    bits, xz = out["bits_per_byte"], out["xz_bits_per_byte"]
    whole = out["bits_subset"] == "full"  # xz packs all of the held-out text: a sample of it is no match
    out["saved"] = 1 - bits / xz if whole and bits is not None and xz is not None and xz > 0 else None
    out["verdict"] = _verdict(out)
    return out


def _verdict(facts: dict) -> str:
    start = "" if facts["finished"] else "Not finished"
    if start and facts["step"] is not None:
        start += f" (step {facts['step']:,})"
    if facts["bits_per_byte"] is None:
        return (start or "Finished") + ": no held-out text has been scored" + ("." if facts["finished"] else " yet.")
    text = "the held-out text" if facts["bits_subset"] == "full" else "a sample of the held-out text"
    sentence = f"{facts['bits_per_byte']:.3f} bits per byte on {text}"
    if facts["saved"] is not None:
        compared = f"{abs(facts['saved']):.1%} {'fewer' if facts['saved'] >= 0 else 'more'}"
        sentence += f"; xz -9e needs {facts['xz_bits_per_byte']:.3f}, so the model takes {compared}"
    return (f"{start}: " if start else "") + sentence + "."


def _parse_rate(run: Run) -> float | None:
    step = run.last("sample").get("step")
    verdicts = [s["parses"] for s in run.records["sample"] if s.get("step") == step and isinstance(s.get("parses"), bool)]
    return sum(verdicts) / len(verdicts) if verdicts else None


def _first(*values: object) -> float | None:
    """The first value that is a finite number."""
    return next((x for x in map(number, values) if math.isfinite(x)), None)


def _whole(*values: object) -> int | None:
    value = _first(*values)
    return None if value is None else round(value)


def _string(value: object) -> str | None:
    return value if isinstance(value, str) else None
