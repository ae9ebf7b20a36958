"""``report.html``: what a run did, in one file that opens without a network, on a desk and a phone.

Everything is read from the run directory, so it can be built while the run goes on, after it
failed, and on another machine.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from analysis.report import parts, rewards, sections
from analysis.report.data import RunData, read_run
from analysis.report.events import happenings
from analysis.report.gallery import gallery
from analysis.report.headline import headline
from analysis.report.parts import Cell, Table
from records.atomic import write_text

FILE = "report.html"


def build_report(run_dir: Path) -> Path:
    """Write ``report.html`` into ``run_dir``, over an older one; returns its path.

    Raises:
        FileNotFoundError: ``run_dir`` is no run directory.
        OSError: it cannot be written.
    """
    target = Path(run_dir) / FILE
    write_text(target, render(read_run(target.parent)))
    return target


def render(run: RunData) -> str:
    """The page as text."""
    particulars = (_quantised(run), _versions(run))
    configuration = json.dumps(run.config, indent=2, ensure_ascii=False, default=str)
    return parts.render(
        "report.html",
        name=run.name,
        what="run report",
        top=headline(run),
        images=gallery(run),
        images_before_only=len(run.images.steps) == 1,
        sections=[
            rewards.section(run),
            sections.exploration(run),
            sections.agreement(run),
            sections.time_spent(run),
            sections.health(run),
        ],
        happened=happenings(run),
        numbers=sections.numbers(run),
        configuration=configuration if run.config else "",
        particulars=[table for table in particulars if table],
    )


def _versions(run: RunData) -> Table | None:
    """Packages, and digests of the prompt files."""
    known = {str(name): str(version) for name, version in run.versions.items()}
    known |= {f"prompts.{key}": f"xxh3 {digest}" for key, digest in run.prompts.items()}
    if not known:
        return None
    return Table(("package", "version"), list(known.items()), words=(0, 1), title="Versions")


def _quantised(run: RunData) -> Table | None:
    """What was quantised, what not, and why: modules and weights by reason."""
    if not run.quantisation:
        return None
    groups: dict[tuple[bool, str], list[int]] = {}
    for row in run.quantisation:
        shape = row.get("shape")
        weights = math.prod(int(size) for size in shape) if isinstance(shape, list | tuple) else 0
        entry = groups.setdefault((bool(row.get("quantised")), str(row.get("why", ""))), [0, 0])
        entry[0] += 1
        entry[1] += weights
    rows = [
        (
            "quantised" if quantised else "not quantised",
            f"{count:,}",
            f"{weights:,}",
            Cell(why, "wide"),
        )
        for (quantised, why), (count, weights) in sorted(
            groups.items(), key=lambda item: (not item[0][0], -item[1][1])
        )
    ]
    heads = ("", "modules", "weights", "why")
    return Table(heads, rows, words=(0, 3), title="What was quantised")
