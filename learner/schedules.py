"""Schedules over iterations: learning rate, decay of averages, and early stopping."""

from __future__ import annotations

from collections.abc import Mapping

from configs.running import Stop
from configs.training import Ema, OldPolicy, Optimizer


def learning_rate(settings: Optimizer, done: int, iterations: int) -> float:
    """Return the learning rate of the iteration after ``done`` of ``iterations``.

    Warm-up rises linearly and reaches ``lr`` in the last of ``warmup_iterations``. ``linear`` then
    falls from ``lr`` in the first iteration after the warm-up by equal steps that would reach zero
    after the last.
    """
    if done < settings.warmup_iterations:
        return settings.lr * (done + 1) / settings.warmup_iterations
    if settings.schedule == "constant":
        return settings.lr
    length = max(iterations - settings.warmup_iterations, 1)
    return settings.lr * max(iterations - done, 0) / length


def ema_decay(settings: Ema, s: int) -> float:
    """Return d of theta_ema <- d theta_ema + (1 - d) theta after s = 1, 2, ... (see ``Ema``)."""
    # the warm-up of diffusers' EMAModel
    return min((1 + s) / (10 + s), settings.decay) if settings.warmup else settings.decay


def old_policy_decay(settings: OldPolicy, s: int) -> float:
    """Return d of theta_old <- d theta_old + (1 - d) theta after iteration s = 1, 2, ...

    From DiffusionNFT, arXiv 2509.16117. ``settings`` are resolved
    (``RunConfig.resolved_old_policy``). Raises ValueError if they have no schedule.
    """
    match settings.schedule:
        case "constant":
            return settings.value
        case "linear_cap":
            return min(settings.slope * s, settings.cap)
        case "delayed_linear_cap":
            return min(settings.slope * max(s - settings.delay, 0), settings.cap)
        case None:
            raise ValueError(
                "old_policy.schedule is None: set one, or use RunConfig.resolved_old_policy"
            )


def stop_reason(stop: Stop, metrics: Mapping[str, float], minutes: float) -> str | None:
    """Return why the run should stop now, or None.

    ``metrics`` are those of the last update, ``minutes`` the duration of training so far. A run
    with ``stop.max_kl`` measures loss/kl in every update; if it is missing, nothing was updated and
    the run continues.
    """
    kl = metrics.get("loss/kl")
    if stop.max_kl is not None and kl is not None and kl > stop.max_kl:
        return f"loss/kl is {kl:.6g}, above stop.max_kl = {stop.max_kl:g}"
    if stop.max_minutes is not None and minutes >= stop.max_minutes:
        return f"{minutes:.1f} minutes of training, stop.max_minutes = {stop.max_minutes:g}"
    return None
