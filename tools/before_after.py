"""Save a sheet of a run's held-out images before and after training, such as the README's."""

from __future__ import annotations

import argparse
from pathlib import Path

from records.images import before_after

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Held-out prompts before and after training.")
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--prompts", type=int, default=6, help=("number of prompts, the first ones")
    )
    args = parser.parse_args()
    before_after(args.run / "images", args.prompts).save(args.out, optimize=True)
