"""Teach a copy of the tiny model to draw at half the side too: ``python -m shapes.half_build
--minutes 32 --threads 1 --out build/half/model``.

The autoencoder learns to read and draw 16x16 images (``--vae-minutes``), then the denoiser both
sizes in equal parts. Plainly: on rendered images, with independent noise. With ``--coupled``: on
what the shipped model draws from a noise, at 16x16 scaled down and from the noise cut down, so that
a preview is to show the picture that its full noise becomes. Resumable, as ``shapes.build``.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel
from transformers import CLIPTextModelWithProjection

from shapes.build import SHIFT, assemble
from shapes.building import HERE, add_work, log, log_written, parser
from shapes.data import Pool
from shapes.denoiser import BATCH, CHUNK, NO_CAPTION, TIME_MEAN, TIME_STD, Examples, Learner
from shapes.half import halved, images_of, widen_vae
from shapes.state import kept
from shapes.training import Batch, Course, draw_times, train
from shapes.vae import encode

IMAGES, PAIRS, STEPS = 16_000, 9_600, 10
RATE = 0.15  # of the learning rates that the shipped model was trained with
FP4_FROM = 0.9  # of the time: what was trained to be rounded stays so
MODEL = HERE / "model"


def shipped_learner() -> Learner:
    """The shipped model's parts, with a new head."""
    learner = Learner()
    for name, kind in (
        ("transformer", SD3Transformer2DModel),
        ("text_encoder", CLIPTextModelWithProjection),
        ("text_encoder_2", CLIPTextModelWithProjection),
    ):
        found = kind.from_pretrained(MODEL, subfolder=name)
        getattr(learner, name).load_state_dict(found.state_dict())
    return learner


def cut(noise: torch.Tensor) -> torch.Tensor:
    """[B, C, H, W] to [B, C, H/2, W/2] as previews are: the mean of each 2x2 times 2."""
    return torch.nn.functional.avg_pool2d(noise, 2) * 2


@torch.no_grad()
def drawn(learner: Learner, eps: torch.Tensor, text: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Where the flow from ``eps`` ends: ``STEPS`` of Adams and Bashforth's second order."""
    even = torch.linspace(1, 0, STEPS + 1)
    sigmas = SHIFT * even / (1 + (SHIFT - 1) * even)
    x, before, last = eps, None, 1.0
    for now, after in zip(sigmas[:-1].tolist(), sigmas[1:].tolist(), strict=True):
        step = after - now
        velocity, _ = learner(x, torch.full((len(x),), now), *text)
        bend = 0.0 if before is None else (velocity - before) * (step / (2 * last))
        x, before, last = x + step * (velocity + bend), velocity, step
    return x


def made_pairs(examples: Examples) -> dict[str, torch.Tensor]:
    """Noises "eps", what the shipped model draws of them "x0", and captions "which"."""
    learner, pool = shipped_learner().eval(), Pool(21)
    by, rows = torch.Generator().manual_seed(21), []
    for _ in range(PAIRS // BATCH):
        which = torch.from_numpy(pool.rng.choice(len(pool.scenes), BATCH, p=pool.chances))
        eps = torch.randn((BATCH, *examples.latents.shape[1:]), generator=by)
        rows.append((eps, drawn(learner, eps, (examples.ids[which], examples.long)), which))
        if len(rows) % 10 == 0:
            log(f"{len(rows) * BATCH} of {PAIRS} pairs")
    parts = (torch.cat(part) for part in zip(*rows, strict=True))
    return dict(zip(("eps", "x0", "which"), parts, strict=True))


class Sizes:
    """Batches of either size, by chance."""

    def __init__(self, vae: AutoencoderKL, work: Path, coupled: bool) -> None:
        shipped = AutoencoderKL.from_pretrained(MODEL, subfolder="vae").eval()
        self.examples = Examples(shipped, seed=5, count=2 * CHUNK)
        if coupled:
            found = kept(work / "pairs.safetensors", lambda: made_pairs(self.examples))
            images, self.full, self.which = (
                images_of(shipped, found["x0"]),
                found["x0"],
                found["which"],
            )
            self.eps: torch.Tensor | None = found["eps"]
        else:
            pool = Pool(31)
            images, which = pool.images(IMAGES)
            self.full, self.which = encode(vae, images), torch.from_numpy(which)
            self.eps = None
        self.half = encode(vae, halved(images))

    def batch(self, by: torch.Generator, _done: float) -> Batch:
        """One size, with the noise that belongs to it or any."""
        half = bool(torch.rand((), generator=by) < 0.5)
        rows = torch.randint(len(self.which), (BATCH,), generator=by)
        x0 = (self.half if half else self.full)[rows]
        if self.eps is None:
            eps = torch.randn(x0.shape, generator=by)
        else:
            eps = cut(self.eps[rows]) if half else self.eps[rows]
        dropped = torch.rand(BATCH, generator=by) < NO_CAPTION
        ids = self.examples.ids
        named = torch.where(dropped, len(ids) - 1, self.which[rows])
        t = draw_times(by, BATCH, TIME_MEAN, TIME_STD)
        return Batch(x0, eps, t, (ids[named], self.examples.long))


def arguments() -> argparse.Namespace:
    """The command line."""
    out = Path("build/half/model")
    found = parser("shapes.half_build", __doc__, 32.0, "of the denoiser", out, 1)
    add_work(found, "build/half")
    text = "training time of the autoencoder"
    found.add_argument("--vae-minutes", type=float, default=8.0, help=text)
    text = "learn to show what the full noise becomes"
    found.add_argument("--coupled", action="store_true", help=text)
    return found.parse_args()


def main() -> None:
    """Run the training."""
    args = arguments()
    torch.set_num_threads(args.threads)
    part = args.work / ("coupled" if args.coupled else "plain")
    part.mkdir(parents=True, exist_ok=True)
    shipped = AutoencoderKL.from_pretrained(MODEL, subfolder="vae").eval()
    vae = widen_vae(shipped, args.vae_minutes, args.work, log)
    sizes = Sizes(vae, args.work, args.coupled)
    course = Course(args.minutes, flat=0.2, rate=RATE, fp4_from=FP4_FROM)
    snapshot = partial(assemble, vae, out=part / "snapshot")
    assemble(vae, train(shipped_learner, sizes.batch, course, part, log, snapshot), args.out)
    log_written(args.out)


if __name__ == "__main__":
    main()
