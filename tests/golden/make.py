"""Write ``numbers.json``: results of published formulas on fixed tensors, in float64.

It is plain numpy, written from the papers' formulas; nothing here imports the project.

    python -m tests.golden.make
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

FILE = Path(__file__).parent / "numbers.json"
Array = np.ndarray


def selection(rng: np.random.Generator) -> dict[str, object]:
    """Select the 12 highest and the 12 lowest of 96 distinct rewards (arXiv 2604.06916)."""
    rewards = rng.permutation(96) / 97 + rng.random(96) / 1000
    ranks = {value: place for place, value in enumerate(sorted(rewards.tolist()))}
    chosen = [i for i, value in enumerate(rewards.tolist()) if not 12 <= ranks[value] < 84]
    return {"rewards": rewards.tolist(), "chosen": chosen}


def advantages(rng: np.random.Generator) -> dict[str, object]:
    """Compute (r - group mean) / (std + eps); std of all or of the group, with n and n - 1."""
    rewards = rng.normal(size=(3, 8)) * np.array([[0.1], [1.0], [3.0]]) + 0.7
    centred = rewards - rewards.sum(1, keepdims=True) / 8
    around = rewards - rewards.sum() / 24
    everything = math.sqrt((around**2).sum() / 24)
    within = np.sqrt((centred**2).sum(1, keepdims=True) / 8)
    unbiased = np.sqrt((centred**2).sum(1, keepdims=True) / 7)
    return {
        "rewards": rewards.tolist(),
        "global": (centred / (everything + 1e-4)).tolist(),
        "group": (centred / (within + 1e-4)).tolist(),
        "group_unbiased": (centred / (unbiased + 1e-8)).tolist(),
    }


def diffusion_nft(rng: np.random.Generator, beta: float, kl: float) -> dict[str, object]:
    """Compute the loss and its gradient by the trained velocity (arXiv 2509.16117)."""
    count, clip = 4, 5.0
    x0, eps, v, old, ref = (rng.normal(size=(count, 2, 3)) for _ in range(5))
    t = np.array([1.0, 0.75, 0.5, 0.25])
    advantage = np.array([7.0, 1.5, -0.5, -2.0])
    loss, gradient = 0.0, np.zeros_like(v)
    for p in range(count):
        x_t = (1 - t[p]) * x0[p] + t[p] * eps[p]
        r = min(max(advantage[p] / clip, -1), 1) / 2 + 0.5
        for share, sign in ((r, 1), (1 - r, -1)):
            u = old[p] + sign * beta * (v[p] - old[p])
            residual = x_t - t[p] * u - x0[p]
            weight = max(np.abs(residual).sum() / 6, 1e-5)
            loss += clip * share * (residual**2).sum() / 6 / weight / beta / count
            slope = clip * share * -2 * t[p] * residual / 6 / weight / beta / count
            gradient[p] += slope * sign * beta
        apart = v[p] - ref[p]
        loss += kl * (apart**2).sum() / 6 / count
        gradient[p] += kl * 2 * apart / 6 / count
    given = {"x0": x0, "eps": eps, "current": v, "old": old, "ref": ref}
    plain: dict[str, object] = {name: value.tolist() for name, value in given.items()}
    plain |= {"t": t.tolist(), "advantages": advantage.tolist(), "beta": beta, "kl": kl}
    return plain | {"loss": loss, "gradient": gradient.tolist()}


def path_grpo(rng: np.random.Generator, dance: bool) -> dict[str, object]:
    """Compute step, density, loss and gradient of one step per point, for one of two SDEs.

    FlowGRPO (arXiv 2505.05470), or DanceGRPO (2505.07818) in the form of its paper, with the score.
    """
    eta, clip, kl = (0.3, 0.02, 0.0) if dance else (0.7, 0.02, 0.04)
    now, after = np.array([0.9, 0.6, 0.3, 0.2]), np.array([0.8, 0.4, 0.25, 0.1])
    advantage = np.array([6.0, 1.0, -1.0, -0.5])
    x, v = rng.normal(size=(2, 4, 2, 3))
    old, ref = v + 0.05 * rng.normal(size=(2, 4, 2, 3))
    z = rng.normal(size=(4, 2, 3))
    s, d = (value.reshape(4, 1, 1) for value in (now, after - now))
    g = np.full_like(s, eta) if dance else eta * np.sqrt(s / (1 - s))

    def mean(u: Array) -> Array:
        if dance:
            score = -(x - (x - s * u) * (1 - s)) / s**2
            return x + d * u - 0.5 * eta**2 * score * d
        return x * (1 + g**2 / (2 * s) * d) + u * (1 + g**2 * (1 - s) / (2 * s)) * d

    std = g * np.sqrt(-d)
    x_next = mean(old) + std * z

    def log_prob(u: Array) -> Array:
        scaled = (x_next - mean(u)) ** 2 / (2 * std**2)
        return (-scaled - np.log(std) - math.log(math.sqrt(2 * math.pi))).sum((1, 2)) / 6

    ratio = np.exp(log_prob(v) - log_prob(old))
    a = np.clip(advantage, -5, 5)
    plain, held = -a * ratio, -a * np.clip(ratio, 1 - clip, 1 + clip)
    apart = ((mean(v) - mean(ref)) ** 2 / (2 * g**2)).sum((1, 2)) / 6
    loss = np.maximum(plain, held).mean() + kl * apart.mean()
    of_v = mean(np.ones_like(v)) - mean(np.zeros_like(v))  # the mean is linear in v
    acts = ((plain >= held) | (np.abs(ratio - 1) <= clip)).reshape(4, 1, 1)
    slope = -(a * ratio).reshape(4, 1, 1) * (x_next - mean(v)) / std**2 / 6 * of_v / 4
    gradient = slope * acts + kl * (mean(v) - mean(ref)) / g**2 / 6 * of_v / 4
    given = {"x": x, "x_next": x_next, "current": v, "old": old, "ref": ref}
    recorded: dict[str, object] = {name: value.tolist() for name, value in given.items()}
    recorded |= {
        "sigma": now.tolist(),
        "sigma_next": after.tolist(),
        "advantages": advantage.tolist(),
    }
    recorded |= {"eta": eta, "clip": clip, "kl": kl, "log_prob": log_prob(v).tolist()}
    return recorded | {"ratio": ratio.tolist(), "loss": float(loss), "gradient": gradient.tolist()}


def schedules() -> dict[str, object]:
    """Compute decays for some s in 1 .. 600, and averages of weights 1 and 0 with them."""
    at = [1, 2, 10, 75, 76, 100, 208, 500, 600]
    nft = {s: min(0.001 * s, 0.5) for s in range(1, 601)}
    delayed = {s: min(0.0075 * max(s - 75, 0), 0.999) for s in range(1, 601)}
    ema = {s: min((1 + s) / (10 + s), 0.9) for s in range(1, 601)}
    left = math.prod(ema[s] for s in range(1, 11))
    recorded: dict[str, object] = {"s": at, "base_left": left}
    for name, table in {"linear_cap": nft, "delayed_linear_cap": delayed, "ema": ema}.items():
        recorded[name] = [table[s] for s in at]
    return recorded


def spacing() -> dict[str, list[float]]:
    """Compute SD3's schedules with shift 3: t -> 3 t / (1 + 2 t)."""

    def shifted(t: float) -> float:
        return 3 * t / (1 + 2 * t)

    least, six = shifted(0.001), range(6)
    theirs = [shifted(1 + (least - 1) * i / 5) for i in six]
    return {"own": [*(shifted(1 - i / 6) for i in six), 0.0], "scheduler": [*theirs, 0.0]}


def solver(rng: np.random.Generator) -> dict[str, object]:
    """Integrate v(x, s) = A x + s b by Euler and DPM-Solver++ 2M (arXiv 2211.01095, alg. 2)."""
    matrix, bias, start = 0.5 * rng.normal(size=(3, 3)), rng.normal(size=3), rng.normal(size=3)
    found: dict[str, object] = {}
    for name, sigmas in spacing().items():
        grid = np.array(sigmas, np.float32).astype(float)

        def velocity(x: Array, s: float) -> Array:
            return matrix @ x + s * bias

        x, last, lam_last = start.copy(), None, -math.inf
        for s, after in zip(grid[:-1], grid[1:], strict=True):
            clean = x - s * velocity(x, s)
            lam = -math.inf if s == 1 else math.log((1 - s) / s)
            data = clean
            if last is not None and after > 0 and lam_last > -math.inf:
                r = (lam - lam_last) / (math.log((1 - after) / after) - lam)
                data = (1 + 1 / (2 * r)) * clean - 1 / (2 * r) * last
            if after == 0:
                x = data
            elif s == 1:
                x = after * x + (1 - after) * data
            else:
                h = math.log((1 - after) / after) - lam
                x = after / s * x - (1 - after) * (math.exp(-h) - 1) * data
            last, lam_last = clean, lam
        flow = start.copy()
        for s, after in zip(grid[:-1], grid[1:], strict=True):
            flow = flow + (after - s) * velocity(flow, s)
        found[name] = {"dpmpp_2m": x.tolist(), "euler": flow.tolist()}
    given = {"matrix": matrix, "bias": bias, "start": start}
    return {name: value.tolist() for name, value in given.items()} | found


def numbers() -> dict[str, object]:
    """Return all results."""
    rng = np.random.default_rng(20261122)
    return {
        "selection": selection(rng),
        "advantages": advantages(rng),
        "diffusion_nft": [diffusion_nft(rng, 1.0, 1e-4), diffusion_nft(rng, 0.1, 0.5)],
        "flow_grpo": path_grpo(rng, dance=False),
        "dance_grpo": path_grpo(rng, dance=True),
        "schedules": schedules(),
        "spacing": spacing(),
        "solver": solver(rng),
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(numbers(), indent=1) + "\n", encoding="utf-8")
