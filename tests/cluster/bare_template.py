"""A template of actor processes that imports nothing for them, so that it is there at once."""

from cluster.runtime import template


def serve() -> None:
    """As ``cluster.runtime.template.serve``."""
    template.import_for = lambda config: None
    template.serve()
