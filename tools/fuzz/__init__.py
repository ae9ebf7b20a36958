"""Fuzzing of everything that a user can provide: ``python -m tools.fuzz --examples N``."""
