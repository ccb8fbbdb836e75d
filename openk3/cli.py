"""The `openk3` command: parsing and printing, nothing else. What a command does lives on the floors below."""

import dataclasses
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from tyro.conf import OmitArgPrefixes, Positional, arg

from openk3.errors import UserError
from openk3.train.listener import Listener
from openk3.train.options import CompareOptions, TrainOptions

out = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
note = Console(stderr=True, highlight=False)
Folder = Annotated[Positional[Path], arg(metavar="DIR", help="A run folder or a checkpoint in the released layout.")]


def train(options: OmitArgPrefixes[TrainOptions]) -> None:
    """Train a model from scratch on your text, or on the Python standard library's source.

    Ctrl-C ends the run after the step it is in, saved; --resume goes on.
    """
    from openk3.report import summary
    from openk3.train.loop import train as run

    display = TrainDisplay(options.folder)
    try:
        folder = run(options, display)
    finally:
        display.close()
    found = summary(folder)
    if found.get("finished"):
        _print_summary(found)
    else:
        out.print(f"saved; go on with: openk3 train --resume --out {folder}")
    out.print(f"report: {folder / 'report.html'}")


def generate(
    model: Folder,
    /,
    prompt: str | None = None,
    input: Path | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.8,
    top_p: float = 0.95,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    stop: tuple[str, ...] = (),
    json: bool = False,
) -> None:
    """Continue a text, streamed as it comes; without --prompt it is read from standard input.

    Args:
        model: A run folder or a checkpoint.
        prompt: How the text begins.
        input: Many prompts: one a line, or .jsonl objects with "prompt"; prints a JSON object for each.
        max_new_tokens: Tokens to draw at most.
        temperature: 0 takes the likeliest token every time.
        top_p: Draw among the likeliest tokens that together reach this probability.
        top_k: Draw among this many tokens; 0: all.
        min_p: Drop tokens less likely than this part of the likeliest.
        repetition_penalty: Above 1: what was seen becomes less likely.
        seed: The same seed draws the same text.
        stop: Strings that end the text.
        json: Print a JSON object instead of the text.
    """
    from openk3.lab.completion import complete, read_prompts

    if prompt is not None and input is not None:
        raise UserError("--prompt and --input are both given: choose one")
    prompts = read_prompts(input) if input else [sys.stdin.read() if prompt is None else prompt]
    loaded, tokenizer = _load(model)
    as_json = json or input is not None
    sampling = _sampling(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=repetition_penalty)

    def show(_: int, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    if not as_json:
        sys.stdout.write(prompts[0])
    started = time.perf_counter()
    results = complete(loaded, tokenizer, prompts, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, stops=stop,
                       on_text=None if as_json else show)
    if as_json:
        for result in results:
            sys.stdout.write(_dumps(dataclasses.asdict(result)) + "\n")
    elif sys.stdout.isatty():
        took, tokens = time.perf_counter() - started, sum(r.tokens for r in results)
        note.print(f"\n[dim]{tokens} tokens, {tokens / took:.0f} a second[/dim]")
    else:
        sys.stdout.write("\n")


def chat(
    model: Folder,
    /,
    system: str | None = None,
    thinking: bool = True,
    max_new_tokens: int = 512,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int | None = None,
) -> None:
    """Talk with a model, turn by turn; the state and latents of what was said are kept, so each turn reads only what is new.

    Args:
        model: A run folder or a checkpoint.
        system: A system message that comes first.
        thinking: Whether the model reasons before it answers.
        max_new_tokens: Tokens of an answer at most, reasoning included.
        temperature: 0 takes the likeliest token every time.
        top_p: Draw among the likeliest tokens that together reach this probability.
        seed: The same seed draws the same answers.
    """
    from openk3.lab.conversation import Conversation

    loaded, tokenizer = _load(model)
    sampling = _sampling(temperature=temperature, top_p=top_p)
    talk = Conversation(loaded, tokenizer, system=system, thinking=thinking, sampling=sampling, seed=seed)
    note.print("[dim]end with Ctrl-D; Ctrl-C ends an answer[/dim]")

    def show(event) -> None:
        if event.kind in ("reasoning", "content"):
            out.print(event.text, end="", style="dim" if event.kind == "reasoning" else None, markup=False, soft_wrap=True)

    while True:
        try:
            text = input("> ") if sys.stdin.isatty() else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt):
            break
        if not text:
            break
        if not text.strip():
            continue
        try:
            talk.say(text.rstrip("\n"), max_new_tokens, show)
        except KeyboardInterrupt:
            note.print("\n[dim]stopped; the turn is forgotten[/dim]", end="")
        out.print()


def evaluate(
    model: Folder,
    /,
    data: tuple[Path, ...] = (),
    exclude: tuple[str, ...] = (),
    context: int | None = None,
    stride: int | None = None,
    json: bool = False,
) -> None:
    """Bits per byte on held-out text, beside `xz -9e` on the same bytes; every byte is scored once.

    Args:
        model: A run folder or a checkpoint.
        data: Files, folders or JSONL; none: the standard library's source. The held-out part of them is scored.
        exclude: Patterns of files to leave out.
        context: Tokens of a window; default 512, or what the run was trained on where that's more.
        stride: Tokens from one window to the next; default half of the context.
        json: Print a JSON object.
    """
    from openk3.data.corpus import load_corpus
    from openk3.train.evaluate import score, scoring_context, trained_seq_len

    context = context or scoring_context(trained_seq_len(model))
    corpus = load_corpus(data or None, exclude=exclude)
    loaded, tokenizer = _load(model)
    with Progress(TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=note, transient=True) as bar:
        task = bar.add_task("windows", total=None)
        found = score(loaded, tokenizer, [d.text for d in corpus.held_out], context=context, stride=stride,
                      on_progress=lambda done, total: bar.update(task, completed=done, total=total))
    xz = corpus.xz_bits_per_byte
    if json:
        sys.stdout.write(_dumps({
            "bits_per_byte": found.bits_per_byte, "xz_bits_per_byte": xz, "perplexity": found.perplexity, "tokens": found.tokens,
            "bytes": found.bytes, "corpus": corpus.digest, "context": context, "stride": stride or context // 2}) + "\n")
        return
    out.print(f"[bold]{found.bits_per_byte:.4f}[/bold] bits per byte over {found.bytes:,} bytes"
              + ("" if xz is None else f"; xz -9e: {xz:.4f}") + f"\nperplexity {found.perplexity:.2f} over {found.tokens:,} tokens"
              f"\ncorpus {corpus.name}, {len(corpus.held_out)} held-out files, digest {corpus.digest[:16]}")


def config(name: Annotated[Positional[str], arg(metavar="NAME")] = "", /, json: bool = False) -> None:
    """A model's outline and its parameters, counted by arithmetic: openk3 config k3. Without a name: the presets.

    Args:
        name: A preset, a config.json, or a folder that has one.
        json: Print the config itself, as it would be written.
    """
    from openk3.config import K3Config
    from openk3.counts import describe, short
    from openk3.presets import PRESETS, preset

    if not name:
        table = Table("preset", "parameters", "active", "what", box=None, pad_edge=False)
        for key, make in PRESETS.items():
            count = make().parameter_count()
            table.add_row(key, short(count.total), short(count.active), (make.__doc__ or "").strip().splitlines()[0])
        out.print(table)
        return
    cfg = K3Config.load(name) if Path(name).exists() and name not in PRESETS else preset(name)
    if json:
        sys.stdout.write(_dumps(cfg.to_dict(), indent=1) + "\n")
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in describe(cfg):
        table.add_row(label, value)
    out.print(table)


def inspect(folder: Folder, /, full: bool = False, tensors: bool = True, json: bool = False) -> None:
    """A checkpoint's tensors, their dtypes and bytes, and what is wrong with them; reads headers only.

    Args:
        folder: A run folder or a checkpoint.
        full: Also read the values: NaN, infinities, bad scales, padding that isn't zero.
        tensors: List tensors (those of a layer's experts as one line).
        json: Print a JSON object.
    """
    from openk3.checkpoint.audit import audit

    found = audit(folder, full=full)
    if json:
        sys.stdout.write(_dumps({
            "directory": str(found.directory), "files": [str(f) for f in found.files], "bytes": found.nbytes, "elements": found.elements,
            "dtypes": found.dtypes, "problems": found.problems, "notes": found.notes, "block_max": found.block_max,
            "tensors": {name: {"dtype": t.dtype, "shape": list(t.shape), "bytes": t.nbytes} for name, t in found.tensors.items()}}) + "\n")
    else:
        _print_audit(found, tensors)
    if found.problems:
        raise SystemExit(1)


def convert(source: Annotated[Positional[Path], arg(metavar="FROM")], target: Annotated[Positional[Path], arg(metavar="TO")], /,
            to: Literal["bf16", "mxfp4"] = "bf16", scale: Literal["floor", "even", "ceil", "rceil"] = "even") -> None:
    """Write a checkpoint again with its routed experts as BF16 or packed as MXFP4, tensor by tensor.

    Args:
        source: The checkpoint to read.
        target: The folder to write; it must not hold a checkpoint.
        to: bf16 unpacks exactly; mxfp4 rounds to nearest, and copies codes that are packed already.
        scale: How MXFP4 chooses a block's scale.
    """
    from openk3.checkpoint.convert import convert as run

    with Progress(TextColumn("converting"), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=note, transient=True) as bar:
        task = bar.add_task("bytes", total=None)
        run(source, target, to=to, mode=scale, progress=lambda done, total: bar.update(task, completed=done, total=total))
    out.print(f"{target}: written; look at it with openk3 inspect {target}")


def doctor(json: bool = False) -> None:
    """Check this installation, offline, in under a minute: versions, parity with golden values, a training step, the cache.

    Args:
        json: Print a JSON object.
    """
    from openk3.lab.doctor import examine

    results = []
    for check in examine():
        results.append(check)
        if not json:
            mark = {"ok": "[green]ok  [/green]", "failed": "[red]FAIL[/red]", "skipped": "[yellow]skip[/yellow]"}[check.status]
            out.print(f"{mark} {check.name:28} [dim]{check.seconds:5.1f} s[/dim]  {check.detail}", soft_wrap=True)
    failed = [c for c in results if c.status == "failed"]
    if json:
        sys.stdout.write(_dumps({"ok": not failed, "checks": [dataclasses.asdict(c) for c in results]}) + "\n")
    elif failed:
        out.print(f"[bold red]openk3 is not well[/bold red]: {len(failed)} of {len(results)} checks failed, the first is {failed[0].name}")
    else:
        out.print(f"[bold green]openk3 is well[/bold green]: {len(results)} checks in {sum(c.seconds for c in results):.0f} s")
    if failed:
        raise SystemExit(1)


def compare(
    configs: Annotated[Positional[tuple[str, ...]], arg(metavar="CONFIG CONFIG")],
    /,
    options: OmitArgPrefixes[CompareOptions],
) -> None:
    """Train configs side by side with equal time and equal tuning; print the difference in bits per byte with its interval."""
    from openk3.lab.compare import compare as run

    base = TrainOptions(data=options.data, exclude=options.exclude, batch_size=options.batch_size, seq_len=options.seq_len,
                        dtype=options.dtype, optimizer=options.optimizer)
    display = TrainDisplay(options.out)
    try:
        found = run(configs, options.out, options=base, seeds=options.seeds, minutes=options.minutes, rates=options.rates,
                    tune_minutes=options.tune_minutes, listener=display, tell=display.message)
    finally:
        display.close()
    columns = ("config", "bits per byte", "best lr", "tokens", "active parameters", "difference to " + found["against"])
    table = Table(*columns, box=None, pad_edge=False)
    for name, bits in found["bits_per_byte"].items():
        runs = [r for r in found["runs"] if r["config"] == name]
        gap = found["difference"].get(name)
        half = "" if gap is None or gap["half_width"] is None else f" ± {gap['half_width']:.4f}"
        table.add_row(name, f"{bits:.4f}", f"{found['best_rate'][name]:g}", f"{sum(r['tokens'] for r in runs) / len(runs):,.0f}",
                      f"{runs[0]['parameters_active']:,}", "" if gap is None else f"{gap['mean']:+.4f}{half}")
    out.print(table)
    for part in found["profile"].values():
        out.print()
        _print_profile(part)
    out.print()
    out.print(f"{found['seeds']} seeds of {found['minutes']:g} minutes, 95 % interval of the paired difference; "
              f"written to {options.out / 'comparison.json'}")


def profile(run: Folder, /, steps: int = 8, json: bool = False) -> None:
    """Where a training step's time goes, part by part: a few steps more on a copy of a run's model.

    Args:
        run: A run folder.
        steps: Steps to time; the best one counts.
        json: Print a JSON object.
    """
    from openk3.lab.profile import profile as run_profile

    found = run_profile(run, steps).to_json()
    if json:
        sys.stdout.write(_dumps(found) + "\n")
    else:
        _print_profile(found)


def report(run: Folder, /) -> None:
    """Make report.html of a run folder anew, finished or still in progress."""
    from openk3.report import write_report

    out.print(f"report: {write_report(run)}")


COMMANDS = {"train": train, "generate": generate, "chat": chat, "eval": evaluate, "config": config, "inspect": inspect,
            "convert": convert, "doctor": doctor, "report": report, "compare": compare,
            "profile": profile}


def main(argv: list[str] | None = None) -> None:
    """Run a command; exit with 2 and one line where the input was bad, with 130 after Ctrl-C."""
    try:
        tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="openk3", args=argv, sort_subcommands=False,
                                             description="Kimi K3 that you can run, break, measure and trust on a laptop.")
    except UserError as e:
        note.print(f"openk3: {e}", style="red", markup=False, soft_wrap=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        note.print("openk3: interrupted")
        raise SystemExit(130) from None
    except BrokenPipeError:                                  # `openk3 ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


class TrainDisplay(Listener):
    """Live progress on a terminal; elsewhere a line every ten seconds."""

    def __init__(self, folder: Path):
        self.folder, self.live, self.last = folder, None, 0.0
        self.bits: float | None = None

    def message(self, text: str) -> None:
        note.print(text, markup=False, soft_wrap=True)

    def step(self, metrics: dict, progress: float) -> None:
        left = metrics["elapsed_s"] * (1 - progress) / progress if progress else 0.0
        balance = "" if metrics["max_vio"] is None else f"  MaxVio {metrics['max_vio']:.2f}"
        bits = "" if self.bits is None else f"  held-out {self.bits:.3f} bits/byte"
        self._show(progress, f"step {metrics['step']}  {metrics['tokens'] / 1e6:.2f}M tokens  loss {metrics['loss']:.3f}{bits}{balance}  "
                             f"{metrics['tokens_per_s']:,.0f} tok/s  {int(left) // 60}:{int(left) % 60:02d} left")

    def scoring(self, done: int, total: int) -> None:
        self._show(done / total, f"scoring held-out text: {done:,} of {total:,} windows", now=False)

    def _show(self, progress: float, line: str, now: bool = True) -> None:
        """A bar on a terminal; elsewhere a line every ten seconds, and at the end where `now`."""
        if note.is_terminal:
            if self.live is None:
                self.live = Progress(BarColumn(20), TextColumn("{task.description}"), console=note)
                self.task = self.live.add_task("starting", total=1.0)
                self.live.start()
            self.live.update(self.task, completed=progress, description=line)
        elif time.monotonic() - self.last > 10 or (now and progress >= 1):
            self.last = time.monotonic()
            note.print(line, soft_wrap=True)

    def evaluated(self, metrics: dict) -> None:
        self.bits = metrics["bits_per_byte"]

    def close(self) -> None:
        if self.live is not None:
            self.live.stop()


def _load(folder: Path):
    from openk3.checkpoint import load
    from openk3.text.tokenizer import Tokenizer

    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give a run folder (`openk3 train` makes one) or a checkpoint")
    return load(folder), Tokenizer.load(folder)


def _print_audit(found, tensors: bool) -> None:
    """Tensors (a layer's experts as one line each), what each component weighs, and what is wrong."""
    from openk3.counts import short

    if tensors:
        table = Table("tensor", "dtype", "shape", "bytes", box=None, pad_edge=False)
        for column in (2, 3):
            table.columns[column].justify = "right"
        rows: dict[tuple, list[int]] = {}
        for name, t in found.tensors.items():
            key = (re.sub(r"\.experts\.\d+\.", ".experts.*.", name), t.dtype, " × ".join(map(str, t.shape)))
            counted = rows.setdefault(key, [0, 0])
            counted[0], counted[1] = counted[0] + 1, counted[1] + t.nbytes
        for (name, dtype, shape), (count, size) in rows.items():
            table.add_row(name + (f"  ({count})" if count > 1 else ""), dtype, shape, f"{size:,}")
        out.print(table)
        out.print()
    table = Table("component", "tensors", "weights", "bytes", box=None, pad_edge=False)
    for group in found.groups:
        table.add_row(group.name, f"{group.tensors:,}", short(group.elements), f"{group.nbytes:,}")
    table.add_row("all", f"{len(found.tensors):,}", short(found.elements), f"{found.nbytes:,}", style="bold")
    out.print(table)
    out.print("stored as " + ", ".join(f"{dtype}: {count:,}" for dtype, count in found.dtypes.items()) + f" in {len(found.files)} file(s)")
    for text in found.notes:
        out.print(f"note: {text}", markup=False, soft_wrap=True)
    for text in found.problems:
        out.print(f"wrong: {text}", style="red", markup=False, soft_wrap=True)
    if not found.problems:
        out.print("nothing is missing, nothing is extra, every shape and dtype is as the config says", style="green")


def _print_profile(found: dict) -> None:
    table = Table("part", "calls", "forward ms", "backward ms", "share", box=None, pad_edge=False)
    for column in range(1, 5):
        table.columns[column].justify = "right"
    for part in found["parts"]:
        table.add_row(part["name"], str(part["calls"]), f"{part['forward_ms']:.1f}", f"{part['backward_ms']:.1f}", f"{part['share']:.0%}")
    out.print(table)
    out.print(f"{found['config']}: {found['ms']:,.0f} ms for {found['rows']} x {found['seq_len']} tokens on {found['threads']} thread(s), "
              f"{found['dtype']}, {found['device']}; products with weights at {found['flops_per_s'] / 1e9:,.1f} GFLOP/s, "
              f"{found['flops_per_s'] / found['peak']:.0%} of one large product's rate", soft_wrap=True)


def _sampling(**values):
    from openk3.model.generate import Sampling

    try:
        return Sampling(**values)
    except ValueError as e:
        raise UserError(f"--{str(e).replace('_', '-', 1)}") from None


def _dumps(value, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _print_summary(found: dict) -> None:
    def number(key: str, form: str) -> str:
        return "–" if found[key] is None else format(found[key], form)

    out.print(found["verdict"], style="bold", soft_wrap=True)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row("held-out bits per byte", f"{number('bits_per_byte', '.4f')}   (xz -9e {number('xz_bits_per_byte', '.4f')})")
    table.add_row("parameters", f"{number('parameters_total', ',')}, active {number('parameters_active', ',')}")
    minutes = (found["elapsed_s"] or 0) / 60
    table.add_row("trained on", f"{number('tokens', ',')} tokens in {minutes:.1f} minutes, {number('tokens_per_s', ',.0f')} a second")
    if found["experts"]:
        table.add_row("expert load", f"MaxVio {number('max_vio', '.3f')}, {number('dead_experts', ',')} of {found['experts']} experts dead")
    if found["parse_rate"] is not None:
        table.add_row("completions that parse", f"{found['parse_rate']:.0%}")
    table.add_row("corpus", f"{found['corpus']}, digest {(found['corpus_digest'] or '')[:16]}")
    out.print(table)
