"""Build the tiny text-to-image model from scratch.

    python -m shapes.build --minutes 82 --threads 2 --out shapes/model

Writes the prompt files, renders images, trains the autoencoder (``--vae-minutes``), then the
denoiser with its text encoders (``--minutes``), and writes a StableDiffusion3Pipeline directory. A
build that was stopped continues when it is started again with the same ``--work``; meanwhile the
latest pipeline is in WORK/snapshot. Everything is FP32, on the CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline

from shapes import prompts
from shapes.building import HERE, add_work, log, log_written, parser, replacing
from shapes.data import Pool
from shapes.denoiser import Learner, train_denoiser
from shapes.text import clip_tokenizer, t5_encoder, t5_tokenizer
from shapes.vae import train_vae

SHIFT = 2.0  # time shift of the sampling schedule


def assemble(vae: AutoencoderKL, learner: Learner, out: Path) -> None:
    """Write the pipeline directory ``out``, replacing any existing one."""
    pipeline = StableDiffusion3Pipeline(
        transformer=learner.transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=vae,
        text_encoder=learner.text_encoder,
        tokenizer=clip_tokenizer(),
        text_encoder_2=learner.text_encoder_2,
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=t5_encoder(),
        tokenizer_3=t5_tokenizer(),
    )
    with replacing(out) as fresh:
        pipeline.save_pretrained(fresh)


def trained_vae(minutes: float, work: Path) -> AutoencoderKL:
    """Return the trained autoencoder; train it on the first call, then load it from ``work``."""
    done = work / "vae-done"
    if not done.exists():
        with replacing(done) as fresh:
            train_vae(Pool(1), minutes, work, log).save_pretrained(fresh)
    return AutoencoderKL.from_pretrained(done).eval()


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    arg_parser = parser("shapes.build", __doc__, 82.0, "of the denoiser", HERE / "model")
    add_work(arg_parser)
    help_text = "training time of the autoencoder"
    arg_parser.add_argument("--vae-minutes", type=float, default=7.0, help=help_text)
    arg_parser.add_argument(
        "--prompts-only", action="store_true", help="write the prompt files and stop"
    )
    return arg_parser.parse_args()


def main() -> None:
    """Run the build."""
    args = arguments()
    prompts.write()
    if args.prompts_only:
        return
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    vae = trained_vae(args.vae_minutes, args.work)
    snapshot = args.work / "snapshot"
    learner = train_denoiser(
        vae, args.minutes, args.work, log, lambda average: assemble(vae, average, snapshot)
    )
    assemble(vae, learner, args.out)
    log_written(args.out)


if __name__ == "__main__":
    main()
