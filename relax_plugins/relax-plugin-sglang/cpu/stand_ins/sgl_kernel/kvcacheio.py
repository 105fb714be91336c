"""SGLang 0.5.11 and 0.5.12 import kernels of their host caches from here, on a CPU too, and never call them there."""

from sgl_kernel import __getattr__  # noqa: F401
