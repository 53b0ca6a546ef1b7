"""Eight CPU devices for every test; set before jax is imported."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
