"""What was trained, for files that somebody wrote of it."""

import pytest
import torch
from torch import nn

from cases import trained


@pytest.fixture
def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    return trained(3, 5, 2, weight_decay=0.1)
