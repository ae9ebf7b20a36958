"""How a run can fail, as types: infrastructure, data, and the run as a whole."""

from __future__ import annotations


class RunFailed(Exception):
    """The run cannot go on; the message says why and what to do. Exit code 3."""


class InputsLost(Exception):
    """Objects that a unit needed went with the node that held them: make them again, it is nobody's
    failure.
    """


class StateLost(Exception):
    """The learner died, and with it what it learned since its checkpoint: go back there and do it
    again.
    """


class Stopped(Exception):
    """A signal asked the run to stop; the message says whether there is a checkpoint. Exit code
    130.
    """
