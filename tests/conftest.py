"""What holds for every test: threads, and the numbers that modules draw."""

import zlib

import numpy as np
import pytest
import torch

torch.set_num_threads(1)  # of each worker: idle threads spin, which made the recurrent tests 14 times slower


@pytest.fixture(autouse=True)
def numbers_of_its_own(request: pytest.FixtureRequest) -> None:
    """PyTorch's generator and a module's own start anew for each test, whichever ran before in the same process."""
    seed = zlib.crc32(request.node.nodeid.encode())
    torch.manual_seed(seed)
    for value in vars(request.module).values():
        if isinstance(value, np.random.Generator):
            value.bit_generator.state = np.random.default_rng(seed).bit_generator.state
