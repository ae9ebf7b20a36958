"""One iteration of a published architecture through the whole ring on CPUs, against its plan.

    make rehearsal ARGS="sana-1.6b"        # about 20 GB of free memory, 15 minutes on two cores

Denoiser and autoencoder are the published ones with random weights; text encoders are small, with
the published width of output, and the plan counts those. What is compared with the plan: the bytes
of tensors in every actor between two tasks, of the broadcast, and at most in the object store.
Memory of the processes stands beside them, less that of a process that has imported the same
libraries: it holds the scratch memory of passes, and Python's and Ray's own.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ray

from analysis.compare.table import lines
from analysis.report.parts import Table
from configs.load import parse
from configs.schema import RunConfig
from planning.make import Plan, make_plan, store_size
from policy.families.architectures import build, published
from records.errors import RunFailed
from tools.rehearsal_text import write_text_encoders

MODELS = ("sana-1.6b", "sd3.5-medium")
TOLERANCE = 0.05
EVERY_S, STORE_EVERY_S = 0.25, 1.0
GB = 1e9


def config_of(name: str, model: Path, root: Path, pixels: int) -> RunConfig:
    """One prompt, 2 of 4 seeds, a step each; nothing that a small machine must wait for."""
    prompts = root / "prompts.txt"
    prompts.write_text("a red circle\n")
    one = {"actors": 1, "threads": 2, "deadline_s": 3600}
    tree: dict[str, Any] = {
        "name": f"rehearsal-{name}",
        "run_root": str(root / "runs"),
        "iterations": 1,
        "model": {
            "family": published(name)["family"],
            "path": str(model),
            "height": pixels,
            "width": pixels,
            "max_sequence_length": 32,
        },
        "prompts": {"train": str(prompts), "test": str(prompts), "per_iteration": 1},
        "explore": {
            **{"pool_size": 4, "steps": 1, "chunk_size": 2, "backend": "emulated_nvfp4"},
            "scale_search": False,
        },
        "selection": {"keep": 2},
        "regenerate": {"steps": 1, "precision": "bf16", "batch_size": 2},
        "evaluate": {"every": 0, "steps": 1, "solver": "euler", "prompts": 1, "noises": 1},
        "rewards": {"scorers": [{"name": "jpeg_compressibility"}]},
        "objective": {"times_per_sample": 1},
        "optimizer": {"batch_size": 1, "gradient_checkpointing": True},
        "services": {
            "rollout": one,
            "learner": {**one, "deadline_s": 6 * 3600},
            "encoder": one,
            "start_deadline_s": 1800,
        },
    }
    return parse(tree)


def write_pipeline(name: str, directory: Path) -> Path:
    """A pipeline directory with random weights."""
    import torch

    model = published(name)
    index: dict[str, Any] = {"_class_name": model["pipeline"]}
    torch.manual_seed(0)
    for part, dtype in (("transformer", torch.bfloat16), ("vae", torch.float32)):
        module: Any = build(model["parts"][part], "cpu", dtype)
        module.save_pretrained(directory / part)
        index[part] = model["parts"][part]["class"].split(".")
        del module
        gc.collect()
    scheduler = model["parts"]["scheduler"]
    index["scheduler"] = scheduler["class"].split(".")
    (directory / "scheduler").mkdir()
    (directory / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler["config"]))
    index |= write_text_encoders(model["family"], directory)
    (directory / "model_index.json").write_text(json.dumps(index))
    return directory


# ---- measuring


def held(actor: Any) -> int:
    """Bytes of all tensors in an actor's process, and of the shards that a learner keeps."""
    import torch

    sizes: dict[int, int] = {}
    for each in gc.get_objects():
        if type(each) is torch.Tensor or type(each) is torch.nn.Parameter:
            storage = each.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    shards: list[Any] = getattr(actor, "_shards", [])
    return sum(sizes.values()) + sum(each.nbytes for each in shards)


class Bare:
    """A process that has imported what actors import, and holds nothing."""

    def __init__(self) -> None:
        import diffusers

        import actors.learner
        import actors.rollout
        import learner.trainer

        self.imported = (actors, learner, diffusers.AutoencoderDC, diffusers.AutoencoderKL)

    def memory(self) -> int:
        """Bytes of this process."""
        import os

        return memory_of(os.getpid())


def memory_of(pid: int) -> int:
    """Bytes of a process that are its own: not what it shares through the object store."""
    text = Path(f"/proc/{pid}/status").read_text()
    kinds = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return sum(int(kinds[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))


@dataclass
class Measured:
    """Bytes by kind of actor: of tensors, and of the process at most since it answered."""

    tensors: dict[str, int] = field(default_factory=dict[str, int])
    process: dict[str, int] = field(default_factory=dict[str, int])
    libraries: int = 0
    store: int = 0
    broadcast: int = 0
    seconds: float = 0.0


class Watch(threading.Thread):
    """Looks at the actors of a run while it runs."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(daemon=True)
        self.config, self.found, self.ended = config, Measured(), threading.Event()
        self.events = Path(config.run_root or "runs") / config.name / "events.jsonl"
        self.trouble: str | None = None

    def run(self) -> None:
        """Until ``ended``."""
        looked = 0.0
        while not self.ended.wait(EVERY_S):
            try:
                events = self._events()
                for event in events:
                    if event["event"] == "actor_started":
                        self._process(event)
                if time.monotonic() - looked > STORE_EVERY_S and ray.is_initialized():
                    looked = time.monotonic()
                    self.found.store = max(self.found.store, store_bytes())
                versions = [each for each in events if each["event"] == "version_published"]
                if len(versions) > 1 and not self.found.tensors:
                    self.found.broadcast = versions[-1]["bytes"]
                    self._tensors([each for each in events if each["event"] == "actor_started"])
            except Exception as error:  # told at the end; the run itself goes on
                self.trouble = f"{type(error).__name__}: {error}"

    def _events(self) -> list[dict[str, Any]]:
        text = self.events.read_text() if self.events.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        return [json.loads(line) for line in whole.splitlines()]

    def _process(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if Path(f"/proc/{event['pid']}").exists():
            before = self.found.process.get(kind, 0)
            self.found.process[kind] = max(before, memory_of(event["pid"]))

    def _tensors(self, started: Sequence[dict[str, Any]]) -> None:
        """Asked between two tasks of each actor."""
        space = f"sol-rl-{ray.get_runtime_context().get_job_id()}"
        bare: Any = ray.remote(Bare)
        self.found.libraries = ray.get(bare.options(num_cpus=0).remote().memory.remote())
        for event in started:
            kind = event["kind"]
            if kind in ("rollout", "learner", "encoder"):
                name = f"{self.config.name}/{kind}-{event['actor']}.{event['incarnation']}"
                actor: Any = ray.get_actor(name, namespace=space)
                self.found.tensors[kind] = ray.get(actor.__ray_call__.remote(held))


def store_bytes() -> int:
    """Bytes in the object store of this machine."""
    from ray._private import internal_api, state

    address = ray.get_runtime_context().gcs_address
    reply = internal_api.get_memory_info_reply(internal_api.get_state_from_address(address))
    assert state is not None
    return int(reply.store_stats.object_store_bytes_used)


# ---- the table


def table(plan: Plan, found: Measured) -> tuple[Table, list[str]]:
    """(measured against planned, lines about what is more than the tolerance away)."""
    rows, off = [], []

    def row(what: str, measured: int, planned: int, process: str = "") -> None:
        share = measured / planned if planned else float("nan")
        if not abs(share - 1) <= TOLERANCE:
            off.append(f"{what}: {share:.3f} of the plan")
        numbers = (f"{measured / GB:.3f}", f"{planned / GB:.3f}", f"{share:.3f}", process)
        rows.append((what, *numbers))

    for kind, parts in plan.memory.items():
        if kind in found.tensors:
            own = max(0, found.process.get(kind, 0) - found.libraries) / GB
            kept = {what: size or 0 for what, size in parts.items() if "passes" not in what}
            passes = sum(size or 0 for what, size in parts.items() if "passes" in what) / GB
            beside = f"{own:.3f}, planned with passes {sum(kept.values()) / GB + passes:.3f}"
            row(kind, found.tensors[kind], sum(kept.values()), beside)
    row("broadcast", found.broadcast, plan.broadcast)
    row("object store, at most", found.store, sum(plan.store.values()))
    heads = ("", "measured, GB", "planned, GB", "measured / planned", "process, GB")
    title = f"Measured and planned, in {found.seconds / 60:.1f} minutes"
    return Table(heads, rows, words=(0, 4), title=title), off


def rehearse(name: str, root: Path, pixels: int) -> list[str]:
    """Run it, print the table; lines about what the plan has wrong. Raises RunFailed."""
    from cluster.driver.session import train

    start = time.monotonic()
    model = root / name
    if not (model / "model_index.json").exists():
        shutil.rmtree(model, ignore_errors=True)
        model.mkdir(parents=True)
        write_pipeline(name, model)
        print(f"written: {model}, {time.monotonic() - start:.0f} s", flush=True)
    config = config_of(name, model, root, pixels)
    plan = make_plan(config)
    shutil.rmtree(root / "runs" / config.name, ignore_errors=True)
    ray.init(
        "local",
        num_cpus=8,
        object_store_memory=max(10**9, store_size(sum(plan.store.values()))),
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    watch = Watch(config)
    watch.start()
    try:
        run_here(config, train)
    finally:
        watch.ended.set()
    watch.found.seconds = time.monotonic() - start
    if watch.trouble:
        print(f"trouble: {watch.trouble}", file=sys.stderr)
    found, off = table(plan, watch.found)
    print("\n".join(lines([found], off)), flush=True)
    numbers = {"measured": asdict(watch.found), "memory": plan.memory, "store": plan.store}
    (root / f"{name}.json").write_text(json.dumps(numbers, indent=1))
    return off


def run_here(config: RunConfig, train: Any) -> None:
    """``train`` on the Ray that is there, whose object store has the size that the plan says."""
    import os

    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    real, ray.init = ray.init, lambda *given, **named: None  # it is there
    try:
        train(config, resume=False)
    finally:
        ray.init = real
        del os.environ["RAY_ADDRESS"]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when everything is within the tolerance, 1 when not, 3 when the run failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.rehearsal", description=__doc__)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], metavar="MODEL")
    parser.add_argument("--dir", default="runs/rehearsal", help="models and runs, kept")
    parser.add_argument("--pixels", type=int, default=256)
    options = parser.parse_args(arguments)
    off: list[str] = []
    root = Path(options.dir).absolute()
    root.mkdir(parents=True, exist_ok=True)
    for name in options.models or MODELS:
        try:
            off += rehearse(name, root, options.pixels)
        except RunFailed as failure:
            print(failure, file=sys.stderr)
            return 3
    return 1 if off else 0


if __name__ == "__main__":
    raise SystemExit(main())
