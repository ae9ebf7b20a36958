"""The README's image, from a run's directory: ``python -m tools.before_after runs/quickstart
docs/images/before_after.png``.

The first prompts of the held-out set at the same fixed noises, with the weights before and after
training.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

CELL, GAP, TITLE, MIDDLE, MARGIN = 96, 2, 26, 24, 12


def sheet(images: Path, prompts: int) -> Image.Image:
    """Rows of ``prompts`` prompts, four noises before and four after, from the run's ``images``
    directory.
    """
    steps = sorted(path for path in images.glob("step_*") if path.is_dir())
    if len(steps) < 2:
        raise SystemExit(
            f"{images}: images of {len(steps)} evaluations, two are needed: let the run end first"
        )
    columns = [(4 * (CELL + GAP) + MIDDLE) * side for side in (0, 1)]
    width, row = 2 * MARGIN + columns[1] + 4 * (CELL + GAP), CELL + TITLE
    chosen = json.loads((images / "prompts.json").read_text())[:prompts]
    out = Image.new("RGB", (width, MARGIN + TITLE - 4 + row * len(chosen)), "white")
    draw, font = ImageDraw.Draw(out), ImageFont.load_default(size=14)
    for left, step, title in zip(columns, (steps[0], steps[-1]), ("before", "after"), strict=True):
        draw.text((MARGIN + left, MARGIN - 6), title, fill="#555", font=font)
        for line, prompt in enumerate(chosen):
            top = MARGIN + 2 * TITLE - 8 + row * line
            if not left:
                draw.text((MARGIN, top - 22), prompt["prompt"], fill="black", font=font)
            for noise, path in enumerate(sorted(step.glob(f"{prompt['index']}_*.png"))[:4]):
                image = (
                    Image.open(path).convert("RGB").resize((CELL, CELL), Image.Resampling.NEAREST)
                )
                out.paste(image, (MARGIN + left + noise * (CELL + GAP), top))
    return out


def main() -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=int, default=6)
    args = parser.parse_args()
    sheet(args.run / "images", args.prompts).save(args.out, optimize=True)


if __name__ == "__main__":
    main()
