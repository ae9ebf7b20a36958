"""A template of actor processes that imports nothing for them, so that it starts at once."""

from cluster.runtime import template


def main() -> None:
    """Serve as ``cluster.runtime.template.main`` does."""
    template.import_for = lambda config: None
    template.main()
