"""Cycle collection by Python while a driver runs: how rare it is, and that it is restored
afterwards.
"""

import gc

from cluster.runtime.garbage import THRESHOLDS, fewer_collections


def test_a_context_within_another_changes_nothing():
    """The outer one is that of the whole session, in tests/conftest.py."""
    assert gc.get_threshold() == THRESHOLDS and gc.get_freeze_count() > 0
    with fewer_collections():
        assert gc.get_threshold() == THRESHOLDS and gc.get_freeze_count() > 0
    assert gc.get_threshold() == THRESHOLDS and gc.get_freeze_count() > 0


def test_settings_are_restored_and_everything_is_unfrozen():
    gc.unfreeze()
    gc.set_threshold(700, 10, 10)
    try:
        with fewer_collections():
            assert gc.get_threshold() == THRESHOLDS and gc.get_freeze_count() > 0
        assert gc.get_threshold() == (700, 10, 10) and gc.get_freeze_count() == 0
    finally:
        gc.freeze()
        gc.set_threshold(*THRESHOLDS)
