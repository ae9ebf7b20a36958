"""A template of actor processes that imports nothing for them, so that it is there at once."""

from cluster.runtime import template


def main() -> None:
    """As ``cluster.runtime.template.main``."""
    template.import_for = lambda config: None
    template.main()
