"""The fixtures of tests/e2e."""

from tests.e2e.conftest import mark, task, whole

__all__ = ["mark", "task", "whole"]
