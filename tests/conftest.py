"""Settings of every test: one thread (tests check exact bits, and neighbours share the cores), no deadlines."""

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile(
    "outrider", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("outrider")
