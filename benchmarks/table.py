"""The table: each figure of each server, and Hocket against the best peer in rounds taken in turn."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.works import Figure, Sample, Work

Samples = Mapping[tuple[str, str], list[Sample]]  # (work's name, server's name) -> one for each round; absent: it took no part


@dataclass(slots=True, frozen=True)
class Ratio:
    """Hocket / peer, of the rounds they took in turn."""

    peer: str
    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.least:.2f} to {self.most:.2f})"


def table(samples: Samples, works: list[Work], names: list[str]) -> str:
    """Markdown, a line for each figure; `names` begins with the server that the others are peers of."""
    header = ["work", *names] + (["best peer", f"{names[0]} against it"] if len(names) > 1 else [])
    lines = [header, ["---"] * len(header)]
    for work in works:
        for figure in work.figures:
            values = {name: _values(figure, samples.get((work.name, name), [])) for name in names}
            line = [figure.title, *(_cell(figure, values[name]) for name in names)]
            if len(names) > 1:
                ratio = best(figure, values, names)
                line += [ratio.peer, str(ratio)] if ratio else ["", ""]
            lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def best(figure: Figure, values: Mapping[str, list[float]], names: list[str]) -> Ratio | None:
    """Against the peer with the best median. None: no peer has this figure, or the first of the names has not."""
    own, *peers = names
    known = [name for name in peers if values[name]]
    if not known or not values[own]:
        return None
    sign = 1 if figure.more_is_better else -1
    peer = max(known, key=lambda name: sign * statistics.median(values[name]))
    ratios = [mine / theirs for mine, theirs in zip(values[own], values[peer], strict=True)]
    return Ratio(peer, statistics.median(ratios), min(ratios), max(ratios))


def _values(figure: Figure, samples: list[Sample]) -> list[float]:
    """One for each round; empty if the figure is not to be had."""
    values = [figure.read(sample) for sample in samples]
    return [value for value in values if value is not None] if None not in values else []


def _cell(figure: Figure, values: list[float]) -> str:
    if not values:
        return ""
    least, middle, most = (figure.show(value) for value in (min(values), statistics.median(values), max(values)))
    return middle if least == most else f"{middle} ({least} to {most})"
