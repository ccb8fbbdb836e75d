"""The report's figures: a read run in, inline SVG out, or None where the run logged nothing to draw.

Matplotlib draws with stand-in colours, which are then replaced by the page's CSS variables, and without fonts, so that one SVG
follows the page into light and dark and takes its typeface. Heat maps use cividis, whose order survives colour blindness, print
and both backgrounds. Sizes are in CSS pixels (72 dots an inch make a point a pixel); the page scales them to its columns.
"""

import io
import itertools
import re
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from .reader import Run, items, last_loads, number, numbers

INK, MUTED, GRID, PAPER = "#010101", "#020202", "#030303", "#040404"
BLUE, ORANGE = "#0a0a01", "#0a0a02"
_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--paper", BLUE: "--blue", ORANGE: "--orange"}
DEAD = "#d55e00"
HALF = 420  # the width of a figure that takes one of two columns, and all of a telephone's screen

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "openk3", "figure.dpi": 72, "savefig.dpi": 72,
    "text.parse_math": False, "font.size": 11.5, "text.color": INK, "axes.labelcolor": MUTED, "axes.edgecolor": GRID,
    "axes.facecolor": "none", "axes.labelsize": 11.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": GRID, "grid.linewidth": 0.8, "axes.axisbelow": True,
    "xtick.color": GRID, "ytick.color": GRID, "xtick.labelcolor": MUTED, "ytick.labelcolor": MUTED,
    "xtick.labelsize": 11, "ytick.labelsize": 11, "ytick.major.size": 0, "xtick.minor.size": 0, "ytick.minor.size": 0,
    "lines.linewidth": 1.8, "lines.solid_capstyle": "round",
}  # fmt: skip


def style():
    """The context in which every function below must be called: matplotlib's settings for the page."""
    return matplotlib.rc_context(_STYLE)


def held_out(run: Run) -> str | None:
    """Held-out bits per byte against tokens trained on, with the line of xz -9e where it is known."""
    x, y = run.tokens("eval"), run.series("eval", "bits_per_byte")
    full = np.array([record.get("subset") == "full" for record in run.records["eval"]], dtype=bool)
    final = run.final or {}
    last_x = number(final.get("tokens")) if run.final else np.nan
    last_y = number(final.get("bits_per_byte"))
    xz = number(final.get("xz_bits_per_byte", run.train_section("corpus").get("xz_bits_per_byte")))
    seen = np.isfinite(x) & np.isfinite(y)
    x, y, full = x[seen], y[seen], full[seen]
    if not x.size and not np.isfinite(last_x * last_y):
        return None
    figure, axes = _frame(HALF, 256)
    line_x, line_y = x[~full], y[~full]
    if line_x.size:
        axes.plot(line_x, line_y, color=BLUE, marker="o", markersize=3.5 if line_x.size < 60 else 0)
    if full.any():
        axes.plot(x[full], y[full], color=BLUE, marker="D", markersize=6, linestyle="none" if line_x.size else "-")
    if np.isfinite(last_x * last_y):
        axes.plot([last_x], [last_y], color=BLUE, marker="D", markersize=7, markeredgecolor=PAPER)
    else:
        last_x, last_y = x[-1], y[-1]
    values = [*y, last_y]
    if np.isfinite(xz) and xz > 0:
        axes.axhline(xz, color=ORANGE, linestyle=(0, (5, 3)), linewidth=1.5)
        axes.annotate(f"xz -9e {xz:.3f}", (0, xz), (4, -4), xycoords=("axes fraction", "data"), textcoords="offset points",
                      ha="left", va="top", color=ORANGE)  # fmt: skip
        values.append(xz)
    axes.annotate(f"{last_y:.3f}", (last_x, last_y), (0, -9), textcoords="offset points", ha="right", va="top", color=BLUE,
                  fontweight="bold")  # fmt: skip
    _log_axis(axes.yaxis, np.array(values), below=0.16)
    _token_axis(axes)
    _title(axes, "bits per byte")
    return _svg(figure, "held-out", "Held-out bits per byte against tokens trained on")


def training_loss(run: Run) -> str | None:
    """Training loss in nats per token: each step faint, the running mean in front."""
    x, y = run.tokens("step"), run.series("step", "loss")
    figure, axes = _frame(HALF, 256)
    if not _noisy_line(axes, x, y):
        return None
    _log_axis(axes.yaxis, y)
    _token_axis(axes)
    _title(axes, "nats per token")
    return _svg(figure, "training-loss", "Training loss against tokens trained on")


def throughput(run: Run) -> str | None:
    """Tokens per second against the time spent training."""
    seconds, speed = run.series("step", "elapsed_s"), run.series("step", "tokens_per_s")
    longest = seconds[np.isfinite(seconds)].max(initial=0)
    unit, name = (3600, "hours") if longest > 3 * 3600 else (60, "minutes") if longest > 180 else (1, "seconds")
    figure, axes = _frame(HALF, 256)
    if not _noisy_line(axes, seconds / unit, speed):
        return None
    axes.set_ylim(0, speed[np.isfinite(speed)].max() * 1.06)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{name} of training")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: si(value)))
    _title(axes, "tokens per second")
    return _svg(figure, "throughput", "Tokens per second against training time")


def step_size(run: Run) -> str | None:
    """The learning rate above the gradient's norm."""
    x, rate, norm = run.tokens("step"), run.series("step", "lr"), run.series("step", "grad_norm")
    figure, bottom = _frame(HALF, 256, top=122)
    box = bottom.get_position()
    top = figure.add_axes((box.x0, 172 / 256, box.width, 58 / 256), sharex=bottom)
    seen = np.isfinite(x) & np.isfinite(rate)
    has_norm = _noisy_line(bottom, x, np.where(norm > 0, norm, np.nan), ORANGE)
    if not seen.any() and not has_norm:
        return None
    thin = slice(None, None, max(1, int(seen.sum()) // 400))
    top.plot(x[seen][thin], rate[seen][thin], color=BLUE, marker="o", markersize=3.5 if seen.sum() < 12 else 0)
    top.set_ylim(0, (rate[seen].max(initial=0) or 1) * 1.06)
    top.yaxis.set_major_locator(MaxNLocator(3))
    top.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1e}".replace("e-0", "e-").replace(".0e", "e") if value else "0"))
    _title(top, "learning rate")
    top.tick_params(labelbottom=False, bottom=False)
    if has_norm:
        _log_axis(bottom.yaxis, norm, most=5)
    _title(bottom, "gradient norm")
    _token_axis(bottom)
    return _svg(figure, "step-size", "Learning rate and gradient norm against tokens trained on")


def expert_load(run: Run, width: int) -> str | None:
    """Heat map, one row a mixture layer, its experts sorted by their last measured load; log scale around the fair share."""
    names, loads = last_loads(run)
    if not loads:
        return None
    grid = np.full((len(loads), max(load.size for load in loads)), np.nan)
    for row, load in enumerate(loads):
        grid[row, : load.size] = np.sort(np.maximum(load, 0))[::-1]
    reach = float(np.nanmax(np.abs(np.log2(grid[grid > 0])), initial=0))
    limit = next((step for step in (0.5, 1, 2, 3) if reach <= step), 3)
    colours = matplotlib.colormaps["cividis"].with_extremes(under=DEAD)
    rows = len(loads)
    height = min(rows * 26, 440)
    figure, axes = _frame(width, height + 80, right=44 if rows <= 40 else 4, top=22, bottom=58)
    with np.errstate(divide="ignore"):
        picture = np.where(grid > 0, np.clip(np.log2(grid), -limit, limit), -99)
    picture = np.ma.masked_where(np.isnan(grid), picture)
    image = axes.imshow(picture, cmap=colours, norm=Normalize(-limit, limit), aspect="auto", interpolation="none")
    _cell_axes(axes, names, rows)
    axes.set_xticks([])
    axes.annotate("busiest", (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", color=MUTED)
    axes.annotate("idlest", (1, 1), (-12, 8), xycoords="axes fraction", textcoords="offset points", ha="right", color=MUTED)
    if rows <= 40:
        beside = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "annotation_clip": False, "color": MUTED}
        axes.annotate("MaxVio", (1, -0.5), (44, 8), ha="right", **beside)
        for row, load in enumerate(loads):
            axes.annotate(f"{load.max() - 1:.2f}", (1, row), (44, 0), ha="right", va="center", **beside)
    span = min(360, width - 120) / width
    bar = figure.colorbar(image, cax=figure.add_axes((44 / width, 30 / (height + 80), span, 10 / (height + 80))), orientation="horizontal")
    bar.outline.set_visible(False)
    ticks = [-limit, -limit / 2, 0, limit / 2, limit]
    bar.set_ticks(ticks, labels=["fair share" if tick == 0 else f"×{2**tick:.2g}" for tick in ticks])
    bar.ax.tick_params(length=0)
    return _svg(figure, f"experts-{width}", "Load of every expert in units of its fair share, one row a layer")


def max_vio(run: Run) -> str | None:
    """How far the busiest expert stands above its fair share, over time, with the floor that sampling noise sets."""
    figure, axes = _frame(HALF, 256)
    x, y = run.tokens("step"), run.series("step", "max_vio")
    stepwise = np.where(y > 0, y, np.nan)
    drawn = [stepwise[np.isfinite(stepwise)]]
    balances = run.records["balance"]
    layers = [numbers(record.get("max_vio")) for record in balances]
    if any(layer.size for layer in layers):
        _raw_line(axes, x, stepwise, BLUE)
        count = max(layer.size for layer in layers)
        table = np.array([np.pad(layer, (0, count - layer.size), constant_values=np.nan) for layer in layers])
        table[~(table > 0)] = np.nan
        at = run.tokens("balance")
        for layer in table.T[:64]:
            axes.plot(at, layer, color=MUTED, linewidth=0.8, alpha=0.4)
        worst = np.max(table, axis=1, where=np.isfinite(table), initial=-np.inf)
        worst[~np.isfinite(worst)] = np.nan
        axes.plot(at, worst, color=BLUE, marker="o", markersize=3.5 if len(at) < 40 else 0)
        drawn.append(table[np.isfinite(table)])
    else:
        _noisy_line(axes, x, stepwise)
    values = np.concatenate(drawn)
    if not values.size:
        return None
    share, experts = number(run.last("balance").get("q")), max((load.size for load in last_loads(run)[1]), default=0)
    if share > 0 and experts > 1:
        floor = float(np.sqrt(2 * np.log(experts) / share))
        axes.axhline(floor, color=ORANGE, linestyle=(0, (1.5, 2.5)), linewidth=1.5)
        axes.annotate("sampling noise", (1, floor), (-2, -4), xycoords=("axes fraction", "data"), textcoords="offset points",
                      ha="right", va="top", color=ORANGE)  # fmt: skip
        values = np.append(values, floor)
    _log_axis(axes.yaxis, values, below=0.14)
    _token_axis(axes)
    _title(axes, "MaxVio: busiest load / fair share − 1")
    return _svg(figure, "max-vio", "MaxVio against tokens trained on")


def min_load(run: Run) -> str | None:
    """The idlest expert's load in units of its fair share, over time."""
    figure, axes = _frame(HALF, 256)
    x, y = run.tokens("step"), run.series("step", "min_load")
    if not _noisy_line(axes, x, y):
        return None
    axes.axhline(1, color=ORANGE, linestyle=(0, (1.5, 2.5)), linewidth=1.5)
    axes.set_ylim(-0.02, max(1.06, float(np.nanmax(y[np.isfinite(y)])) * 1.04))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    _token_axis(axes)
    _title(axes, "idlest load / fair share")
    return _svg(figure, "min-load", "Load of the idlest expert against tokens trained on")


def depth_weights(run: Run) -> str | None:
    """Heat map of Attention Residuals: one row a mixing site in depth order, one column a source, its mean softmax weight."""
    sites = []
    for record in reversed(run.records["probe"]):
        sites = [_depth_site(entry) for entry in items(record.get("attn_res")) if isinstance(entry, dict)]
        if any(weights for _, weights in sites):
            break
    sources = sorted({source for _, weights in sites for source in weights}, key=_source_order)
    if not sources:
        return None
    grid = np.array([[weights.get(source, np.nan) for source in sources] for _, weights in sites])
    rows, columns = grid.shape
    names = [_short(site, 14) for site, _ in sites]
    figure, axes = _frame(HALF, min(max(rows * 23, 60), 780) + 26, left=12 + 7 * max(map(len, names)), right=2, bottom=2)
    axes.imshow(np.ma.masked_invalid(grid), cmap="cividis", norm=Normalize(0, 1), aspect="auto", interpolation="none")
    _cell_axes(axes, names, rows)
    short = columns > 6  # then "block 3" becomes "3"
    axes.set_xticks(range(columns), [_short(s.replace("block ", "") if short else s, 7 if short else 10) for s in sources])
    axes.xaxis.tick_top()
    axes.tick_params(axis="x", length=0)
    for edge in range(1, columns):
        axes.axvline(edge - 0.5, color=PAPER, linewidth=1.5)
    if rows <= 34 and columns <= 10:
        for row, column in itertools.product(range(rows), range(columns)):
            if np.isfinite(grid[row, column]):
                axes.text(column, row, f"{grid[row, column]:.2f}"[-3:] if grid[row, column] < 0.995 else "1", ha="center", va="center",
                          fontsize=10.5, color="#11161d" if grid[row, column] > 0.52 else "#f3f1e8")  # fmt: skip
    return _svg(figure, "depth", "Depth weights: share of each source at each mixing site")


def _depth_site(entry: dict) -> tuple[str, dict[str, float]]:
    weights, sources = numbers(entry.get("weights")), entry.get("sources")
    if not isinstance(sources, list) or len(sources) != len(weights):
        sources = range(len(weights))
    return str(entry.get("site")), {str(source): float(weight) for source, weight in zip(sources, weights, strict=True)}


def _source_order(source: str) -> tuple[int, int, str]:
    digits = re.search(r"\d{1,6}", source)
    return (0 if source.startswith("emb") else 2 if source.startswith("partial") else 1, int(digits[0]) if digits else 0, source)


def half_lives(run: Run) -> list[tuple[str, np.ndarray]]:
    """Per KDA layer of the last probe: its name and the sorted 1, 5, 25, 50, 75, 95, 99 % quantiles of the half-life in tokens."""
    for record in reversed(run.records["probe"]):
        out = []
        for entry in items(record.get("decay")):
            entry = entry if isinstance(entry, dict) else {}
            lives = numbers(entry.get("half_life"))
            if lives.size != 7 or np.isnan(lives).any():
                alpha = np.clip(numbers(entry.get("quantiles")), 0, 1)
                with np.errstate(divide="ignore"):
                    lives = np.log(2) / np.maximum(-np.log(alpha), 0)
            if lives.size == 7 and not np.isnan(lives).any():
                out.append((f"L{entry.get('layer')}", np.sort(lives)))
        if out:
            return out
    return []


def decay(run: Run) -> str | None:
    """Per KDA layer, how long its channels remember: quantiles of the half-life on a logarithmic axis."""
    layers = half_lives(run)
    if not layers:
        return None
    options = run.train_section("options")
    context = next((number(options[key]) for key in ("seq_len", "context", "context_length") if number(options.get(key)) > 0), np.nan)
    every = np.concatenate([lives for _, lives in layers] + [np.array([1.0, context])])
    ends = np.clip(every[np.isfinite(every) & (every > 0)], 1e-2, 1e9)
    low, high = ends.min(), ends.max() * (3 if np.isinf(every).any() else 1)  # what never fades ends beyond all that does
    rows = len(layers)
    names = [_short(name, 6) for name, _ in layers]
    figure, axes = _frame(HALF, min(max(rows * 30, 60), 780) + 68)
    wide = min(10.0, 220 / rows)
    for row, (_, lives) in enumerate(layers):
        p1, p5, p25, p50, p75, p95, p99 = np.clip(lives, low, high)
        axes.plot([p1, p99], [row, row], color=BLUE, linewidth=1.2, alpha=0.6)
        axes.plot([p5, p95], [row, row], color=BLUE, linewidth=wide * 0.4, alpha=0.55, solid_capstyle="butt")
        axes.plot([p25, p75], [row, row], color=BLUE, linewidth=wide, solid_capstyle="butt")
        axes.plot([p50], [row], color=PAPER, marker="o", markersize=min(6, wide * 0.7), linestyle="none", markeredgewidth=0)
    _log_axis(axes.xaxis, np.array([low, high]), below=0.06, above=0.06)
    if context <= 1e9:
        axes.axvline(context, color=ORANGE, linestyle=(0, (5, 3)), linewidth=1.5)
        axes.annotate("training context", (context, 1), (-4, 1), xycoords=("data", "axes fraction"), textcoords="offset points",
                      ha="right", va="bottom", color=ORANGE)  # fmt: skip
    _cell_axes(axes, names, rows, gaps=False)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.grid(True, axis="x")
    axes.grid(False, axis="y")
    axes.set_xlabel("half-life, tokens")
    return _svg(figure, "decay", "Half-life of the memory channels of each KDA layer")


def si(value: float) -> str:
    """A short decimal: 950, 12k, 3.4M, 2.8B (billion), 1.2T."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.3g}"


def rolling_mean(y: np.ndarray, window: int) -> np.ndarray:
    """Centred mean over `window` values (odd), narrower at both ends; NaN values are left out."""
    if not len(y):
        return y
    kernel = np.ones(max(1, min(window, len(y) - 1 + len(y) % 2)))
    seen = np.isfinite(y)
    total, count = (np.convolve(v, kernel, "same") for v in (np.where(seen, y, 0.0), seen.astype(float)))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(count > 0.5, total / count, np.nan)


def envelope(x: np.ndarray, y: np.ndarray, bins: int = 300) -> tuple[np.ndarray, np.ndarray]:
    """At most 2 * bins points that keep the extremes of every stretch, so that no spike is lost where a run is long."""
    if len(y) <= 2 * bins:
        return x, y
    keep = []
    for part in np.array_split(np.arange(len(y)), bins):
        keep.extend(sorted({part[np.argmin(y[part])], part[np.argmax(y[part])]}))
    return x[keep], y[keep]


def _frame(width: int, height: int, left: int = 44, right: int = 14, top: int = 26, bottom: int = 42) -> tuple[Figure, Axes]:
    """A figure and its axes with margins in pixels: fixed ones, so that figures above each other line up, and quick to draw."""
    figure = Figure(figsize=(width / 72, height / 72))
    box = (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
    return figure, figure.add_axes(box)


def _title(axes: Axes, text: str) -> None:
    """The unit of an axis, over its numbers, at the left edge of the figure."""
    figure = axes.figure
    assert isinstance(figure, Figure)  # `_frame` made it
    top = axes.get_position().y1 + 12 / (figure.get_figheight() * 72)
    figure.text(0, top, text, color=MUTED, ha="left", va="baseline")


def _raw_line(axes: Axes, x: np.ndarray, y: np.ndarray, colour: str) -> None:
    seen = np.isfinite(x) & np.isfinite(y)
    if seen.any():
        axes.plot(*envelope(x[seen], y[seen]), color=colour, linewidth=0.9, alpha=0.32)


def _noisy_line(axes: Axes, x: np.ndarray, y: np.ndarray, colour: str = BLUE) -> bool:
    """Every value faint and the running mean in front of it; few values get a mark each. False where there is nothing to draw."""
    seen = np.isfinite(x) & np.isfinite(y)
    x, y = x[seen], y[seen]
    if len(y) < 24:
        axes.plot(x, y, color=colour, marker="o", markersize=4)
        return len(y) > 0
    _raw_line(axes, x, y, colour)
    smooth = rolling_mean(y, 2 * (len(y) // 80) + 3)
    thin = slice(None, None, max(1, len(y) // 500))
    axes.plot(x[thin], smooth[thin], color=colour)
    return True


def _token_axis(axes: Axes) -> None:
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: si(value)))
    axes.set_xlabel("tokens")


def _cell_axes(axes: Axes, names: list[str], rows: int, gaps: bool = True) -> None:
    """One labelled row a name (every n-th where there are many), no frame, and the page showing between rows."""
    every = max(1, -(-rows // 40))
    axes.set_yticks(range(0, rows, every), [_short(name, 14) for name in names[::every]])
    axes.tick_params(axis="y", length=0)
    axes.grid(False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if gaps and rows <= 64:
        for edge in range(1, rows):
            axes.axhline(edge - 0.5, color=PAPER, linewidth=1.5)


def _log_axis(axis, values: np.ndarray, below: float = 0.03, above: float = 0.03, most: int = 8) -> None:
    """A logarithmic axis with a few round ticks (at most `most`); `below` and `above` are margins in parts of the values' range."""
    values = np.log10(values[np.isfinite(values) & (values > 0)])
    if not values.size:
        return
    span = max(np.ptp(values), 0.02)
    low, high = 10 ** (values.min() - below * span), 10 ** (values.max() + above * span)
    (axis.axes.set_yscale if axis.axis_name == "y" else axis.axes.set_xscale)("log")
    (axis.axes.set_ylim if axis.axis_name == "y" else axis.axes.set_xlim)(low, high)
    decades = np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 6, 8), np.arange(1, 10, 0.5), np.arange(1, 10, 0.1), np.arange(1, 10, 0.02)):
        ticks = [digit * 10**decade for decade in decades for digit in digits if low <= digit * 10**decade <= high]
        if len(ticks) >= most // 2:
            break
    ticks = ticks[:: -(-len(ticks) // most)] if ticks else [low, high]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: si(value) if value >= 1000 else f"{value:.4g}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _short(value: object, length: int) -> str:
    text = "".join(c if c.isprintable() else "·" for c in str(value))
    return text if len(text) <= length else text[: length - 1] + "…"


def _svg(figure: Figure, name: str, label: str) -> str:
    """The figure as an `<svg>` to stand inside HTML: no fixed size, no names of fonts, the page's colours, ids that begin with `name`."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    view = re.search(r'viewBox="[^"]*"', text)
    assert view is not None  # matplotlib always writes one
    text = re.sub(r"<svg[^>]*>", f'<svg {view[0]} role="img" aria-label="{label}">', text, count=1)
    text = re.sub(r"font-family: [^;\"]*;? ?", "", text)
    text = text.replace("xlink:href=", "href=")
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r"#[0-9a-f]{6}\b", lambda m: f"var({_VARIABLES[m[0]]})" if m[0] in _VARIABLES else m[0], text)
    return re.sub(r"\s*\n\s*", "\n", text)
