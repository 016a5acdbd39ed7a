"""A tiny PIT model and blocks of random ids for the tests of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pit_deploy.conftest import build_tiny


def build_tiny_pit(*, bridge: str = "matrix", memory: str = "stiefel", seed: int = 0) -> Any:
    """The tiny llama with the polar interface of its table."""
    import torch

    from pit_deploy.initialize import polar
    from pit_deploy.interface import PITInterface
    from pit_deploy.model import PITForCausalLM

    backbone = build_tiny(seed=seed)
    factors = polar(backbone.get_input_embeddings().weight.detach().double().numpy())
    transform = torch.from_numpy(factors.transform)
    kept = {"matrix": (transform @ transform).float(), "scalar": torch.tensor(3.0), "none": None}[bridge]
    interface = PITInterface(
        torch.from_numpy(factors.memory), torch.linalg.cholesky(transform).float(), kept, memory_kind=memory
    )
    return PITForCausalLM(backbone, interface)


@pytest.fixture
def tiny_pit() -> Callable[..., Any]:
    """`build_tiny_pit`."""
    return build_tiny_pit


@pytest.fixture
def blocks() -> np.ndarray:
    """80 blocks of 16 ids that follow a simple rule, so that there is something to learn."""
    generator = np.random.default_rng(3)
    first = generator.integers(0, 200, (80, 1))
    return ((first + 3 * np.arange(16)) % 256).astype(np.int32)
