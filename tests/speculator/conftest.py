"""Run torch on one thread: with small matrices, more threads only wait for each other."""

import torch

torch.set_num_threads(1)
