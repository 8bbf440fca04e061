"""Every test runs on one torch thread (bitwise comparisons, two-core machines) and finds the helpers beside this file."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

try:
    import torch

    torch.set_num_threads(1)
except ModuleNotFoundError:  # the review tests need no torch
    pass
