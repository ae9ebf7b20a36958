"""Train a copy of the tiny model to draw images of half the side too.

    python -m shapes.half_build --minutes 32 --threads 1 --out build/half/model

The autoencoder learns to encode and decode 16x16 images (``--vae-minutes``), then the denoiser
learns both sizes in equal parts. By default the denoiser learns from rendered images with
independent noise. With ``--coupled`` it learns from pairs of a noise and the image that the shipped
model generates from it; at 16x16 the image is scaled down and the noise reduced, so that a preview
shows the image that its full-size noise becomes. Resumable like ``shapes.build``.
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
from shapes.state import load_or_create
from shapes.training import Batch, TrainingSchedule, draw_times, train
from shapes.vae import encode

IMAGES, PAIRS, STEPS = 16_000, 9_600, 10
RATE = 0.15  # factor on the learning rates that the shipped model was trained with
FP4_FROM = 0.9  # share of the time; keeps the weights robust to rounding
MODEL = HERE / "model"


def shipped_learner() -> Learner:
    """Return the shipped model's modules with a new auxiliary head."""
    learner = Learner()
    for name, kind in (
        ("transformer", SD3Transformer2DModel),
        ("text_encoder", CLIPTextModelWithProjection),
        ("text_encoder_2", CLIPTextModelWithProjection),
    ):
        module = kind.from_pretrained(MODEL, subfolder=name)
        getattr(learner, name).load_state_dict(module.state_dict())
    return learner


def downsample_noise(noise: torch.Tensor) -> torch.Tensor:
    """Reduce noise [B, C, H, W] to [B, C, H/2, W/2] as for previews.

    Each value is twice the mean of a 2x2 block, which keeps the variance.
    """
    return torch.nn.functional.avg_pool2d(noise, 2) * 2


@torch.no_grad()
def sample_latents(
    learner: Learner, eps: torch.Tensor, text: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Return the latents that the flow generates from ``eps``.

    Integrates with ``STEPS`` steps of the second-order Adams-Bashforth method.
    """
    even = torch.linspace(1, 0, STEPS + 1)
    sigmas = SHIFT * even / (1 + (SHIFT - 1) * even)
    x, previous, last_step = eps, None, 1.0
    for sigma, next_sigma in zip(sigmas[:-1].tolist(), sigmas[1:].tolist(), strict=True):
        step = next_sigma - sigma
        velocity, _ = learner(x, torch.full((len(x),), sigma), *text)
        correction = 0.0 if previous is None else (velocity - previous) * (step / (2 * last_step))
        x, previous, last_step = x + step * (velocity + correction), velocity, step
    return x


def made_pairs(examples: Examples) -> dict[str, torch.Tensor]:
    """Generate training pairs with the shipped model.

    The result has noises "eps", generated latents "x0" and caption indices "which".
    """
    learner, pool = shipped_learner().eval(), Pool(21)
    generator, rows = torch.Generator().manual_seed(21), []
    for _ in range(PAIRS // BATCH):
        which = torch.from_numpy(pool.rng.choice(len(pool.scenes), BATCH, p=pool.chances))
        eps = torch.randn((BATCH, *examples.latents.shape[1:]), generator=generator)
        rows.append(
            (eps, sample_latents(learner, eps, (examples.ids[which], examples.long)), which)
        )
        if len(rows) % 10 == 0:
            log(f"{len(rows) * BATCH} of {PAIRS} pairs")
    parts = (torch.cat(part) for part in zip(*rows, strict=True))
    return dict(zip(("eps", "x0", "which"), parts, strict=True))


class Sizes:
    """Source of training batches, each of either full or half size at random."""

    def __init__(self, vae: AutoencoderKL, work: Path, coupled: bool) -> None:
        shipped = AutoencoderKL.from_pretrained(MODEL, subfolder="vae").eval()
        self.examples = Examples(shipped, seed=5, count=2 * CHUNK)
        if coupled:
            pairs = load_or_create(work / "pairs.safetensors", lambda: made_pairs(self.examples))
            images, self.full, self.which = (
                images_of(shipped, pairs["x0"]),
                pairs["x0"],
                pairs["which"],
            )
            self.eps: torch.Tensor | None = pairs["eps"]
        else:
            pool = Pool(31)
            images, which = pool.images(IMAGES)
            self.full, self.which = encode(vae, images), torch.from_numpy(which)
            self.eps = None
        self.half = encode(vae, halved(images))

    def batch(self, by: torch.Generator, _done: float) -> Batch:
        """Return a batch of one size, with the noise it was generated from or independent noise."""
        half = bool(torch.rand((), generator=by) < 0.5)
        rows = torch.randint(len(self.which), (BATCH,), generator=by)
        x0 = (self.half if half else self.full)[rows]
        if self.eps is None:
            eps = torch.randn(x0.shape, generator=by)
        else:
            eps = downsample_noise(self.eps[rows]) if half else self.eps[rows]
        dropped = torch.rand(BATCH, generator=by) < NO_CAPTION
        ids = self.examples.ids
        captions = torch.where(dropped, len(ids) - 1, self.which[rows])
        t = draw_times(by, BATCH, TIME_MEAN, TIME_STD)
        return Batch(x0, eps, t, (ids[captions], self.examples.long))


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    out = Path("build/half/model")
    arg_parser = parser("shapes.half_build", __doc__, 32.0, "of the denoiser", out, 1)
    add_work(arg_parser, "build/half")
    help_text = "training time of the autoencoder"
    arg_parser.add_argument("--vae-minutes", type=float, default=8.0, help=help_text)
    help_text = "learn to show what the full noise becomes"
    arg_parser.add_argument("--coupled", action="store_true", help=help_text)
    return arg_parser.parse_args()


def main() -> None:
    """Run the training."""
    args = arguments()
    torch.set_num_threads(args.threads)
    part = args.work / ("coupled" if args.coupled else "plain")
    part.mkdir(parents=True, exist_ok=True)
    shipped = AutoencoderKL.from_pretrained(MODEL, subfolder="vae").eval()
    vae = widen_vae(shipped, args.vae_minutes, args.work, log)
    sizes = Sizes(vae, args.work, args.coupled)
    course = TrainingSchedule(args.minutes, flat=0.2, rate=RATE, fp4_from=FP4_FROM)
    snapshot = partial(assemble, vae, out=part / "snapshot")
    assemble(vae, train(shipped_learner, sizes.batch, course, part, log, snapshot), args.out)
    log_written(args.out)


if __name__ == "__main__":
    main()
