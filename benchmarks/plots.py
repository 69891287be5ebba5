"""Drawing what benchmarks measured, as SVG that reads well on light and dark pages. Knows no servers."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

if TYPE_CHECKING:
    from benchmarks.sweep import Figures, Knob, Samples

INK, SPEED, WAIT, LATE = "#7d8590", "#2f81f7", "#3fb950", "#d29922"  # legible on white and on near black
_STYLE = {
    "svg.hashsalt": "hocket",  # the same figures give the same file
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def sweep(samples: Samples, path: Path) -> None:
    """A column of two panels for each parameter: throughput above, time to the first token below; dots are medians, bars the range."""
    knobs = list(dict.fromkeys(knob for knob, _ in samples))
    with matplotlib.rc_context(_STYLE):
        figure, axes = pyplot.subplots(2, len(knobs), figsize=(2.4 * len(knobs), 4.4), squeeze=False, sharey="row")
        for column, knob in enumerate(knobs):
            taken = [samples[knob, value] for value in knob.values]
            _line(axes[0][column], knob, taken, SPEED, "throughput")
            _line(axes[1][column], knob, taken, WAIT, "first")
            _line(axes[1][column], knob, taken, LATE, "late")
            axes[0][column].set_title(f"--{knob.flag}", fontsize=9)
            axes[0][column].set_ylim(bottom=0)
            axes[1][column].set_ylim(bottom=0)
        axes[0][0].set_ylabel("tokens/s")
        axes[1][0].set_ylabel("seconds to the first token")
        axes[1][0].legend(("p50", "p95"), frameon=False, labelcolor=INK)
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close(figure)


def _line(axis: pyplot.Axes, knob: Knob, taken: list[list[Figures]], colour: str, name: str) -> None:
    values = [[getattr(figures, name) for figures in each] for each in taken]
    middles = [statistics.median(each) for each in values]
    below = [middle - min(each) for middle, each in zip(middles, values, strict=True)]
    above = [max(each) - middle for middle, each in zip(middles, values, strict=True)]
    axis.errorbar(range(len(middles)), middles, (below, above), color=colour, marker="o", markersize=4, capsize=2, linewidth=1.2)
    axis.set_xticks(range(len(middles)), [f"{value}*" if value == knob.default else value for value in knob.values])
