"""``report.html``: report of a run in one file that needs no network, for all screen sizes.

Everything is read from the run directory, so the report can be built while the run continues, after
it failed, and on another machine.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

from analysis.report import parts, rewards, sections
from analysis.report.agreement import agreement
from analysis.report.data import RunData, finite_or_none, read_run
from analysis.report.events import events_section
from analysis.report.extremes import OPEN, kept_iterations, kept_iterations_note
from analysis.report.gallery import gallery
from analysis.report.headline import headline
from analysis.report.live import Live, program, program_hash
from analysis.report.parts import Cell, Table
from records.atomic import write_text

FILE = "report.html"


def build_report(run_dir: Path, live_s: float | None = None) -> Path:
    """Write ``report.html`` into ``run_dir``, replacing an older one, and return its path.

    If ``live_s`` is given, a driver is running there and writes the report again after about that
    many seconds.

    Raises:
        FileNotFoundError: ``run_dir`` is not a run directory.
        OSError: the file cannot be written.
    """
    target = Path(run_dir) / FILE
    run = read_run(target.parent)
    live = Live(time.time(), live_s) if live_s and run.state == "open" else None
    write_text(target, render(run, live))
    return target


def render(run: RunData, live: Live | None = None) -> str:
    """Return the page as text; with ``live`` it reloads itself."""
    extremes = kept_iterations(run)
    particulars = (_quantized(run), _versions(run))
    configuration = json.dumps(run.config, indent=2, ensure_ascii=False, default=str)
    return parts.render(
        "report.html",
        name=run.name,
        what="run report",
        top=headline(run, live),
        live=live,
        program=program(),
        program_hash=program_hash(),
        extremes=extremes[:OPEN],
        earlier=extremes[OPEN:],
        extremes_note=kept_iterations_note(run, extremes),
        images=gallery(run),
        images_before_only=len(run.images.steps) == 1,
        sections=[
            rewards.section(run),
            sections.exploration(run),
            agreement(run),
            sections.time_spent(run),
            sections.health(run),
        ],
        happened=events_section(run),
        numbers=sections.numbers(run),
        configuration=configuration if run.config else "",
        particulars=[table for table in particulars if table],
    )


def _versions(run: RunData) -> Table | None:
    """Return the versions of packages and the digests of prompt files; None if none are known."""
    known = {str(name): str(version) for name, version in run.versions.items()}
    known |= {f"prompts.{key}": f"xxh3 {digest}" for key, digest in run.prompts.items()}
    if not known:
        return None
    return Table(("package", "version"), list(known.items()), words=(0, 1), title="Versions")


def _quantized(run: RunData) -> Table | None:
    """Return the numbers of quantized and unquantized modules and weights by reason."""
    if not run.quantization:
        return None
    groups: dict[tuple[bool, str], list[int]] = {}
    for row in run.quantization:
        shape = row.get("shape")
        sizes = [finite_or_none(size) for size in shape] if isinstance(shape, list) else [0]
        weights = math.prod(int(size or 0) for size in sizes)
        entry = groups.setdefault((bool(row.get("quantized")), str(row.get("why", ""))), [0, 0])
        entry[0] += 1
        entry[1] += weights
    rows = [
        (
            "quantized" if quantized else "not quantized",
            f"{count:,}",
            f"{weights:,}",
            Cell(why, "wide"),
        )
        for (quantized, why), (count, weights) in sorted(
            groups.items(), key=lambda item: (not item[0][0], -item[1][1])
        )
    ]
    heads = ("", "modules", "weights", "why")
    return Table(heads, rows, words=(0, 3), title="What was quantized")
