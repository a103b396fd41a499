"""Test that drafting leaves rollouts as they are: log probabilities, distribution, and new weights."""

import json
from collections import Counter
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from demo.tasks import make_task
from tests.end_to_end.conftest import MODEL, other_weights, run_script
from tests.end_to_end.mixed_load import code

pytestmark = [pytest.mark.engine, pytest.mark.rl, pytest.mark.timeout(3200)]


SAMPLES, ROUNDS, POSITIONS = 20_000, 16, 4


def prompts(count: int) -> list[list[int]]:
    """Return chats of the demo's tasks, as token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    chats = [[{"role": "user", "content": make_task(1_000_200 + i).request}] for i in range(count)]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        for chat in chats
    ]


def run(
    folder: Path,
    method: str,
    rounds: list[dict[str, Any]],
    model: Path = MODEL,
    seed: int = 0,
    in_process: bool = True,
    store: str = "memory://",
) -> list[dict[str, Any]]:
    """Run rounds on a new engine. Return its answers."""
    job = json.dumps({"rounds": rounds, "seed": seed, "store": store})
    out = folder / f"{method}.json"
    found: list[dict[str, Any]] = run_script("offline_run.py", str(model), method, job, out=out, in_process=in_process)
    return found


def recomputed(prompt: list[int], tokens: list[int], temperature: float, model: Any) -> torch.Tensor:
    """Return the tokens' log probabilities behind the prompt, by transformers in float32."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    chosen = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(tokens)[:, None])
    return chosen[:, 0]


def test_log_probabilities_are_those_of_a_recomputation(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    asked, n, temperatures = prompts(4), 8, (1.0, 0.7, 1.0, 0.7)
    rounds = [
        {"prompts": asked, "n": n, "temperature": temperature, "max_tokens": 64, "logprobs": True, "ignore_eos": True}
        for temperature in temperatures
    ]
    found = run(tmp_path, "agentspec", rounds)
    rejected = sum(got["drafted"] - got["accepted"] for got in found)
    assert rejected > 30, "drafts must have been rejected, too"
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for temperature, got in zip(temperatures, found, strict=True):
        assert got["accepted"] > 300
        for number, answer in enumerate(got["answers"]):
            expected = recomputed(asked[number // n], answer["tokens"], temperature, model)
            assert len(answer["logprobs"]) == 64
            assert (expected - torch.tensor(answer["logprobs"])).abs().max() < 1e-4


def chi_square(ours: Counter[Any], theirs: Counter[Any]) -> float:
    """Return the probability that two samples of one distribution differ as much.

    Outcomes seen less than 20 times count as one.
    """
    both = ours + theirs
    rare = {outcome for outcome, count in both.items() if count < 20}
    cells = [(ours[outcome], theirs[outcome]) for outcome in both if outcome not in rare]
    if sum(both[outcome] for outcome in rare) >= 20:
        cells.append((sum(ours[outcome] for outcome in rare), sum(theirs[outcome] for outcome in rare)))
    assert len(cells) > 2, "the distribution is too narrow to tell anything"
    share = ours.total() / (ours.total() + theirs.total())
    # Given the counts of both, a sample's expected counts are in proportion to its size.
    statistic = sum((x - share * (x + y)) ** 2 / (share * (1 - share) * (x + y)) for x, y in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def test_20_000_samples_have_plain_vllms_distribution(tmp_path: Path) -> None:
    """Compare counts of tokens at each position, and of whole answers. Each engine has a seed of its own."""
    from transformers import AutoTokenizer

    prompt = AutoTokenizer.from_pretrained(MODEL).encode(code(77, 8))  # half of what is drafted behind it is accepted
    one = {"prompts": [prompt], "n": SAMPLES // ROUNDS, "temperature": 1.0, "max_tokens": POSITIONS}
    samples = {}
    for seed, method in enumerate(("plain", "agentspec"), 1):
        found = run(tmp_path, method, [{**one, "ignore_eos": True}] * ROUNDS, seed=seed)
        samples[method] = [tuple(answer["tokens"]) for each in found for answer in each["answers"]]
        assert len(samples[method]) == SAMPLES
    drafted, accepted = (sum(each[name] for each in found) for name in ("drafted", "accepted"))
    assert accepted > SAMPLES / 10 and drafted - accepted > SAMPLES / 10, "too little was drafted to tell anything"
    outcomes: list[Callable[[tuple[int, ...]], object]] = [itemgetter(position) for position in range(POSITIONS)]
    outcomes.append(lambda answer: answer)
    chances = [chi_square(*(Counter(map(of, samples[name])) for name in samples)) for of in outcomes]
    assert min(chances) > 1e-4 / len(chances)


@pytest.mark.parametrize("in_process", [True, False])
def test_what_generate_returned_is_in_the_history_and_soon_in_the_store(in_process: bool, tmp_path: Path) -> None:
    few = {"prompts": prompts(3), "n": 4, "temperature": 1.0, "max_tokens": 20, "ignore_eos": True}
    found = run(tmp_path, "agentspec", [few, few], in_process=in_process)
    assert [each["written"] for each in found] == [12, 12]
    if in_process:  # all end with the last step; other engine processes handle that before any question
        assert [each["finished"] for each in found] == [12, 12]


def test_a_script_that_ends_saves_the_snapshot(tmp_path: Path) -> None:
    """The engine is in the script's process, which ends without deleting it."""
    few = {"prompts": prompts(3), "temperature": 1.0, "max_tokens": 20}
    run(tmp_path, "agentspec", [few], store=f"sqlite:///{tmp_path}/run.db")
    assert list(tmp_path.glob("run.db-*.snapshot"))


def test_sleeping_and_waking_keep_the_history(tmp_path: Path) -> None:
    """On a CPU, vLLM empties its KV cache and keeps the weights, which a trainer loads again after level 2."""
    greedy = {"prompts": prompts(4), "temperature": 0.0, "max_tokens": 60}
    rounds = [greedy, {**greedy, "sleep": 1}, {**greedy, "sleep": 2, "weights": str(MODEL)}]
    first, *later = run(tmp_path, "agentspec", rounds)
    for each in later:
        assert each["answers"] == first["answers"] and each["accepted"] > first["accepted"]


def test_new_weights_with_the_old_policys_history(tmp_path: Path) -> None:
    new = other_weights(tmp_path / "new")
    greedy = {"prompts": prompts(8), "temperature": 0.0, "max_tokens": 80}
    old, again, trained, later = run(tmp_path, "agentspec", [greedy, greedy, {**greedy, "weights": str(new)}, greedy])
    fresh = run(tmp_path, "plain", [greedy], new)[0]
    assert again["answers"] == old["answers"] and again["accepted"] > old["accepted"]
    assert trained["answers"] == fresh["answers"] == later["answers"]
    assert [each["weight_updates"] for each in (old, again, trained, later)] == [0, 0, 1, 0]
    changed = sum(a != b for a, b in zip(trained["answers"], old["answers"], strict=True))
    assert changed >= 4, "the new weights must say something else"
    assert trained["accepted"] > 0 and trained["drafted"] > trained["accepted"], "the old text must have been drafted"
