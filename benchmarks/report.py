"""Tables and a chart from the JSON that benchmark.py writes.

python benchmarks/report.py results/h200-bars.json --markdown results/h200-bars.md --chart results/h200-bars.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from cases import CEILINGS, CUDNN, FLASH, OURS, bar_of, better, load_bars

TITLES = {
    "fwd": "Forward, bf16",
    "fp8": "Forward, FP8 (e4m3) inputs, bf16 output; FLASH and CUDNN with bf16 inputs",
    "bwd": "Backward, bf16, without its forward",
    "varlen": "Forward of a packed batch, bf16, 24 sequences of 55 to 1,311 tokens",
    "feature": "Forward with a window, a softcap or sinks, bf16",
    "decode": "Decoding with a KV cache, bf16, 32 query and 8 KV heads, head dim 128",
    "append": "The same, with one new row appended and rotated first",
    "host": "Host time of a call",
}
WIDTHS = (25, 8, 8, 11, 9, 9, 13, 8, 11)
HEADER = ("case", FLASH, CUDNN, OURS, f"/ {FLASH}", f"/ {CUDNN}", "bar", "/ bar", "of ceiling")


def measures(row: dict[str, Any], ceilings: dict[str, float], bars: dict[str, Any]) -> dict[str, float | None]:
    """Ratios of our figure: to torch's backends, to the bar, and to the ceiling; above 1 is better."""
    unit, figures = row["unit"], row["figures"]
    ours = figures.get(OURS)
    to_flash, to_cudnn = (better(unit, ours, figures.get(p)) for p in (FLASH, CUDNN))
    bar = bar_of(row["name"], bars)
    to_bar = better(unit, ours, bar.figure)
    if bar.ratio is not None and to_flash is not None:
        to_bar = to_flash / bar.ratio
    ceiling = ceilings.get(CEILINGS.get(row["group"], ""))
    share = ours / ceiling if ours is not None and ceiling else None
    return {"flash": to_flash, "cudnn": to_cudnn, "bar": to_bar, "ceiling": share}


def cells(row: dict[str, Any], ceilings: dict[str, float], bars: dict[str, Any]) -> list[str]:
    """A row of the table, in the order of HEADER."""
    digits = 1 if row["unit"] == "us" else 0
    found = measures(row, ceilings, bars)
    bar = bar_of(row["name"], bars)
    named = "-"
    if bar.figure is not None:
        named = f"{bar.figure:,.0f}"
    elif bar.ratio is not None:
        named = f"{bar.ratio:.1f} x {FLASH}"

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:,.{digits}f}"

    figures = [number(row["figures"].get(provider), digits) for provider in (FLASH, CUDNN, OURS)]
    share = "-" if found["ceiling"] is None else f"{100 * found['ceiling']:.0f} %"
    ratios = [number(found[name], 2) for name in ("flash", "cudnn")]
    return [row["name"], *figures, *ratios, named, number(found["bar"], 2), share]


def groups(result: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        found.setdefault(row["group"], []).append(row)
    return {group: found[group] for group in TITLES if group in found}


def line(found: Sequence[str]) -> str:
    """A row in columns, for a terminal."""
    first, *rest = zip(found, WIDTHS, strict=True)
    return first[0].ljust(first[1]) + "".join(cell.rjust(width) for cell, width in rest)


def conditions(result: dict[str, Any]) -> str:
    """Under which the figures were taken, as one paragraph."""
    e, ceilings = result["environment"], result["ceilings"]
    states = [e.get("before"), e.get("after")]
    clocks = " and ".join(f"SM {s['sm_mhz']} MHz, memory {s['memory_mhz']} MHz, {s['celsius']} °C" for s in states if s)
    limits = ", ".join(
        f"{name} {value:,.0f} {'GB/s' if name == 'copy' else 'TFLOP/s'}" for name, value in ceilings.items()
    )
    return (
        f"{e['date']}: one {e['gpu']} ({e['multiprocessors']} SMs, driver {e['driver'] or 'unknown'}), torch "
        f"{e['torch']}, cuDNN {e['cudnn']}, flash_attn {e['flash_attn']} at {e['commit'] or 'no known commit'}, "
        f"kernels by {e['compiler']}. Before and after: {clocks or 'clocks unknown'}. Ceilings in this run: {limits}."
    )


def failing(result: dict[str, Any], bars: dict[str, Any]) -> list[str]:
    """The names of the cases that have a bar and do not reach it."""
    below = []
    for row in result["rows"]:
        ratio = measures(row, result["ceilings"], bars)["bar"]
        if ratio is not None and ratio < 1.0:
            below.append(row["name"])
    return below


def markdown(result: dict[str, Any], bars: dict[str, Any]) -> str:
    """The whole page."""
    lines = [
        f"# {result['environment']['gpu']}, {result['environment']['date'][:10]}",
        "",
        "Written by `python benchmarks/report.py` from the JSON beside it. Medians of interleaved calls in one",
        "process; TFLOP/s with causal counted half and a backward as 2.5 forwards, GB/s of keys and values, host time",
        "in microseconds; 16,384 tokens and heads times head dim = 2,048 unless it says otherwise.",
        f"{FLASH} and {CUDNN} are torch's backends in the same run. A ratio above 1 is better.",
        "",
        conditions(result),
    ]
    for group, rows in groups(result).items():
        lines += [
            "",
            f"## {TITLES[group]} ({rows[0]['unit']})",
            "",
            f"| {' | '.join(HEADER)} |",
            "| --- " * len(HEADER) + "|",
        ]
        lines += [f"| {' | '.join(cells(row, result['ceilings'], bars))} |" for row in rows]
        refused = {(p, why) for row in rows for p, why in row["refusals"].items()}
        lines += [f"\n{provider} refuses some of these: {why}" for provider, why in sorted(refused)]
    below = failing(result, bars)
    lines += ["", f"Below their bars: {', '.join(below) if below else 'none'}.", ""]
    return "\n".join(lines)


# -- the chart: written by hand, so that it needs no package, and a new run changes few of its lines -------------------

COLOURS = {FLASH: "#9aa5b1", CUDNN: "#5b8fd9", OURS: "#d9762b"}
PANEL_HEIGHT, BAR_WIDTH, LEFT, TOP = 150, 9, 60, 40


def chart(result: dict[str, Any], bars: dict[str, Any]) -> str:
    """An SVG with a panel for each group: bars for the three, and a line across ours where its bar is."""
    panels = groups(result)
    width = LEFT + 20 + max(len(rows) for rows in panels.values()) * (3 * BAR_WIDTH + 8)
    height = TOP + len(panels) * (PANEL_HEIGHT + 110)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="10">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for i, provider in enumerate((FLASH, CUDNN, OURS)):
        parts.append(f'<rect x="{LEFT + 110 * i}" y="10" width="10" height="10" fill="{COLOURS[provider]}"/>')
        name = provider if provider == OURS else f"torch {provider}"
        parts.append(f'<text x="{LEFT + 110 * i + 14}" y="19">{name}</text>')
    top = TOP
    for group, rows in panels.items():
        parts += _panel(group, rows, bars, top)
        top += PANEL_HEIGHT + 110
    return "\n".join([*parts, "</svg>", ""])


def _panel(group: str, rows: list[dict[str, Any]], bars: dict[str, Any], top: int) -> list[str]:
    known = [bar_of(row["name"], bars).figure or 0.0 for row in rows]
    known += [value for row in rows for value in row["figures"].values() if value]
    highest, base = max([1.0, *known]), top + 18 + PANEL_HEIGHT
    parts = [f'<text x="{LEFT}" y="{top + 8}" font-size="12">{escape(TITLES[group])}: {rows[0]["unit"]}</text>']
    for part in (0.0, 0.5, 1.0):
        y = base - part * PANEL_HEIGHT
        end = LEFT + len(rows) * (3 * BAR_WIDTH + 8)
        parts.append(f'<line x1="{LEFT}" x2="{end}" y1="{y:.0f}" y2="{y:.0f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 3:.0f}" text-anchor="end">{part * highest:,.0f}</text>')
    for index, row in enumerate(rows):
        left = LEFT + 4 + index * (3 * BAR_WIDTH + 8)
        for place, provider in enumerate((FLASH, CUDNN, OURS)):
            value = row["figures"].get(provider)
            if value:
                tall = value / highest * PANEL_HEIGHT
                x = left + place * BAR_WIDTH
                parts.append(
                    f'<rect x="{x}" y="{base - tall:.1f}" width="{BAR_WIDTH - 1}" height="{tall:.1f}" '
                    f'fill="{COLOURS[provider]}"><title>{row["name"]} {provider} {value:,.0f}</title></rect>'
                )
        bar = bar_of(row["name"], bars).figure
        if bar:
            y, x = base - bar / highest * PANEL_HEIGHT, left + 2 * BAR_WIDTH - 2
            parts.append(f'<line x1="{x}" x2="{x + BAR_WIDTH + 3}" y1="{y:.1f}" y2="{y:.1f}" stroke="#000000"/>')
        x, label = left + 14, row["name"].partition("-")[2]
        parts.append(f'<text x="{x}" y="{base + 8}" transform="rotate(60 {x} {base + 8})">{label}</text>')
    return parts


def main(argv: list[str] | None = None) -> int:
    """Print the tables, or write what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("result", type=Path, metavar="JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="write the chart, an SVG")
    options = parser.parse_args(argv)
    result, bars = json.loads(options.result.read_text(encoding="utf-8")), load_bars()
    for path, make in ((options.markdown, markdown), (options.chart, chart)):
        if path is not None:
            path.write_text(make(result, bars), encoding="utf-8")
    if options.markdown is None and options.chart is None:
        print(conditions(result))
        for group, rows in groups(result).items():
            print(f"\n{TITLES[group]} ({rows[0]['unit']})\n{line(HEADER)}")
            print("\n".join(line(cells(row, result["ceilings"], bars)) for row in rows))
        print(f"\nbelow their bars: {' '.join(failing(result, bars)) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
