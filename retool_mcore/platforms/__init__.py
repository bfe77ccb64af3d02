"""Platforms: all code that differs between CPUs, NVIDIA GPUs and Ascend NPUs."""

from retool_mcore.platforms.base import Platform, get_platform

__all__ = ["Platform", "get_platform"]
