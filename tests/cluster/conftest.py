"""The run that others are held against."""

import pytest

from tests.cluster.runs import run_here, tiny_config


@pytest.fixture(scope="session")
def undisturbed(ray_here, tiny_sd3_dir, tmp_path_factory):
    """Three iterations with two rollout actors, nothing killed: read it, do not write to it."""
    return run_here(tiny_config(tiny_sd3_dir, tmp_path_factory.mktemp("undisturbed"), "two"))
