"""Graphs of torch.compile, captured without a compiler."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def captured_graphs() -> Iterator[list[int]]:
    """Replace torch.compile by a backend that needs no compiler, and yield the number of operations
    of each graph.

    Graphs, those of gradients too, are captured and run operation by operation, with the bits of
    eager passes.
    """
    # conftest.py imports this module, and sets torch's environment variables after its imports
    from functools import partial

    import torch
    from torch._dynamo.backends.debugging import aot_eager
    from torch._dynamo.utils import counters

    found: list[int] = []

    def backend(
        graph: torch.fx.GraphModule, inputs: list[torch.Tensor], **options: object
    ) -> Callable[..., Any]:
        found.append(sum(node.op != "placeholder" for node in graph.graph.nodes))
        return aot_eager(graph, inputs) if torch.is_grad_enabled() else graph

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", sys.executable)  # any existing program: it is never called
        patch.setattr(torch, "compile", partial(torch.compile, backend=backend))
        torch._dynamo.reset()
        counters.clear()
        try:
            yield found
            assert not counters["graph_break"]
        finally:
            torch._dynamo.reset()
