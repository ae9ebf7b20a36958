"""NaN and infinity in training: the error that stops an update, and where they came from."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


class CrossesProcesses(RuntimeError):
    """An exception that arrives as it left, whatever its constructor takes."""

    def __reduce__(self) -> tuple[object, ...]:
        # by itself it would be made again from its arguments, and these are not the constructor's
        again = copyreg.__newobj__  # type: ignore[attr-defined]
        return again, (type(self), *self.args), self.__dict__


class NonFiniteTraining(CrossesProcesses):
    """``what`` was not finite, in which ``module`` first, and where the data were ``saved``."""

    def __init__(self, what: str, module: str | None = None, saved: str = "") -> None:
        self.what, self.module, self.saved = what, module, saved
        where = f" in module {module!r}" if module else ""
        super().__init__(f"{what}{where}; {saved or 'nothing was changed'}")


def first_nonfinite(tensors: Mapping[str, Tensor]) -> str | None:
    """The first name whose tensor holds a NaN or an infinity."""
    return next(
        (name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())), None
    )


def first_nonfinite_module(model: nn.Module, forward: Callable[[], object]) -> str | None:
    """The first leaf module, in order of execution, whose output in ``forward`` is not finite."""
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            outputs = output if isinstance(output, tuple | list) else [output]
            tensors = {str(i): part for i, part in enumerate(outputs) if isinstance(part, Tensor)}
            if not found and first_nonfinite(tensors) is not None:
                found.append(name)

        return hook

    leaves = [(name, part) for name, part in model.named_modules() if not any(part.children())]
    handles = [module.register_forward_hook(watch(name)) for name, module in leaves]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None
