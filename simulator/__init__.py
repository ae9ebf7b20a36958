"""Simulation of a run: the real driver on a virtual clock, with actors that only take time."""
