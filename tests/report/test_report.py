"""The run report: made-up run folders in, one self-contained page out, whatever state the run is in."""

import errno
import itertools
import json
import math
import random
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import numpy as np
import pytest

import openk3.report
from openk3.config import preset
from openk3.errors import UserError
from openk3.report import page, plots, summary, write_report
from openk3.report.reader import Run, read_run

PROMPT = 'def read_lines(path):\n    """Return the lines of a file."""\n'
COMPLETION = "    with open(path) as f:\n        return [line.rstrip('\\n') for line in f if line < '&' and line > \"\"]\n"


# --- run folders that look like real ones ---


def step_record(step: int, steps: int, rng: random.Random, dense: bool) -> dict:
    progress = step / steps
    loss = 1.45 + 6.8 * math.exp(-step / 35) + 1.5 * math.exp(-2.5 * progress) + rng.gauss(0, 0.07)
    return {
        "kind": "step",
        "step": step,
        "tokens": step * 8192,
        "loss": loss,
        "lr": 3e-3 * min(1.0, step / 40, 0.05 + 0.95 * (0.5 + 0.5 * math.cos(math.pi * progress))),
        "grad_norm": 0.4 + 6 * math.exp(-step / 30) + abs(rng.gauss(0, 0.07)),
        "tokens_per_s": 31000 + rng.gauss(0, 700) - (9000 if 0.4 < progress < 0.44 else 0),
        "elapsed_s": step * 8192 / 31000,
        "max_vio": None if dense else 0.35 + 6 * math.exp(-step / 3) + abs(rng.gauss(0, 0.12)),
        "min_load": None if dense else max(0.0, 0.72 - math.exp(-step / 4) - abs(rng.gauss(0, 0.08))),
    }


def balance_record(step: int, rng: random.Random, layers: int = 7, experts: int = 64, spread: float = 0.05) -> dict:
    width = spread + 0.6 * math.exp(-step / 25)
    loads = [[max(0.0, rng.gauss(1, width * (0.7 + 0.1 * layer))) for _ in range(experts)] for layer in range(layers)]
    return {
        "kind": "balance",
        "step": step,
        "layers": loads,
        "layer_ids": list(range(1, layers + 1)),
        "q": 4096.0,
        "max_vio": [max(load) - 1 for load in loads],
        "dead": [sum(value == 0 for value in load) for load in loads],
        "bias_range": [0.2 + 0.01 * layer for layer in range(layers)],
    }


def probe_record(step: int, rng: random.Random, layers: int = 8, block: int = 4, decay: bool = True) -> dict:
    sites = []
    for layer, part in itertools.product(range(layers), ("attn", "mlp")):
        blocks = (layer - 1) // block + 1 if part == "attn" else layer // block + 1
        sources = ["embed", *(f"block {n}" for n in range(1, blocks)), "partial"] if blocks else ["partial"]
        sites.append((f"L{layer}.{part}", sources))
    sites.append(("out", ["embed", *(f"block {n}" for n in range(1, -(-layers // block))), "partial"]))
    attn_res = []
    for site, sources in sites:
        raw = [math.exp(rng.gauss(0.9 if source == "partial" else 0, 0.8)) for source in sources]
        attn_res.append({"site": site, "weights": [x / sum(raw) for x in raw], "sources": sources})
    layers_decay = []
    for layer in (layer for layer in range(layers) if layer % 4 != 3 and decay):
        centre = rng.uniform(1.5, 4.5)
        half_life = [max(0.14, math.exp(centre + z * 1.3)) for z in (-2.33, -1.64, -0.67, 0, 0.67, 1.64, 2.33)]
        layers_decay.append({"layer": layer, "quantiles": [0.5 ** (1 / h) for h in half_life], "half_life": half_life})
    return {"kind": "probe", "step": step, "attn_res": attn_res, "decay": layers_decay}


def train_json(dense: bool) -> dict:
    return {
        "options": {
            **{"preset": "dense-nano" if dense else "nano", "seq_len": 512, "batch_size": 16, "lr": 3e-3, "minutes": 10, "seed": 0},
            **{"optimizer": "per-head-muon", "balance": "quantile", "qat": None, "corpus": [], "eval_every": 100, "compile": False},
        },
        "versions": {"openk3": "0.1.0", "torch": "2.13.0+cpu", "python": "3.11.7", "numpy": "2.4.0"},
        "machine": {
            **{"cpu": "Intel(R) Xeon(R) Platinum 8488C", "cores": 2, "threads": 2, "memory_gb": 15.6},
            **{"platform": "Linux-6.1-x86_64", "device": "cpu"},
        },
        "kernels": {"kda": "cpu (C++)", "experts": "cpu (C++)", "attn_res": "plain"},
        "git": "3f9c2ab",
        "corpus": {
            **{"name": "python-stdlib", "digest": "9f2c61b07de4a8c3" * 4, "files": 477, "held_out_files": 54},
            **{"train_bytes": 9_431_207, "held_out_bytes": 952_336},
        },
        "parameters": {"total": 11_642_880, "active": 3_120_512},
        "optimizer_groups": [
            {"treatment": "muon", "count": 58 if not dense else 49, "parameters": 9_830_400},
            {"treatment": "adamw", "count": 2, "parameters": 1_572_864},
            {"treatment": "adamw-no-decay", "count": 73, "parameters": 21_344},
        ],
    }


def make_run(folder: Path, *, steps: int = 400, total: int | None = None, dense: bool = False, final: bool = True, samples=None) -> Path:
    """A run folder that has logged `steps` of `total` steps."""
    rng = random.Random(7)
    folder.mkdir(parents=True)
    total = total or steps
    records = []
    for step in range(1, steps + 1):
        records.append(step_record(step, total, rng, dense))
        if step % max(1, total // 20) == 0:
            bits = 1.36 + 2.9 * math.exp(-step / total * 9) + 0.5 * math.exp(-step / total * 2)
            at = {"step": step, "tokens": step * 8192, "elapsed_s": step * 8192 / 31000}
            records.append({"kind": "eval", **at, "bits_per_byte": bits, "subset": "sample", "bytes": 65536})
            records.append(probe_record(step, rng) if not dense else {"kind": "probe", "step": step, "attn_res": [], "decay": []})
            if not dense:
                records.append(balance_record(step, rng))
        if step % max(1, total // 4) == 0:
            for sample in samples or [{"prompt": PROMPT, "completion": COMPLETION, "parses": True}, *LATER_SAMPLES]:
                records.append({"kind": "sample", "step": step, **sample})
    if final:
        moe = {"max_vio": None, "dead_experts": None} if dense else {"max_vio": 0.142, "dead_experts": 0}
        records.append(
            {"kind": "final", "bits_per_byte": 1.4312, "xz_bits_per_byte": 1.6504, **moe, "parse_rate": 0.84, "tokens": steps * 8192}
            | {"elapsed_s": steps * 8192 / 31000, "parameters_total": 11_642_880, "parameters_active": 3_120_512}
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "train.json").write_text(json.dumps(train_json(dense)))
    preset("dense-nano" if dense else "nano").save(folder)
    return folder


LATER_SAMPLES = [
    {"prompt": "class Stack:\n", "completion": "    def __init__(self):\n        self.items = [\n\n    def push(self):\n", "parses": False},
    {"prompt": "import os\n", "completion": "import sys\nimport threading\n\n__all__ = ['walk', 'fsencode']\n", "parses": None},
]


# --- reading the page back ---

VOID = {"meta", "br", "img", "link", "hr", "input"}


class Page(HTMLParser):
    """Checks that tags nest, and gathers ids, texts by enclosing element, attributes and tag names."""

    def __init__(self, path: Path):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, key, value or "") for key, value in attrs]
        self.ids += [value for key, value in attrs if key == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data

    def assert_self_contained(self):
        assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & set(self.tags)
        assert len(self.ids) == len(set(self.ids))
        for tag, key, value in self.attributes:
            assert not key.startswith("on"), (tag, key)
            if key in ("src", "href", "xlink:href", "srcset", "action", "data", "poster"):
                assert value.startswith("data:image/") or (value.startswith("#") and value[1:] in self.ids), (tag, key, value[:80])
            for target in re.findall(r"url\(([^)]*)\)", value):
                assert target.startswith("#") and target[1:] in self.ids
        style = re.search(r"<style>(.*?)</style>", self.source, re.DOTALL)[1]
        assert "url(" not in style and "@import" not in style
        assert len(self.source.encode()) < 1_500_000


def read_back(folder: Path) -> Page:
    path = write_report(folder)
    assert path == folder / "report.html" and sorted(p.name for p in folder.iterdir() if "report" in p.name) == ["report.html"]
    out = Page(path)
    out.assert_self_contained()
    return out


FIGURES = {"Held-out text", "Training loss", "Throughput", "Step size"}
MOE_FIGURES = {"Load of every expert", "The busiest expert, over time", "The idlest expert, over time"}


def figures(out: Page) -> set[str]:
    return set(re.findall(r"<figure><h3>(.*?)</h3>", out.source))


# --- tests ---


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Page:
    return read_back(make_run(tmp_path_factory.mktemp("runs") / "nano"))


def test_finished_k3_run_shows_every_section(finished):
    out = finished
    depth = {"Attention residuals: where each layer looks back", "KDA: how long each layer remembers"}
    assert figures(out) == FIGURES | MOE_FIGURES | depth
    for section in ("verdict", "learning", "pace", "experts", "depth-memory", "samples", "record", "options", "machine", "kernels"):
        assert section in out.ids
    for text in ("1.431", "1.650", "13.3%", "9f2c61b07de4a8c3", "0.14", "of 448", "84%", "11.6 M", "3.12 M active", "3.28 M"):
        assert text in out.text, text
    assert "per-head-muon" in out.text and "3f9c2ab" in out.text and "adamw-no-decay" in out.text
    assert "not finished" not in out.text
    assert PROMPT in out.text and COMPLETION in out.text
    assert "✓ parses" in out.text and "✗ doesn’t parse" in out.text


def test_figures_take_the_colours_of_the_page(finished):
    source = finished.source
    svg = "".join(re.findall(r"<svg.*?</svg>", source, re.DOTALL))
    assert source.count("<style") == 1
    assert "var(--ink)" in source and "var(--muted)" in svg and "prefers-color-scheme: dark" in source
    fixed = set(re.findall(r"#[0-9a-f]{6}\b", svg))
    assert fixed <= {"#11161d", "#f3f1e8"}, "only the marks inside heat map cells have a colour of their own"
    used, defined = set(re.findall(r"var\((--\w+)\)", source)), set(re.findall(r"(--\w+):", source))
    assert used <= defined


def test_dense_run_leaves_out_experts_depth_and_memory(tmp_path):
    out = read_back(make_run(tmp_path / "dense", dense=True))
    assert figures(out) == FIGURES
    assert "experts" not in out.ids and "depth-memory" not in out.ids
    assert "MaxVio" not in out.text and "dead experts" not in out.text
    assert summary(tmp_path / "dense")["max_vio"] is None


def test_run_in_progress_after_three_steps(tmp_path):
    folder = make_run(tmp_path / "young", steps=3, total=400, final=False)
    out = read_back(folder)
    assert "not finished" in out.text and "step 3" in out.text
    assert {"Training loss", "Throughput", "Step size"} <= figures(out)
    assert "Held-out text" not in figures(out) and "samples" not in out.ids
    facts = summary(folder)
    assert not facts["finished"] and facts["step"] == 3 and facts["tokens"] == 3 * 8192 and facts["bits_per_byte"] is None
    assert facts["verdict"] == "Not finished (step 3): no held-out text has been scored yet."


@pytest.mark.parametrize("cut", [1, 20, 200])
def test_half_written_last_line_is_left_out_in_silence(tmp_path, cut):
    folder = make_run(tmp_path / "run", steps=40, final=False)
    path = folder / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + json.dumps(probe_record(41, random.Random(0))).encode()[:cut])
    assert read_run(folder).notes == []
    assert summary(folder)["step"] == 40


def test_broken_lines_in_the_middle_are_left_out_and_counted(tmp_path):
    folder = make_run(tmp_path / "run", steps=40, final=False)
    path = folder / "metrics.jsonl"
    path.write_bytes(b'{"kind": "step", "ste\n\xff\xfe\n[1, 2]\n"step"\n' + path.read_bytes())
    assert read_run(folder).notes == ["2 lines of metrics.jsonl could not be read and were left out."]


def test_resumed_run_shows_only_the_branch_that_led_here(tmp_path):
    folder = make_run(tmp_path / "run", steps=40)
    rng = random.Random(1)
    with (folder / "metrics.jsonl").open("a") as log:
        for step in range(31, 36):
            log.write(json.dumps(step_record(step, 60, rng, False) | {"loss": 0.5}) + "\n")
    run = read_run(folder)
    assert run.series("step", "step").tolist() == list(range(1, 36))
    assert run.series("step", "loss")[30:].tolist() == [0.5] * 5
    assert all(record["step"] <= 30 for kind in ("eval", "probe", "balance", "sample") for record in run.records[kind])
    assert run.final is None and not summary(folder)["finished"]


HOSTILE = "</pre></span><script>alert(1)</script><img src=x onerror=alert(2)>&lt;' \" \x00\x1b[31m \u202e \ud800 {{7*7}} ${x} `"


def test_hostile_text_stays_text(tmp_path):
    folder = make_run(tmp_path / "<b>&run", steps=40, samples=[{"prompt": HOSTILE, "completion": HOSTILE, "parses": False}])
    train = train_json(dense=False)
    train["options"][HOSTILE] = HOSTILE
    train["options"]["nested"] = {"deep": {HOSTILE: [HOSTILE, {"a": HOSTILE}]}}
    train["corpus"] |= {"name": HOSTILE, "digest": HOSTILE}
    train["kernels"], train["git"] = {HOSTILE: HOSTILE}, HOSTILE
    train["optimizer_groups"][0]["treatment"] = HOSTILE
    (folder / "train.json").write_text(json.dumps(train))
    probe = probe_record(40, random.Random(0))
    probe["attn_res"][0] = {"site": HOSTILE, "weights": [0.5, 0.5], "sources": ["$\\frac{1}$", HOSTILE]}
    probe["decay"][0]["layer"] = HOSTILE
    balance = balance_record(40, random.Random(0)) | {"layer_ids": [HOSTILE] * 7, "bias_range": [HOSTILE] * 7}
    with (folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps(probe) + "\n" + json.dumps(balance) + "\n")
    out = read_back(folder)
    assert "script" not in out.tags and "img" not in out.tags
    assert out.text.count("<script>alert(1)</script>") >= 8
    assert "\x00" not in out.source and "\x1b" not in out.source and "\u202e" not in out.source
    assert "<b>&run" in out.text


def test_wrong_types_everywhere_still_make_a_page(tmp_path):
    junk = [None, True, "x", -1, 0, 1e308, 10**400, float("nan"), float("inf"), [], {}, [[]], ["a"], [None], {"a": 1}, [[1, "b"]]]
    keys = {
        "step": ["step", "tokens", "loss", "lr", "grad_norm", "tokens_per_s", "elapsed_s", "max_vio", "min_load"],
        "eval": ["step", "tokens", "bits_per_byte", "subset"],
        "balance": ["step", "layers", "layer_ids", "q", "max_vio", "dead", "bias_range"],
        "probe": ["step", "attn_res", "decay"],
        "sample": ["step", "prompt", "completion", "parses"],
        "final": ["bits_per_byte", "xz_bits_per_byte", "max_vio", "dead_experts", "parse_rate", "tokens", "elapsed_s", "parameters_total"],
    }
    for seed in range(4):
        rng = random.Random(seed)
        folder = tmp_path / f"junk{seed}"
        folder.mkdir()
        records = [{"kind": kind, **{key: rng.choice(junk) for key in names}} for kind, names in keys.items() for _ in range(8)]
        records.append({"kind": "probe", "attn_res": [{"site": j, "weights": j, "sources": j} for j in junk]})
        records.append({"kind": "probe", "decay": [{"layer": j, "half_life": j, "quantiles": j} for j in junk]})
        records.append({"kind": "new-kind", "x": 1})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        (folder / "train.json").write_text(json.dumps({key: rng.choice(junk) for key in train_json(False)}))
        (folder / "config.json").write_text(rng.choice(["", "[]", "{}", '{"model_type": 3}']))
        with np.errstate(all="ignore"):
            read_back(folder)


def test_folder_with_metrics_alone_says_what_is_missing(tmp_path):
    folder = make_run(tmp_path / "run", steps=3, total=90, final=False)
    (folder / "train.json").unlink()
    (folder / "config.json").unlink()
    text = read_back(folder).text
    assert "no train.json" in text and "outline is missing" in text


@pytest.mark.parametrize("call", [summary, write_report])
def test_what_cannot_be_reported_is_one_clear_line(tmp_path, call):
    with pytest.raises(UserError, match="no run folder at") as missing:
        call(tmp_path / "nowhere")
    (tmp_path / "bare").mkdir()
    with pytest.raises(UserError, match="metrics.jsonl is missing") as bare:
        call(tmp_path / "bare")
    (tmp_path / "bare" / "metrics.jsonl").write_text("\n")
    with pytest.raises(UserError, match="holds no records") as empty:
        call(tmp_path / "bare")
    for error in (missing, bare, empty):
        assert "\n" not in str(error.value)


def test_full_disk_keeps_the_old_report_and_leaves_nothing_beside_it(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "run", steps=2, total=90, final=False)
    (folder / "report.html").write_text("old")

    def full(path, data):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UserError, match="No space left on device; free some space"):
        write_report(folder)
    assert (folder / "report.html").read_text() == "old"
    assert not [path for path in folder.iterdir() if path.name.startswith(".report")]


def test_same_folder_gives_the_same_page_and_leaves_matplotlib_as_it_was(tmp_path):
    run = read_run(make_run(tmp_path / "run", steps=3, total=90, final=False))
    before = dict(matplotlib.rcParams)
    assert page.render(run) == page.render(run)
    assert dict(matplotlib.rcParams) == before


def test_summary_of_a_finished_run(tmp_path):
    facts = summary(make_run(tmp_path / "nano", steps=60))
    assert facts["verdict"] == (
        "1.431 bits per byte on the held-out text; xz -9e needs 1.650, so the model takes 13.3% fewer."
    )
    wanted = {"name": "nano", "finished": True, "tokens": 60 * 8192, "dead_experts": 0, "max_vio": 0.142, "experts": 448}
    assert wanted.items() <= facts.items()
    assert json.loads(json.dumps(facts)) == facts
    worse = summary(make_worse(tmp_path / "worse"))
    assert worse["saved"] < 0 and "21.2% more" in worse["verdict"]


def test_a_score_of_a_sample_is_not_held_against_xz_on_the_whole(tmp_path):
    folder = make_run(tmp_path / "run", steps=20, total=40, final=False)
    train = train_json(dense=False)
    train["corpus"]["xz_bits_per_byte"] = 1.65
    (folder / "train.json").write_text(json.dumps(train))
    facts = summary(folder)
    assert facts["bits_subset"] == "sample" and facts["xz_bits_per_byte"] == 1.65 and facts["saved"] is None
    assert "sample of the held-out text" in facts["verdict"] and "xz" not in facts["verdict"]


def make_worse(folder: Path) -> Path:
    make_run(folder, steps=20, final=False)
    with (folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"kind": "final", "bits_per_byte": 2.0, "xz_bits_per_byte": 1.65}) + "\n")
    return folder


def test_long_run_of_a_large_model_stays_small(tmp_path):
    """Thousands of steps, 92 layers of 896 experts: pixels for the heat map, envelopes for the curves."""
    rng = random.Random(3)
    folder = tmp_path / "large"
    folder.mkdir()
    records = [step_record(step, 4_000, rng, False) for step in range(1, 4_001)]
    records += [balance_record(4_000, rng, layers=92, experts=896)]
    records += [probe_record(4_000, rng, layers=93, block=12)]
    records += [{"kind": "sample", "step": 4_000, "prompt": "x" * 100_000, "completion": "y" * 100_000, "parses": True}] * 30
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    out = read_back(folder)
    assert "97,000 more characters" in out.text


def test_envelope_keeps_every_extreme_and_rolling_mean_leaves_out_gaps():
    x = np.arange(10_000.0)
    y = np.zeros(10_000)
    y[[77, 5_555]] = 9.0, -9.0
    thin_x, thin_y = plots.envelope(x, y)
    assert len(thin_x) <= 600 and np.all(np.diff(thin_x) > 0)
    assert thin_x[thin_y == 9.0].tolist() == [77] and thin_x[thin_y == -9.0].tolist() == [5_555]
    assert plots.rolling_mean(np.array([1.0, np.nan, 3.0, 5.0]), 3).tolist() == pytest.approx([1.0, 2.0, 4.0, 4.0])
    assert plots.rolling_mean(np.full(50, 2.0), 9).tolist() == pytest.approx([2.0] * 50)
    assert plots.rolling_mean(np.zeros(0), 9).size == 0


def test_half_life_is_derived_from_decay_where_it_is_not_logged(tmp_path):
    alpha = [0.5, 0.5**0.5, 0.5**0.1, 0.5**0.01, 0.5**0.001, 1.0, 1.0]
    run = Run(tmp_path)
    run.records["probe"].append({"decay": [{"layer": 2, "quantiles": alpha}]})
    ((name, lives),) = plots.half_lives(run)
    assert name == "L2" and lives[:5].tolist() == pytest.approx([1, 2, 10, 100, 1000]) and np.isinf(lives[5:]).all()
    with plots.style():
        assert "<svg" in plots.decay(run)


def test_tokens_of_records_without_them_come_from_the_steps_around(tmp_path):
    run = Run(tmp_path)
    run.records["step"] = [{"step": 0, "tokens": 0}, {"step": 10, "tokens": 1000}]
    run.records["balance"] = [{"step": 5}, {"step": 10}, {}]
    assert run.tokens("balance")[:2].tolist() == [500, 1000] and np.isnan(run.tokens("balance")[2])


def test_summary_needs_neither_torch_nor_matplotlib():
    code = "import sys, openk3.report; assert not {'torch', 'matplotlib'} & set(sys.modules), 'heavy import'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(openk3.report.__file__).parents[2])
