"""Fake ``sol-rl train`` for tests of its callers: writes a run directory at once, or fails as told.

The environment variable FAKE_TRAIN is a JSON object, run name -> crash (SIGKILL after one
iteration), usage (exit code 2), or wait (until SIGTERM).
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from configs.load import load
from configs.prompts import digests
from configs.schema import RunConfig
from planning.layouts.threads import with_threads

BASE = 0.5
CORES = 2
STOPPED = 130


def write(
    config: RunConfig,
    gains: list[float],
    seconds: dict[str, float],
    ending: str | None = "run_finished",
) -> Path:
    """Write a run whose held-out reward is 0.5 + seed / 100 before training and rises in every
    iteration.
    """
    assert config.run_root is not None
    path = Path(config.run_root) / config.name
    path.mkdir(parents=True, exist_ok=True)
    base = BASE + config.seed / 100
    rows: list[dict[str, Any]] = [_evaluation(0, base, 0.0)]
    for index, gain in enumerate(gains):
        times = {f"time/{stage}_s": value for stage, value in seconds.items()}
        rows.append({"kind": "iteration", "iteration": index, "seconds": 100.0 + index, **times})
        rows.append(_evaluation(index + 1, base, gain))
    events = [{"time": 1.0, "event": "run_started"}] + (
        [{"time": 2.0, "event": ending, "why": "said so"}] if ending else []
    )
    kept = {
        "config": config.model_dump(mode="json"),
        "versions": {},
        "prompts": digests(config.prompts),
    }
    (path / "config.json").write_text(json.dumps(kept))
    for name, lines in (("metrics", rows), ("events", events)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _evaluation(iteration: int, base: float, gain: float) -> dict[str, Any]:
    return {
        "kind": "evaluation",
        "iteration": iteration,
        "seconds": 99.0,
        "weights": "ema",
        "reward/eval_mean": base + gain,
        "reward/eval/shapes": base + gain,
        "eval/gain": gain,
        "eval/gain_stderr": 0.02,
    }


def main(file: str, *flags: str) -> int:
    config = with_threads(load(file), CORES)
    assert config.run_root is not None
    with (Path(config.run_root) / "calls.txt").open("a") as calls:
        calls.write(f"{config.name} {' '.join(flags)}\n")
    behaviour = json.loads(os.environ.get("FAKE_TRAIN", "{}")).get(config.name)
    if behaviour == "usage":
        print("model.path: there is no such model")
        return 2
    seconds = {"explore": 2.0, "regenerate": 1.0, "update": 4.0, "publish": 0.5, "iteration": 8.0}
    if behaviour is None:
        write(config, [0.01 * (index + 1) for index in range(config.iterations)], seconds)
        return 0
    write(config, [0.01], seconds, ending=None)
    if behaviour == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(STOPPED))
    (Path(config.run_root) / "waiting").write_text(str(os.getpid()))
    while True:
        time.sleep(0.05)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
