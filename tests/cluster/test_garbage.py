"""Cycle collection by Python while a driver runs: how rare it is, and that it is restored
afterwards.
"""

import gc

from cluster.runtime.garbage import THRESHOLDS, fewer_collections


def test_collection_frees_everything_and_keeps_earlier_frozen_objects():
    before = gc.get_threshold()
    assert gc.get_freeze_count() > 0  # tests/conftest.py
    with fewer_collections():
        assert gc.get_threshold() == THRESHOLDS != before
    assert gc.get_threshold() == before and gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        with fewer_collections():
            assert gc.get_freeze_count() > 0
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()
