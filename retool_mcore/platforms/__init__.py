"""Platforms: everything that differs between a laptop, NVIDIA GPUs and Ascend NPUs."""

from retool_mcore.platforms.base import Platform, get_platform

__all__ = ["Platform", "get_platform"]
