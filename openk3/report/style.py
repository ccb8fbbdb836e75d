"""The report's style sheet: a column of type, figures two by two, light or dark as the reader's system is."""

CSS = """
:root {
  color-scheme: light dark;
  --paper: #fcfbf8; --panel: #f3f1eb; --ink: #1d1c1a; --muted: #6a675f; --grid: #dedad0;
  --blue: #0072b2; --orange: #b84e00; --sky: #56b4e9; --good: #00704f; --bad: #a83c00;
  --serif: "Iowan Old Style", Charter, "Bitstream Charter", "Palatino Linotype", Palatino, Georgia, "Liberation Serif", serif;
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", Arial, sans-serif;
  --mono: ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "Liberation Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #16171a; --panel: #1f2125; --ink: #e9e6df; --muted: #9c988e; --grid: #34363b;
    --blue: #56b4e9; --orange: #f0a03c; --sky: #2f78a8; --good: #4cc9a0; --bad: #f08a5a;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.55 var(--sans); }
main { max-width: 1120px; margin: 0 auto; padding: 56px 32px 72px; }
h1, h2, .claim { font-family: var(--serif); font-weight: 600; letter-spacing: -0.012em; text-wrap: balance; }
h1 { font-size: clamp(2rem, 5vw, 3rem); line-height: 1.1; margin: 0 0 10px; overflow-wrap: anywhere; }
h2 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 20px; padding-top: 20px; border-top: 2px solid var(--ink); }
h3 { font-size: 1rem; font-weight: 650; margin: 0 0 8px; }
section { margin-top: 64px; scroll-margin-top: 16px; }
code, pre { font-family: var(--mono); font-size: 0.88em; }
.kicker { margin: 0 0 12px; color: var(--muted); font-size: 0.9rem; }
.outline { margin: 0 0 16px; color: var(--muted); max-width: 80ch; }

.strip { margin: 0 0 36px; }
.strip .cells { display: flex; gap: 2px; }
.strip .cells i { display: grid; gap: 2px; flex: 1 1 0; min-width: 0; max-width: 34px; }
.strip .cells i.gap { margin-left: 7px; }
.strip s { display: block; height: 9px; border-radius: 1.5px; text-decoration: none; }
.strip p { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 8px 0 0; color: var(--muted); font-size: 0.82rem; }
.strip p span { display: inline-flex; align-items: center; gap: 6px; }
.strip p s { width: 14px; }
s.KDA { background: var(--sky); } s.MLA, s.attention { background: var(--blue); }
s.dense { background: var(--muted); } s.experts { background: repeating-linear-gradient(90deg, var(--muted) 0 3px, transparent 3px 5px); }

.verdict { background: var(--panel); border-radius: 6px; padding: 28px 32px 22px; }
.claim { font-size: clamp(1.4rem, 3.2vw, 2rem); line-height: 1.25; margin: 0; max-width: 30em; font-weight: 500; }
.claim b { font-weight: 700; font-variant-numeric: tabular-nums; color: var(--blue); }
.claim code { font-size: 0.86em; color: var(--orange); white-space: nowrap; }
.bars { margin: 22px 0 4px; display: grid; gap: 8px; }
.bar { display: grid; grid-template-columns: 6.2em minmax(0, 1fr) 3.6em; align-items: center; gap: 12px; font-size: 0.92rem; }
.bar i { height: 14px; border-radius: 2px; } .bar i.model { background: var(--blue); } .bar i.xz { background: var(--orange); }
.bar b { font-variant-numeric: tabular-nums; font-weight: 600; }
.digest { margin: 16px 0 0; font-size: 0.92rem; overflow-wrap: anywhere; }
.digest code { color: var(--muted); }
.note { margin: 6px 0 0; color: var(--muted); font-size: 0.88rem; max-width: 82ch; } .note:empty { display: none; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 26px 28px; margin: 32px 0 0; }
.tiles dt { color: var(--muted); font-size: 0.85rem; }
.tiles dd { margin: 0; }
.tiles b { display: block; font-size: 1.6rem; line-height: 1.3; font-weight: 600; letter-spacing: -0.01em; }
.tiles span { color: var(--muted); font-size: 0.85rem; line-height: 1.35; display: block; }
nav { display: flex; flex-wrap: wrap; gap: 4px 22px; margin-top: 40px; font-size: 0.92rem; }
nav a { color: var(--blue); text-decoration-thickness: 1px; text-underline-offset: 3px; }

.grid { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 330px), 1fr)); gap: 44px 48px; align-items: start; }
figure { margin: 0 0 40px; min-width: 0; }
.grid figure { margin: 0; max-width: 600px; }
figure svg { display: block; width: 100%; height: auto; font-family: var(--sans); overflow: visible; stroke-linejoin: round; }
figure svg text { font-variant-numeric: tabular-nums; }
figcaption { margin-top: 10px; color: var(--muted); font-size: 0.9rem; line-height: 1.5; max-width: 74ch; }
.narrow { display: none; }
i.dead { display: inline-block; width: 0.8em; height: 0.8em; background: #d55e00; border-radius: 1px; }

.badge { display: inline-block; margin-left: 6px; padding: 0 8px; border: 1px solid; border-radius: 999px; font-size: 0.8rem; }
.badge.good { color: var(--good); } .badge.bad { color: var(--bad); } .badge.busy { color: var(--orange); }
.sample { margin: 0 0 26px; }
.sample p { margin: 0 0 6px; font-size: 0.88rem; color: var(--muted); }
.sample pre { margin: 0; padding: 16px 18px; background: var(--panel); border-radius: 6px; white-space: pre-wrap; overflow-wrap: anywhere;
  max-height: 30em; overflow: auto; line-height: 1.5; tab-size: 4; }
.sample .prompt { color: var(--muted); }
.sample em { display: block; color: var(--muted); font-family: var(--sans); }
details { margin-top: 28px; } summary { cursor: pointer; font-weight: 600; margin-bottom: 16px; color: var(--blue); }

.parts { columns: 2 400px; column-gap: 48px; }
.part { break-inside: avoid; margin-bottom: 36px; }
#options { break-inside: auto; }
.table { overflow-x: auto; }
table { border-collapse: collapse; table-layout: fixed; width: 100%; font-size: 0.88rem; }
th, td { text-align: left; vertical-align: top; padding: 5px 16px 5px 0; border-bottom: 1px solid var(--grid); overflow-wrap: break-word; }
tr { break-inside: avoid; }
th { font-weight: 400; color: var(--muted); } th:first-child { width: 34%; } thead th { font-size: 0.82rem; vertical-align: bottom; }
td { font-variant-numeric: tabular-nums; } .none { color: var(--muted); }
footer { margin-top: 72px; padding-top: 14px; border-top: 1px solid var(--grid); color: var(--muted); font-size: 0.85rem; }
footer p { margin: 0 0 4px; overflow-wrap: anywhere; }

@media (max-width: 640px) {
  main { padding: 28px 18px 48px; }
  .verdict { padding: 22px 18px 18px; margin: 0 -6px; }
  .tiles { grid-template-columns: 1fr 1fr; gap: 20px 18px; } .tiles b { font-size: 1.4rem; }
  .wide { display: none; } .narrow { display: block; }
  .strip .cells { gap: 1px; } .strip .cells i.gap { margin-left: 3px; }
  .bar { grid-template-columns: 5.4em minmax(0, 1fr) 3em; gap: 8px; }
  .sample pre { padding: 12px; font-size: 0.8rem; }
}
@media print {
  body { font-size: 11pt; } main { padding: 0; } nav { display: none; }
  figure, .sample, .verdict { break-inside: avoid; } .sample pre { max-height: none; }
}
"""
