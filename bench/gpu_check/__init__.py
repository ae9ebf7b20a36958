"""What this code does on one GPU, in one command: ``make gpu-check``.

Without Ray, a hub or a network. Every section runs in a process of its own, so that neither an
error of the device nor a hang takes the others along; what a section found until then is kept.
Without a GPU the same code runs at small sizes, and what that cannot tell is said.
"""
