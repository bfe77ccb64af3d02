"""Import stub: copies between device and host caches."""

from sgl_kernel import __getattr__  # noqa: F401
