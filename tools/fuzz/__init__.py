"""Whatever a user can hand over, made wrong at random: ``python -m tools.fuzz --examples N``."""
