"""Errors for NaN and infinity in training, and the search for the module that produced them."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


class CrossesProcesses(RuntimeError):
    """Exception that can be pickled whatever arguments its constructor takes."""

    def __reduce__(self) -> tuple[object, ...]:
        # by default pickle calls the constructor with self.args, which are not its arguments here
        create = copyreg.__newobj__  # type: ignore[attr-defined]
        return create, (type(self), *self.args), self.__dict__


class NonFiniteTraining(CrossesProcesses):
    """A value in training is NaN or infinite, which stops the update.

    ``what`` was not finite, ``module`` is the first module that computed it, if known, and
    ``saved`` is the part of the message that says where the data were saved.
    """

    def __init__(self, what: str, module: str | None = None, saved: str = "") -> None:
        self.what, self.module, self.saved = what, module, saved
        where = f" in module {module!r}" if module else ""
        super().__init__(f"{what}{where}; {saved or 'nothing was changed'}")


def first_nonfinite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor that has a NaN or an infinity, or None."""
    return next(
        (name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())), None
    )


def first_nonfinite_module(model: nn.Module, forward: Callable[[], object]) -> str | None:
    """Call ``forward``; return the first leaf module with an output that is not finite, or None.

    First means in order of execution.
    """
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
