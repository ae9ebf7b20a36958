"""What the commands take: names, options and help, without what they do. Imports neither torch nor
ray, so that help answers at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

Command = Callable[[argparse.Namespace], int]
Sub = argparse.ArgumentParser


def parser_of(commands: Mapping[str, Command]) -> argparse.ArgumentParser:
    """The parser; ``options.command`` is the one of ``commands`` that was asked for, by its name."""
    parser = argparse.ArgumentParser(
        prog="sol-rl",
        description="FP4 explore, BF16 train: RL for text-to-image diffusion models on Ray.",
    )
    subs = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, (text, declare) in DECLARED.items():
        sub = subs.add_parser(name, help=text, description=text)
        sub.set_defaults(command=commands[name])
        declare(sub)
    return parser


def _add_config(
    sub: Sub, required: bool = True, what: str = "a preset name or a TOML file"
) -> None:
    sub.add_argument("config", nargs=None if required else "?", help=what)
    sub.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="a.b=c",
        help="override one value",
    )


def _add_resume(sub: Sub) -> None:
    sub.add_argument(
        "--resume",
        action="store_true",
        help="continue the run of this name from its last checkpoint",
    )


def _add_cluster(sub: Sub) -> None:
    where = (
        "host:port of the cluster's head, or its dashboard's URL; RAY_ADDRESS, or the cluster on"
        " this machine, unless given"
    )
    sub.add_argument("--address", metavar="URL", help=where)


def _add_run(sub: Sub) -> None:
    sub.add_argument("run", help="a run directory")


def _add_checkpoint(sub: Sub, of: str = "a checkpoint of the run") -> None:
    sub.add_argument(
        "--checkpoint", type=int, metavar="STEP", help=f"{of}; the last one unless given"
    )


def _train(sub: Sub) -> None:
    _add_config(sub)
    _add_resume(sub)


def _submit(sub: Sub) -> None:
    _add_config(sub)
    sub.add_argument(
        "--address",
        metavar="URL",
        help=(
            "the cluster's dashboard, http://HOST:8265; RAY_API_SERVER_ADDRESS or RAY_ADDRESS"
            " unless given"
        ),
    )
    sub.add_argument(
        "--follow",
        action="store_true",
        help=(
            "show the job's log until it ends; its exit code is then the run's, or 4 when the"
            " dashboard answers no more"
        ),
    )
    _add_resume(sub)


def _status(sub: Sub) -> None:
    sub.add_argument("--run", metavar="NAME", help="one run; all of the cluster unless given")
    _add_cluster(sub)


def _scale(sub: Sub) -> None:
    sub.add_argument("--rollout", type=int, metavar="N", help="rollout actors")
    sub.add_argument("--reward", type=int, metavar="N", help="reward actors")
    sub.add_argument("--run", metavar="NAME", help="which run, where there are several")
    _add_cluster(sub)


def _config(sub: Sub) -> None:
    _add_config(sub, required=False)
    sub.add_argument("--list", action="store_true", help="print all preset names")


def _plan(sub: Sub) -> None:
    _add_config(sub)
    sub.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="place on the nodes of the cluster with this head; on assumed nodes unless given",
    )
    sub.add_argument(
        "--accelerator",
        metavar="NAME",
        help="GPUs assumed, such as B200; the explorers' own unless given",
    )
    sub.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="GPUs to lay the run out on; layout.gpus, or one node's, unless given",
    )
    sub.add_argument(
        "--json", action="store_true", help="print the prediction as one JSON object instead"
    )
    sub.add_argument(
        "--peak-tflops",
        type=float,
        metavar="T",
        help="assumed dense BF16 peak of a GPU; the accelerator's unless given",
    )
    sub.add_argument(
        "--quantised-peak-tflops", type=float, metavar="T", help="assumed peak in quantised layers"
    )
    sub.add_argument(
        "--utilisation",
        type=float,
        default=0.4,
        metavar="U",
        help="assumed share of the peaks that is reached",
    )
    sub.add_argument(
        "--gpu-memory-gb",
        type=float,
        metavar="GB",
        help="assumed memory of a GPU; the accelerator's unless given",
    )
    sub.add_argument(
        "--node-gpus", type=int, default=8, metavar="N", help="GPUs of an assumed node"
    )
    sub.add_argument(
        "--node-cpus", type=int, default=96, metavar="N", help="CPUs of an assumed node"
    )


def _evaluate(sub: Sub) -> None:
    _add_run(sub)
    _add_checkpoint(sub)
    sub.add_argument(
        "--prompts",
        metavar="FILE",
        help="a prompt file, all of it; the run's held-out prompts unless given",
    )


def _export(sub: Sub) -> None:
    _add_run(sub)
    sub.add_argument("out", help="directory to write")
    sub.add_argument("--weights", choices=("ema", "current", "old"), default="ema")
    _add_checkpoint(sub)


def _fidelity(sub: Sub) -> None:
    _add_config(sub, required=False)
    sub.add_argument(
        "--run",
        metavar="DIR",
        help=(
            "the trained policy of this run, with the run's own configuration; --set may change"
            " what is measured"
        ),
    )
    _add_checkpoint(sub, "with --run: a checkpoint")
    sub.add_argument(
        "--prompts",
        type=int,
        default=32,
        metavar="P",
        help="training prompts, drawn by the run seed",
    )
    sub.add_argument("--seeds", type=int, default=96, metavar="N", help="noises per prompt")
    sub.add_argument(
        "--steps", type=int, nargs="+", default=[2, 4, 6, 8], help="explore steps of the proxies"
    )
    sub.add_argument(
        "--backends",
        nargs="+",
        default=["emulated_nvfp4", "fp32"],
        help="precisions of the proxies",
    )
    sub.add_argument(
        "--threads",
        type=int,
        help="CPU threads; as the configuration's rollout actors unless given",
    )
    sub.add_argument(
        "--out", metavar="DIR", help="directory to write; beside the run directories unless given"
    )


def _compare(sub: Sub) -> None:
    _add_config(
        sub,
        required=False,
        what="a preset, a TOML file, or a comparison: a TOML file that lists its cells",
    )
    sub.add_argument("--arms", metavar="A,B", help="arms; the configuration's own unless given")
    sub.add_argument(
        "--objectives", metavar="X,Y", help="objectives; the configuration's own unless given"
    )
    sub.add_argument(
        "--seeds",
        type=int,
        metavar="N",
        help="run seeds per cell; 1, or the comparison's own number, unless given",
    )
    sub.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="a.b=v,w",
        help="a cell for every value; more than one: for every combination",
    )
    sub.add_argument(
        "--baseline",
        metavar="CELL",
        help="the cell that the others are held against; the first unless given",
    )
    sub.add_argument(
        "--runs",
        nargs="+",
        metavar="DIR",
        help="compare these run directories instead; nothing is trained",
    )
    sub.add_argument(
        "--out",
        metavar="DIR",
        help="directory of the runs and the report; NAME-compare under run_root unless given",
    )


DECLARED: dict[str, tuple[str, Callable[[Sub], None]]] = {
    "train": ("train, on this machine or on the cluster of RAY_ADDRESS", _train),
    "submit": ("train as a job on a Ray cluster", _submit),
    "status": ("what a running job is doing: actors, versions, progress, rates", _status),
    "scale": ("grow or shrink the pools of a running job; the learner is not disturbed", _scale),
    "config": ("print the resolved configuration, or the presets", _config),
    "plan": (
        (
            "dry run: placement, memory, bytes per broadcast, operations and predicted seconds;"
            " loads no weights"
        ),
        _plan,
    ),
    "evaluate": ("score held-out prompts with base, trained, old and EMA weights", _evaluate),
    "export": ("write a LoRA that stock diffusers loads", _export),
    "fidelity": (
        "measure how well cheap proxies rank noises, by backend and explore steps",
        _fidelity,
    ),
    "compare": (
        "arms and objectives on equal prompts, noises and seeds: tables with error bars, curves",
        _compare,
    ),
    "report": ("write report.html of a run", _add_run),
}
"""Every command: a line about it, and what declares its options."""
