"""Make torchvision importable with a torch build that has no CUDA.

The published torchvision wheel links against CUDA. With a CPU build of torch its compiled extension
does not load, and importing it fails with "operator torchvision::nms does not exist", which also
breaks transformers, diffusers, peft and open_clip. Sol-RL uses only torchvision's resize, crop and
normalize, which need no compiled code. This script therefore appends a few lines to the installed
``torchvision/extension.py`` that declare the two missing operator schemas.

``make setup`` runs it once. It is idempotent, and does nothing if torch has CUDA or torchvision is
not installed. The appended lines do nothing if the extension loads.
"""

from __future__ import annotations

import importlib.util
import pathlib
import sys

MARK = "# declared by sol-rl: schemas of operators whose compiled extension did not load"
PATCH = f"""

{MARK}
if not _has_ops():
    _sol_rl_library = torch.library.Library("torchvision", "DEF")
    for _sol_rl_name in ("nms", "qnms"):
        _sol_rl_library.define(
            _sol_rl_name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
"""


def extension_file() -> pathlib.Path | None:
    """Return the path of the installed ``torchvision/extension.py``, or None if not installed.

    Locates it without importing torchvision, because that import is what fails.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    return pathlib.Path(spec.origin).with_name("extension.py")


def main() -> int:
    """Patch torchvision if needed; return 1 if its extension module has an unknown layout."""
    import torch

    path = extension_file()
    if path is None:
        print("torchvision is not installed: nothing to do")
        return 0
    if torch.version.cuda is not None:
        print("torch has CUDA: torchvision is left as it is")
        return 0
    text = path.read_text()
    if MARK in text:
        print("torchvision already fits a CPU build of torch")
        return 0
    if "_has_ops" not in text:
        print(
            f"{path}: no _has_ops in it; this torchvision is laid out differently. Pin"
            " torchvision==0.28.0",
            file=sys.stderr,
        )
        return 1
    path.write_text(text + PATCH)
    print("torchvision now imports beside a CPU build of torch")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
