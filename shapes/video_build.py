"""Build the tiny text-to-video model from scratch.

    python -m shapes.video_build --minutes 40 --threads 1 --out build/video/model

Renders clips, trains the autoencoder (``--vae-minutes``), the denoiser with its text encoder
(``--minutes``), then the decoder alone (``--decoder-minutes``), and writes a WanPipeline directory.
A build that was stopped continues when it is started again with the same ``--work``; meanwhile the
latest pipeline is in WORK/snapshot. Everything is FP32, on the CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline

from shapes.building import add_work, log, log_written, parser, replacing
from shapes.text import t5_tokenizer
from shapes.video_denoiser import VideoLearner, train_denoiser
from shapes.video_vae import refine, train_vae

SHIFT = 3.0  # time shift of the sampling schedule


def assemble(vae: AutoencoderKLWan, learner: VideoLearner, out: Path) -> None:
    """Write the pipeline directory ``out``, replacing any existing one."""
    tokenizer: Any = t5_tokenizer()
    pipeline = WanPipeline(
        transformer=learner.transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=vae,
        text_encoder=learner.text_encoder,
        tokenizer=tokenizer,
    )
    with replacing(out) as fresh:
        pipeline.save_pretrained(fresh)


def trained_vae(minutes: float, work: Path) -> AutoencoderKLWan:
    """Return the trained autoencoder; train it on the first call, then load it from ``work``."""
    done = work / "vae-done"
    if not done.exists():
        with replacing(done) as fresh:
            train_vae(minutes, work, log).save_pretrained(fresh)
    return AutoencoderKLWan.from_pretrained(done).eval()


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    arg_parser = parser(
        "shapes.video_build", __doc__, 40.0, "of the denoiser", Path("build/video/model"), 1
    )
    add_work(arg_parser, "build/video")
    help_text = "training time of the autoencoder"
    arg_parser.add_argument("--vae-minutes", type=float, default=17.0, help=help_text)
    help_text = "training time of the decoder alone, at the end"
    arg_parser.add_argument("--decoder-minutes", type=float, default=10.0, help=help_text)
    return arg_parser.parse_args()


def main() -> None:
    """Run the build."""
    args = arguments()
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    vae = trained_vae(args.vae_minutes, args.work)
    snapshot = args.work / "snapshot"
    learner = train_denoiser(
        vae, args.minutes, args.work, log, lambda average: assemble(vae, average, snapshot)
    )
    assemble(refine(vae, args.decoder_minutes, args.work, log), learner, args.out)
    log_written(args.out)


if __name__ == "__main__":
    main()
