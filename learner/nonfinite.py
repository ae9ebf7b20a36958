"""NaN and infinity in training: the error that they raise, and the search for their origin."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


class PicklableError(RuntimeError):
    """An exception that can be sent between processes, whatever its constructor's arguments."""

    def __reduce__(self) -> tuple[object, ...]:
        # by default ``args`` would be passed to the constructor, which takes other arguments
        create = copyreg.__newobj__  # type: ignore[attr-defined]
        return create, (type(self), *self.args), self.__dict__


class NonFiniteTraining(PicklableError):
    """``what`` is not finite, first in ``module``; ``saved`` says where the data were saved."""

    def __init__(self, what: str, module: str | None = None, saved: str = "") -> None:
        self.what, self.module, self.saved = what, module, saved
        where = f" in module {module!r}" if module else ""
        super().__init__(f"{what}{where}; {saved or 'nothing was changed'}")


def first_nonfinite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the first name whose tensor contains NaN or infinity, or None."""
    return next(
        (name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())), None
    )


def first_nonfinite_module(model: nn.Module, forward: Callable[[], object]) -> str | None:
    """Run ``forward``; return the first leaf module to run whose output is not finite, or None."""
    names: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            outputs = output if isinstance(output, tuple | list) else [output]
            tensors = {str(i): part for i, part in enumerate(outputs) if isinstance(part, Tensor)}
            if not names and first_nonfinite(tensors) is not None:
                names.append(name)

        return hook

    leaves = [(name, part) for name, part in model.named_modules() if not any(part.children())]
    handles = [module.register_forward_hook(watch(name)) for name, module in leaves]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    return names[0] if names else None
