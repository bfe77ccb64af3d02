"""The fixtures of tests/e2e."""

from tests.e2e.conftest import gsm8k, mark, task, whole

__all__ = ["gsm8k", "mark", "task", "whole"]
