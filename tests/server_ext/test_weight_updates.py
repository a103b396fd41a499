"""Test that new weights are noticed wherever they are loaded into the served model."""

from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from agentspec.server_ext.vllm_adapter.worker.runner import watch_weights


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[Any] = []

    def load_weights(self, weights: Any) -> set[str]:
        self.loaded += weights
        return {name for name, _ in weights}


def test_loading_weights_is_noticed_and_works_as_before() -> None:
    model, noticed = Model(), []
    model.load_weights([("at start", 0)])
    watch_weights(model, lambda: noticed.append(len(model.loaded)))
    assert model.load_weights([("layer", 1)]) == {"layer"} and model.loaded[-1] == ("layer", 1)
    assert model.load_weights(weights=[("layer", 2)]) == {"layer"}
    assert noticed == [1, 2]
    assert not model.state_dict()
