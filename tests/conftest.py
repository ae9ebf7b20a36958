"""Fixtures that many tests share."""

from tests.tiny_sd3 import tiny_sd3_dir

__all__ = ["tiny_sd3_dir"]
