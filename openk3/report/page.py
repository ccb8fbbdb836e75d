"""The report as one HTML file: text and figures of a read run, with its own style sheet, no script and nothing to fetch.

Everything that comes from the run (samples, options, names) goes through `esc`, and the page's own security policy forbids
scripts and requests besides, so a report can be opened without trusting the corpus or the model that it shows.
"""

import contextlib
import errno
import html
import json
import math
import os
from pathlib import Path

from openk3.config import K3Config
from openk3.errors import UserError

from . import plots
from .reader import Run, last_loads, number, numbers, read_run, summarise
from .style import CSS

SAMPLE_CHARS = 3000  # of a prompt or a completion; a report shows how the model writes, it isn't an archive


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run folder and return its path.

    The page holds what the folder's metrics.jsonl, train.json and config.json say; a run in progress gets a page of what it has
    logged so far. An older report stands until the new one is whole. UserError: no such folder, no metrics.jsonl or no record in
    it, a full disk or a folder that can't be written to.
    """
    run = read_run(run_dir)
    path = run.folder / "report.html"
    aside = run.folder / f".report.html.{os.getpid()}"
    try:
        aside.write_bytes(render(run).encode("utf-8"))
        os.replace(aside, path)
    except OSError as error:
        mend = "free some space" if error.errno == errno.ENOSPC else "check the folder's permissions"
        raise UserError(f"can't write {path}: {error.strerror or error}; {mend}") from None
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()
    return path


def render(run: Run) -> str:
    """The whole page."""
    facts = summarise(run)
    with plots.style():
        sections = [
            ("learning", "Learning", _learning(run, facts)),
            ("pace", "Pace", _pace(run)),
            ("experts", "Experts", _experts(run)),
            ("depth-memory", "Depth and memory", _depth_and_memory(run)),
            ("samples", "Samples", _samples(run)),
            ("record", "Record", _record(run)),
        ]
    sections = [section for section in sections if section[2]]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in sections)
    body = "".join(f'<section id="{name}"><h2>{title}</h2>{content}</section>\n' for name, title, content in sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="robots" content="noindex">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{esc(run.name)} · openk3 run report</title>
<style>{CSS}</style>
</head>
<body>
<main>
{_header(run, facts)}
<nav aria-label="Sections">{links}</nav>
{body}{_notes(run)}
</main>
</body>
</html>
"""


# --- the top of the page ---


def _header(run: Run, facts: dict) -> str:
    state = "" if facts["finished"] else '<span class="badge busy">not finished</span>'
    outline = f'<p class="outline">{_outline(run.config)}</p>{_layer_strip(run.config)}' if run.config else ""
    return f"""<header>
<p class="kicker">openk3 run report {state}</p>
<h1>{esc(run.name)}</h1>
{outline}
{_verdict(facts)}
{_tiles(facts)}
</header>"""


def _verdict(facts: dict) -> str:
    bits, xz, saved = facts["bits_per_byte"], facts["xz_bits_per_byte"], facts["saved"]
    name, digest = facts["corpus"], facts["corpus_digest"]
    corpus = f'<p class="digest">Corpus {esc(name or "unnamed")} <code>{esc(digest or "no digest")}</code></p>' if name or digest else ""
    if bits is None:
        return f'<div class="verdict" id="verdict"><p class="claim">{esc(facts["verdict"])}</p>{corpus}</div>'
    size = f" ({_bytes(facts['held_out_bytes'])})" if facts["held_out_bytes"] and facts["bits_subset"] == "full" else ""
    text = "held-out text" if facts["bits_subset"] == "full" else "a sample of the held-out text"
    claim, bars, note = f"<b>{bits:.3f}</b> bits per byte on {text}{size}", "", ""
    if saved is not None:
        claim += f", <b>{abs(saved):.1%}</b> {'fewer' if saved >= 0 else 'more'} than <code>xz -9e</code>"
        for label, kind, value in (("this model", "model", bits), ("xz -9e", "xz", xz)):
            width = 100 * value / max(bits, xz)
            bars += f'<div class="bar"><span>{label}</span><i class="{kind}" style="width:{width:.1f}%"></i><b>{value:.3f}</b></div>'
        bars = f'<div class="bars" aria-hidden="true">{bars}</div>'
        note = (
            "xz is a yardstick, not a rival: it knows only the bytes that it packs, while the model has read the training text. "
            "The model’s own size is not counted."
        )
    if not facts["finished"]:
        where = f"step {facts['step']:,}" if facts["step"] is not None else "an early step"
        note = f"The run has no closing record: it is still going, or was stopped, at {where}. Numbers are its latest. {note}"
    return f'<div class="verdict" id="verdict"><p class="claim">{claim}.</p>{bars}{corpus}<p class="note">{note}</p></div>'


def _tiles(facts: dict) -> str:
    tiles = []
    vio, dead, rate = facts["max_vio"], facts["dead_experts"], facts["parse_rate"]
    if facts["parameters_total"] is not None:
        active = facts["parameters_active"]
        tiles.append(("parameters", _short_count(facts["parameters_total"]), f"{_short_count(active)} active per token" if active else ""))
    if facts["tokens"] is not None:
        tiles.append(("tokens", _short_count(facts["tokens"]), f"{facts['step']:,} steps" if facts["step"] is not None else ""))
    if facts["elapsed_s"] is not None:
        speed = f"{_short_count(facts['tokens_per_s'])} tokens/s" if facts["tokens_per_s"] else ""
        tiles.append(("training time", _duration(facts["elapsed_s"]), speed))
    if vio is not None:
        word = "even" if vio < 0.25 else "uneven" if vio < 1 else "lopsided"
        tiles.append(("MaxVio", f"{vio:.2f}", f"{word}: {vio:+.0%} at the busiest expert"))
    if dead is not None:
        tiles.append(("dead experts", f"{dead:,}", f"of {facts['experts']:,}" if facts["experts"] else ""))
    if rate is not None:
        tiles.append(("parse rate", f"{rate:.0%}", "of samples parse"))
    return '<dl class="tiles">' + "".join(f"<div><dt>{t}</dt><dd><b>{v}</b><span>{n}</span></dd></div>" for t, v, n in tiles) + "</dl>"


def _outline(config: K3Config) -> str:
    """The model in one line."""
    text = config.text_config
    kda = sum(map(text.is_kda, range(text.num_hidden_layers)))
    attention = "MLA" if text.kv_lora_rank is not None else "attention"
    kinds = [f"{count} {name}" for count, name in ((kda, "KDA"), (text.num_hidden_layers - kda, attention)) if count]
    parts = [f"{text.num_hidden_layers} layers ({', '.join(kinds)})", f"width {text.hidden_size:,}"]
    if text.num_experts is not None:
        latent = f" in a latent space of {text.latent_size:,}" if text.routed_expert_hidden_size is not None else ""
        parts.append(f"{text.num_experts:,} experts, {text.num_experts_per_token} per token{latent}")
    else:
        parts.append("dense")
    if text.attn_res_block_size is not None:
        parts.append(f"attention residuals over blocks of {text.attn_res_block_size}")
    parts.append(f"vocabulary {text.vocab_size:,}")
    return " · ".join(parts)


def _layer_strip(config: K3Config) -> str:
    """The layers as a strip of cells, first to last: attention kind above, feed-forward kind below, gaps between depth blocks."""
    text = config.text_config
    cells, used = [], set()
    for layer in range(text.num_hidden_layers):
        above = "KDA" if text.is_kda(layer) else "MLA" if text.kv_lora_rank is not None else "attention"
        below = "dense" if text.is_dense(layer) else "experts"
        used |= {above, below}
        starts = layer and text.attn_res_block_size and layer % text.attn_res_block_size == 0
        gap = ' class="gap"' if starts else ""
        cells.append(f'<i{gap} title="L{layer}: {above}, {below}"><s class="{above}"></s><s class="{below}"></s></i>')
    order = [kind for kind in ("KDA", "MLA", "attention", "dense", "experts") if kind in used]
    legend = "".join(f'<span><s class="{kind}"></s>{kind}</span>' for kind in order)
    return f'<div class="strip"><div class="cells" role="img" aria-label="Layers in order">{"".join(cells)}</div><p>{legend}</p></div>'


# --- the figures ---


def _figure(svg: str | None, title: str, reading: str, narrow: str | None = None) -> str:
    if svg is None:
        return ""
    if narrow is not None:
        svg = f'<div class="wide">{svg}</div><div class="narrow">{narrow}</div>'
    return f"<figure><h3>{title}</h3>{svg}<figcaption>{reading}</figcaption></figure>"


def _grid(*figures: str) -> str:
    return f'<div class="grid">{"".join(figures)}</div>' if any(figures) else ""


def _learning(run: Run, facts: dict) -> str:
    target = ", past the dashed line of <code>xz&nbsp;-9e</code>" if facts["xz_bits_per_byte"] is not None else ""
    return _grid(
        _figure(
            plots.held_out(run),
            "Held-out text",
            f"Lower is better. Healthy: a steep fall that eases but goes on{target}; a rise late in the run means that the training text "
            "is being learnt by heart.",
        ),
        _figure(
            plots.training_loss(run),
            "Training loss",
            "Each step faint, their running mean in front. Healthy: noise of even width around a falling mean. A spike that heals "
            "within a few steps is harmless; a step up that stays is not.",
        ),
    )


def _pace(run: Run) -> str:
    return _grid(
        _figure(
            plots.throughput(run),
            "Throughput",
            "Healthy: flat. A dent is another program at work on the machine; a lasting drop is worth a look at memory and heat.",
        ),
        _figure(
            plots.step_size(run),
            "Step size",
            "Healthy: the gradient’s norm settles while the learning rate warms up, then stays within a factor of ten; steady growth "
            "announces divergence.",
        ),
    )


def _experts(run: Run) -> str:
    names, loads = last_loads(run)
    wide = _figure(
        plots.expert_load(run, 980),
        "Load of every expert",
        "One row a layer, its experts sorted from the busiest to the idlest, as last measured. Grey is a fair share, yellow more, blue "
        'less, <i class="dead"></i>&nbsp;none at all. Healthy: rows that are grey nearly throughout, with a small MaxVio at their end.',
        narrow=plots.expert_load(run, 400),
    )
    grid = _grid(
        _figure(
            plots.max_vio(run),
            "The busiest expert, over time",
            "0.1 means 10% above its fair share. Line: the worst layer over some thousand tokens per expert; grey: every layer; faint: "
            "single steps, noisier by nature. Healthy: down within the first steps, then close to the dotted line, which even perfect "
            "balance would show by chance.",
        ),
        _figure(
            plots.min_load(run),
            "The idlest expert, over time",
            "Each step faint, their running mean in front. Healthy: it rises early and stays well above 0; at 0 an expert gets no "
            "tokens and learns nothing. 1 is a perfect share.",
        ),
    )
    last = run.last("balance")
    dead, ranges, vio = numbers(last.get("dead")), last.get("bias_range"), numbers(last.get("max_vio"))
    table = ""
    if loads and len(vio) == len(loads):
        rows = []
        for i, (name, load) in enumerate(zip(names, loads, strict=True)):
            none = f"{dead[i]:.0f}" if i < len(dead) else "–"
            spread = _bias(ranges[i]) if isinstance(ranges, list) and i < len(ranges) else "–"
            rows.append((esc(name), f"{vio[i]:.3f}", f"{load.min():.3f}", none, spread))
        table = _details("Layer by layer", _table(rows, ("layer", "MaxVio", "least load / share", "dead", "range of the router’s bias")))
    return wide + grid + table


def _bias(value: object) -> str:
    if isinstance(value, list):
        return " to ".join(f"{x:+.3f}" for x in numbers(value))
    return f"{number(value):.3f}" if math.isfinite(number(value)) else "–"


def _depth_and_memory(run: Run) -> str:
    return _grid(
        _figure(
            plots.depth_weights(run),
            "Attention residuals: where each layer looks back",
            "One row a mixing site, first layer at the top: the share of its input that comes from the embedding, from each finished block "
            "and from the running sum; blue is little, yellow nearly all. Rows begin as equal shares. Healthy: they have grown apart, and "
            "some reach back past the running sum.",
        ),
        _figure(
            plots.decay(run),
            "KDA: how long each layer remembers",
            "Tokens until half of a memory channel has faded. Dot: median; bar: middle half; lines: 5 to 95 and 1 to 99%. Healthy: "
            "layers spread over powers of ten, some short and some long. A layer pressed to the left edge has no memory; one pressed to "
            "the right never forgets.",
        ),
    )


# --- samples and the record ---


def _samples(run: Run) -> str:
    samples = run.records["sample"]
    if not samples:
        return ""
    last_step = samples[-1].get("step")
    latest = [sample for sample in samples if sample.get("step") == last_step][:12]
    first_prompt = latest[0].get("prompt")
    earlier = [sample for sample in samples if sample.get("prompt") == first_prompt and sample.get("step") != last_step]
    earlier = earlier[:: -(-len(earlier) // 8)] if earlier else []
    content = "<p>The prompt is grey; what follows it is the model’s.</p>" + "".join(map(_sample, latest))
    if earlier:
        content += _details("The first prompt, earlier in training", "".join(map(_sample, earlier)))
    return content


def _sample(sample: dict) -> str:
    parses = sample.get("parses")
    badge = ""
    if isinstance(parses, bool):
        badge = '<span class="badge good">✓ parses</span>' if parses else '<span class="badge bad">✗ doesn’t parse</span>'
    step = number(sample.get("step"))
    label = f"step {step:,.0f}" if math.isfinite(step) else "sample"
    prompt, completion = (_cut(sample.get(key)) for key in ("prompt", "completion"))
    text = f'<pre><span class="prompt">{prompt}</span><span>{completion}</span></pre>'
    return f'<article class="sample"><p>{label} {badge}</p>{text}</article>'


def _cut(value: object) -> str:
    text = value if isinstance(value, str) else ""
    more = f'<em>… {len(text) - SAMPLE_CHARS:,} more characters</em>' if len(text) > SAMPLE_CHARS else ""
    return esc(text[:SAMPLE_CHARS]) + more


def _record(run: Run) -> str:
    parts = []
    for key, title in (("corpus", "Corpus"), ("machine", "Machine"), ("versions", "Versions"), ("kernels", "Kernels")):
        rows = [(esc(name), _value(value)) for name, value in run.train_section(key).items()]
        if key == "versions" and isinstance(run.train.get("git"), str):
            rows.append(("git", _value(run.train["git"])))
        if rows:
            parts.append(f'<div class="part" id="{key}"><h3>{title}</h3>{_table(rows)}</div>')
    groups = run.train.get("optimizer_groups")
    rows = [
        tuple(_value(group.get(key)) for key in ("treatment", "count", "parameters"))
        for group in (groups if isinstance(groups, list) else [])
        if isinstance(group, dict)
    ]
    if rows:
        table = _table(rows, ("treatment", "tensors", "parameters"))
        parts.append(f'<div class="part" id="optimizer"><h3>Optimizer groups</h3>{table}</div>')
    options = [(esc(name), _value(value)) for name, value in _flat(run.train_section("options"))]
    if options:
        parts.append(f'<div class="part" id="options"><h3>Options</h3>{_table(options)}</div>')
    return f'<div class="parts">{"".join(parts)}</div>' if parts else ""


def _notes(run: Run) -> str:
    notes = "".join(f"<p>{esc(note)}</p>" for note in run.notes)
    return f'<footer>{notes}<p>Made by openk3 from this folder’s files alone.</p></footer>'


def _flat(options: dict, prefix: str = "") -> list[tuple[str, object]]:
    out = []
    for key, value in options.items():
        out += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [(prefix + key, value)]
    return out


# --- text ---


def esc(value: object) -> str:
    """Text that is safe in HTML: escaped; control characters as their pictures, lone surrogates as the replacement character."""
    text = str(value).translate(_PICTURES).encode("utf-8", "replace").decode("utf-8")
    return html.escape(text)


_PICTURES = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"},
    **dict.fromkeys([0x7F, *range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], "\N{REPLACEMENT CHARACTER}"),
}  # the last two ranges turn the direction of writing, and could disguise what stands in a sample


def _value(value: object) -> str:
    """One cell of the record, escaped: numbers with thousands separators, nothing as a dash, structures as JSON."""
    if value is None or value == "":
        return '<span class="none">–</span>'
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f'<span class="number">{value:,}</span>'
    if isinstance(value, float):
        return f'<span class="number">{value:.6g}</span>'
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return esc(text if len(text) <= 2000 else text[:2000] + "…")


def _table(rows: list[tuple], head: tuple[str, ...] = ()) -> str:
    """A table of cells that are already HTML; the first of a row is its heading."""
    top = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    top = f"<thead><tr>{top}</tr></thead>" if head else ""
    body = ""
    for first, *others in rows:
        cells = "".join(f"<td>{cell}</td>" for cell in others)
        body += f'<tr><th scope="row">{first}</th>{cells}</tr>'
    return f'<div class="table"><table>{top}<tbody>{body}</tbody></table></div>'


def _details(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>{content}</details>"


def _short_count(value: float) -> str:
    """Three digits and a unit: 12.3 M, 2.78 T."""
    text = plots.si(value)
    return f"{text[:-1]} {text[-1]}" if text[-1].isalpha() else text


def _bytes(value: int) -> str:
    return f"{value / 1e6:.2f} MB" if value >= 1e5 else f"{value:,} bytes"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 600:
        return f"{seconds // 60:.0f} min {seconds % 60 // 1:02.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
