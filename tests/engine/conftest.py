"""One live thread of a process may enter OpenMP (the engine's): the tests' own torch operations stay out of it."""

import torch

torch.set_num_threads(1)
