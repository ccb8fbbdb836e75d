"""Two configs side by side: the same text, tokenizer, optimizer, minutes and number of tuning runs; the difference with its interval.

Each config is first tuned over the same learning rates, each for the same short time and seed; the best rate on a held-out sample then
trains once per seed, the configs taking turns so that a change of the machine's mood hits both. Differences are paired by seed. A profile
of a training step of each says where the time went.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from openk3.errors import UserError
from openk3.lab.profile import profile
from openk3.train.listener import Listener
from openk3.train.loop import pick_device, train
from openk3.train.options import TrainOptions
from openk3.train.runfolder import git_revision, machine, versions, write_json


def compare(configs: Sequence[str], out: Path, *, options: TrainOptions, seeds: int = 3, minutes: float = 3.0,
            rates: Sequence[float] = (0.005, 0.01, 0.02), tune_minutes: float = 1.0,
            listener: Listener | None = None, tell: Callable[[str], None] = print) -> dict:
    """Tune, train, score; write `comparison.json` into `out` and give back its contents.

    Runs that are there already are read, not run again: an interrupted comparison goes on where it was.
    """
    if len(configs) < 2:
        raise UserError("a comparison takes two configs or more, such as: openk3 compare nano dense-nano")
    files = {Path(c).stem: c for c in configs}                        # runs and results go by a config's name, as in a run's folder
    if len(files) < len(configs):
        raise UserError(f"two of {', '.join(configs)} have one name: their runs would share a folder; rename a file")
    configs, tokenizer = list(files), options.tokenizer
    first = configs[0]

    def run(config: str, name: str, rate: float, seed: int, length: float, full: bool) -> dict:
        nonlocal tokenizer
        folder = out / config / name
        final = _final(folder)
        if final is None:
            tell(f"{config}: {name}, {length:g} minutes")
            train(dataclasses.replace(
                options, config=files[config], out=folder, lr=rate, seed=seed, minutes=length, tokens=None, overwrite=True,
                tokenizer=tokenizer, eval_every=0, save_every=0, samples=0, final_eval=full), listener)
            final = _final(folder)
        if final is None:                                            # Ctrl-C: the run saved itself unfinished
            raise KeyboardInterrupt
        tokenizer = tokenizer or folder / "tokenizer.json"           # the first run trains it, all others use it
        return {"config": config, "lr": rate, "seed": seed, "minutes": length, **final}

    tuning = [run(c, f"tune-{rate:g}", rate, 0, tune_minutes, False) for rate in rates for c in configs]
    best = {c: min((t for t in tuning if t["config"] == c), key=lambda t: t["bits_per_byte"])["lr"] for c in configs}
    runs = [run(c, f"seed-{seed}", best[c], seed, minutes, True) for seed in range(1, seeds + 1) for c in configs]
    bits = {c: [r["bits_per_byte"] for r in runs if r["config"] == c] for c in configs}
    result = {
        "minutes": minutes, "seeds": seeds, "tune_minutes": tune_minutes, "rates": list(rates), "best_rate": best,
        "bits_per_byte": {c: statistics.fmean(v) for c, v in bits.items()}, "xz_bits_per_byte": runs[0]["xz_bits_per_byte"],
        "difference": {c: paired(bits[c], bits[first]) for c in configs[1:]}, "against": first,
        "profile": {c: profile(out / c / "seed-1").to_json() for c in configs},
        "runs": runs, "tuning": tuning, "options": options.to_json(), "machine": machine(pick_device(options.device)),
        "versions": versions(), "git": git_revision()}
    write_json(out / "comparison.json", result)
    return result


def paired(theirs: Sequence[float], ours: Sequence[float], confidence: float = 0.95) -> dict:
    """theirs − ours, paired: mean and the half-width of Student's interval (None for a single pair)."""
    differences = [a - b for a, b in zip(theirs, ours, strict=True)]
    mean, n = statistics.fmean(differences), len(differences)
    half = None if n < 2 else student_t(confidence, n - 1) * statistics.stdev(differences) / math.sqrt(n)
    return {"mean": mean, "half_width": half, "confidence": confidence, "pairs": differences}


def student_t(confidence: float, degrees: int) -> float:
    """The two-sided quantile of Student's t: bisection on its distribution, integrated in θ = atan(x / √ν) where it is a power of cos."""
    def inside(x: float) -> float:
        top, steps = math.atan(x / math.sqrt(degrees)), 2000
        f = [math.cos(i * top / steps) ** (degrees - 1) for i in range(steps + 1)]
        area = top / steps / 3 * (f[0] + f[-1] + 4 * sum(f[1:-1:2]) + 2 * sum(f[2:-1:2]))
        return 2 * area * math.gamma((degrees + 1) / 2) / (math.gamma(degrees / 2) * math.sqrt(math.pi))

    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < confidence else (low, middle)
    return (low + high) / 2


def _final(folder: Path) -> dict | None:
    """What a finished run says of itself: its last evaluation and its final line."""
    try:
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError):
        return None
    final = next((r for r in records if r.get("kind") == "final"), None)
    scores = [r for r in records if r.get("kind") == "eval"]
    if final is None or not scores:
        return None
    keep = ("xz_bits_per_byte", "max_vio", "dead_experts", "tokens", "elapsed_s", "parameters_total", "parameters_active")
    return {"bits_per_byte": scores[-1]["bits_per_byte"], "subset": scores[-1]["subset"], **{k: final.get(k) for k in keep}}
