"""One thread per worker for PyTorch: its idle threads spin, which made the recurrent tests 14 times slower."""

import torch

torch.set_num_threads(1)
