import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The machine's other cores belong to other tests."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
