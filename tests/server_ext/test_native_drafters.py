"""vLLM's own drafters as they are built beside the trees: real proposers of vLLM, without a running engine."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs

from agentspec.errors import SpeculatorError
from agentspec.server_ext.fusion.draft_model import FREE, ModelDraft
from agentspec.server_ext.settings import MedusaSettings, NgramSettings
from agentspec.server_ext.vllm_adapter.draft_models import MedusaDrafter, NgramDrafter
from agentspec.server_ext.vllm_adapter.step_reader import ForwardPass

MODEL = Path(__file__).parents[2] / "demo" / "model"
WIDTH, VOCABULARY = 192, 1536


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """vLLM's configuration of the demo's model, and the one-process group that its layers need."""
    config = EngineArgs(
        model=str(MODEL), dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=8
    ).create_engine_config()
    group = tmp_path_factory.mktemp("group") / "init"
    patch = pytest.MonkeyPatch()
    if not torch.accelerator.is_available():  # as vLLM's CPU runner has it
        patch.setattr(torch.accelerator, "empty_cache", lambda: None)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{group}", 0, "gloo")
        initialize_model_parallel(1, 1)
    yield config
    destroy_model_parallel()
    destroy_distributed_environment()
    patch.undo()


def write_heads(folder: Path, heads: int = 3, width: int = WIDTH) -> dict[str, torch.Tensor]:
    """Random Medusa heads with one shared output matrix, in the published layout."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / width**0.5

    weights = {f"medusa_heads.{k}.0.linear.weight": random(width, width) for k in range(heads)}
    weights |= {f"medusa_heads.{k}.0.linear.bias": random(width) for k in range(heads)}
    weights["lm_heads.0.weight"] = random(VOCABULARY, width) * 5
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    config = {"model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": width}
    config |= {"vocab_size": VOCABULARY, "medusa_num_heads": heads, "medusa_num_layers": 1}
    config |= {"medusa_fc_bias": True, "original_lm_head": True}
    (folder / "config.json").write_text(json.dumps(config))
    return weights


def target() -> Any:
    """All that a drafter asks of the served model is where it is."""
    return torch.nn.Linear(1, 1)


def medusa(engine: Any, folder: Path, tokens: int = 3) -> MedusaDrafter:
    settings = MedusaSettings(method="medusa", model=str(folder), num_speculative_tokens=tokens)
    drafter = MedusaDrafter(settings, engine)
    drafter.load(target())
    return drafter


def ask(drafter: Any, forward: ForwardPass, rows: list[int], proposals: list[list[int]]) -> ModelDraft:
    bound = drafter.bind(forward)
    answer: ModelDraft = bound.launch(rows, np.array(proposals, dtype=np.int64))()
    bound.close()
    return answer


def test_medusa_drafts_what_its_weights_say(engine: Any, tmp_path: Path) -> None:
    weights = write_heads(tmp_path)
    drafter = medusa(engine, tmp_path)
    # three rows: two drafted tokens of which one was accepted; a prompt still being read; no draft
    hidden = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
    forward = ForwardPass(
        scheduler_output=None,
        sampled=[[7, 8], [], [9]],
        sample_hidden_states=hidden,
        spec_decode_metadata=SimpleNamespace(num_draft_tokens=[2, 0, 0]),
    )
    proposed = [[FREE] * 3, [11, FREE, 12], [FREE] * 3]
    answer = ask(drafter, forward, [0, 0, 2], proposed)
    for k in range(3):
        states = hidden[[1, 1, 4]]
        layer = states @ weights[f"medusa_heads.{k}.0.linear.weight"].T + weights[f"medusa_heads.{k}.0.linear.bias"]
        head = states + torch.nn.functional.silu(layer)
        chances = (head @ weights["lm_heads.0.weight"].T).softmax(dim=-1).numpy()
        assert answer.top[:, k].tolist() == chances.argmax(-1).tolist()
        taken = np.where(np.array(proposed)[:, k] == FREE, answer.top[:, k], np.array(proposed)[:, k])
        assert answer.tokens[:, k].tolist() == taken.tolist()
        np.testing.assert_allclose(answer.top_probabilities[:, k], chances.max(-1), rtol=1e-4)
        np.testing.assert_allclose(answer.probabilities[:, k], chances[[0, 1, 2], taken], rtol=1e-4)


def test_some_of_the_heads_will_do(engine: Any, tmp_path: Path) -> None:
    write_heads(tmp_path)
    drafter = medusa(engine, tmp_path, tokens=2)
    forward = ForwardPass(scheduler_output=None, sampled=[[7]], sample_hidden_states=torch.ones(1, WIDTH))
    assert ask(drafter, forward, [0], [[FREE, FREE]]).tokens.shape == (1, 2)


def test_the_engines_own_configuration_stays(engine: Any, tmp_path: Path) -> None:
    write_heads(tmp_path)
    medusa(engine, tmp_path)
    assert engine.speculative_config is None


def test_heads_of_another_width_are_refused(engine: Any, tmp_path: Path) -> None:
    write_heads(tmp_path, width=64)
    with pytest.raises(SpeculatorError, match=r"hidden_size of .* is 64, the served model's is 192"):
        medusa(engine, tmp_path)


def test_more_tokens_than_heads_are_refused(engine: Any, tmp_path: Path) -> None:
    write_heads(tmp_path, heads=2)
    with pytest.raises(SpeculatorError, match="num_speculative_tokens=3 heads"):
        medusa(engine, tmp_path)


def test_a_folder_without_heads_is_refused(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(SpeculatorError, match="cannot load"):
        medusa(engine, tmp_path / "nothing")


def ngram(engine: Any, **settings: Any) -> NgramDrafter:
    drafter = NgramDrafter(NgramSettings(method="ngram", **settings), engine)
    drafter.load(target())
    return drafter


def batch_of(*texts: list[int]) -> Any:
    """What of vLLM's InputBatch n-gram look-up reads."""
    tokens = np.zeros((8, 256), dtype=np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    lengths = np.array([len(text) for text in texts] + [0] * (8 - len(texts)), dtype=np.int32)
    return SimpleNamespace(num_reqs=len(texts), num_tokens_no_spec=lengths, token_ids_cpu=tokens)


def test_ngram_answers_for_the_rows_asked(engine: Any) -> None:
    drafter = ngram(engine, num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=3)
    batch = batch_of([1, 2, 3, 4, 5, 6, 7, 1, 2], [9, 9, 9, 9], [1, 2, 3])
    forward = ForwardPass(scheduler_output=None, sampled=[[2], [9], [3]], input_batch=batch)
    free = [FREE] * 4
    # following row 0's text, following a text that departs from it at its second token, and a row without a match
    answer = ask(drafter, forward, [0, 0, 0, 2], [free, [3, 4, FREE, FREE], [3, 99, FREE, FREE], free])
    assert answer.top[:3].tolist() == [[3, 4, 5, 6]] * 3
    assert answer.tokens[:3].tolist() == [[3, 4, 5, 6], [3, 4, 5, 6], [3, 99, 5, 6]]
    sure = answer.probabilities > 0
    assert sure.tolist() == [[True] * 4, [True] * 4, [True, False, False, False], [False] * 4]
    assert (answer.top_probabilities[2] > 0).tolist() == [True, True, False, False]


THREADS = """
import numpy
import torch
from agentspec.server_ext.vllm_adapter.draft_models import limit_numba_threads
limit_numba_threads()
import numba
@numba.njit(parallel=True)
def count(values):
    for i in numba.prange(len(values)):
        values[i] += 1
count(numpy.zeros(3))
assert torch.get_num_threads() == 1, torch.get_num_threads()
"""


def test_ngram_leaves_the_workers_threads_alone() -> None:
    command, environment = [sys.executable, "-c", THREADS], {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("NUMBA_NUM_THREADS", None)  # the tests before have set it in this process
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_ngrams_that_vllm_refuses_are_refused(engine: Any) -> None:
    with pytest.raises(SpeculatorError, match="prompt_lookup_min"):
        ngram(engine, num_speculative_tokens=4, prompt_lookup_min=5, prompt_lookup_max=3)
