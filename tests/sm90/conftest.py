"""The Hopper suite runs only where a Hopper GPU and the compiled kernels are; elsewhere every test is skipped with the reason."""

from pathlib import Path

import pytest
import torch
from hopper import missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.sm90)
            if missing():
                item.add_marker(pytest.mark.skip(reason=f"{missing()}"))


@pytest.fixture(autouse=True)
def _free_gpu_memory():
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
