"""Check of this code on one GPU, in one command: ``make gpu-check``.

It needs no Ray, hub or network. Every section runs in its own process, so that a device error or a
hang does not affect the others; results from before the failure are kept. Without a GPU the same
code runs at small sizes, and reports what could not be checked.
"""
