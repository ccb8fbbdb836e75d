"""Generation: each sampling rule as defined, rows of a batch as if alone, and seeds that repeat."""

import pytest
import torch
from torch import Tensor

from openk3.model.generate import Sampling, sample
from openk3.model.k3 import K3ForCausalLM

GREEDY = Sampling(temperature=0)
PROMPTS = [[5, 6, 7], [8] * 11, [9, 3], [1, 2, 3, 4, 5, 6, 7]]
LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.0, -0.5, -3.0])


@pytest.fixture(scope="module")
def model(tiny) -> K3ForCausalLM:
    return tiny("k3")


def frequencies(logits: Tensor, sampling: Sampling, draws: int = 20_000, seen: Tensor | None = None) -> Tensor:
    """How often each token comes."""
    rows = logits.expand(draws, -1)
    ids = sample(rows, sampling, None if seen is None else seen.expand(draws, -1), torch.Generator().manual_seed(0))
    return torch.bincount(ids, minlength=len(logits)) / draws


def assert_distribution(got: Tensor, want: Tensor) -> None:
    assert ((got > 0) <= (want > 0)).all(), "a token that was cut came"
    torch.testing.assert_close(got, want, rtol=0, atol=0.015)


# One token


def test_greedy_takes_the_largest() -> None:
    logits = torch.randn(40, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample(logits, GREEDY), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature_divides_the_logits(temperature: float) -> None:
    assert_distribution(frequencies(LOGITS, Sampling(temperature=temperature)), torch.softmax(LOGITS / temperature, -1))


@pytest.mark.parametrize("k", [1, 3, 6, 100])
def test_top_k_keeps_the_k_largest(k: int) -> None:
    kept = LOGITS.masked_fill(torch.arange(6) >= k, -torch.inf)
    assert_distribution(frequencies(LOGITS, Sampling(top_k=k)), torch.softmax(kept, -1))


@pytest.mark.parametrize("p,count", [(0.01, 1), (0.45, 1), (0.46, 2), (0.75, 3), (0.97, 5), (1.0, 6)])
def test_top_p_keeps_the_fewest_that_reach_p(p: float, count: int) -> None:
    """Probabilities 0.455, 0.276, 0.167, 0.062, 0.037, 0.003: the token that crosses p stays."""
    shuffle = torch.tensor([3, 0, 5, 1, 4, 2])                        # sorted order isn't token order
    kept = LOGITS.masked_fill(torch.arange(6) >= count, -torch.inf)
    assert_distribution(frequencies(LOGITS[shuffle], Sampling(top_p=p)), torch.softmax(kept, -1)[shuffle])


@pytest.mark.parametrize("p,count", [(0.0, 6), (0.1, 4), (0.3, 3), (0.5, 2), (0.99, 1)])
def test_min_p_is_relative_to_the_largest(p: float, count: int) -> None:
    """Ratios 1, 0.607, 0.368, 0.135, 0.082, 0.007."""
    kept = LOGITS.masked_fill(torch.arange(6) >= count, -torch.inf)
    assert_distribution(frequencies(LOGITS, Sampling(min_p=p)), torch.softmax(kept, -1))


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_repetition_penalty_moves_seen_tokens_away_or_nearer(penalty: float) -> None:
    """Positive logits are divided, negative ones multiplied; unseen tokens and logits of zero stay."""
    seen = torch.tensor([True, False, False, True, True, False])
    moved = torch.tensor([2.0 / penalty, 1.5, 1.0, 0.0, -0.5 * penalty, -3.0])
    assert_distribution(frequencies(LOGITS, Sampling(repetition_penalty=penalty), seen=seen), torch.softmax(moved, -1))


def test_repetition_penalty_counts_in_greedy_decoding_too() -> None:
    seen = torch.tensor([[True, False, False, False, False, False]])
    assert sample(LOGITS[None], Sampling(temperature=0, repetition_penalty=1.3), seen).item() == 0
    assert sample(LOGITS[None], Sampling(temperature=0, repetition_penalty=1.4), seen).item() == 1


@pytest.mark.parametrize("seed", range(6))
def test_all_together_are_what_transformers_keeps(seed: int) -> None:
    """Penalty, temperature, top-k, top-p, min-p, in this order: the rules don't commute."""
    logits_process = pytest.importorskip("transformers.generation.logits_process")
    draw = torch.Generator().manual_seed(seed)
    logits, prompt = torch.randn(14, generator=draw), torch.randint(14, (1, 5), generator=draw)
    k, p, floor, penalty, temperature = 3 + seed, (0.5, 0.8, 0.95)[seed % 3], (0.05, 0.2, 0.4)[seed % 3], 1.5, 1.7
    scores = logits[None].clone()
    for process in (
        logits_process.RepetitionPenaltyLogitsProcessor(penalty), logits_process.TemperatureLogitsWarper(temperature),
        logits_process.TopKLogitsWarper(k), logits_process.TopPLogitsWarper(p), logits_process.MinPLogitsWarper(floor),
    ):  # fmt: skip
        scores = process(prompt, scores)
    seen = torch.zeros(1, 14, dtype=torch.bool).scatter_(1, prompt, True)
    sampling = Sampling(temperature, p, k, floor, penalty)
    assert_distribution(frequencies(logits, sampling, seen=seen), torch.softmax(scores[0], -1))


def test_rows_are_drawn_each_from_its_own_logits() -> None:
    logits = torch.full((3, 5), -20.0)
    logits[0, 4], logits[1, 0], logits[2, 2] = 20, 20, 20
    assert sample(logits, Sampling(top_p=0.9, top_k=3, min_p=0.1), generator=torch.Generator().manual_seed(0)).tolist() == [4, 0, 2]


def test_half_precision_and_minus_infinity_are_taken() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 2.0, -torch.inf]], dtype=torch.bfloat16)
    ids = sample(logits.expand(500, -1), Sampling(top_p=0.99, top_k=3), generator=torch.Generator().manual_seed(0))
    assert set(ids.tolist()) == {0, 2}


@pytest.mark.parametrize(
    "name,value", [("temperature", -0.1), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", 1.1), ("min_p", 1.0), ("min_p", -0.1),
                   ("top_k", -1), ("repetition_penalty", 0.0)])  # fmt: skip
def test_a_rule_out_of_range_is_refused_in_one_line(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name} .*out of range: give a value") as caught:
        Sampling(**{name: value})
    assert "\n" not in str(caught.value)


# Whole generations


@torch.no_grad()
def naive(model: K3ForCausalLM, prompt: list[int], count: int, penalty: float = 1.0) -> list[int]:
    """Greedy, without a cache: the whole text again for every token."""
    text = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([text])).logits[0, -1]
        for i in set(text):
            logits[i] = logits[i] / penalty if logits[i] > 0 else logits[i] * penalty
        text.append(int(logits.argmax()))
    return text[len(prompt) :]


def test_a_greedy_batch_equals_prompts_one_by_one(variant: str, tiny) -> None:
    """With a penalty, so that what was seen is told apart row by row too."""
    model, sampling = tiny(variant), Sampling(temperature=0, repetition_penalty=1.4)
    together = model.generate(PROMPTS, 8, sampling=sampling)
    assert together == [model.generate([prompt], 8, sampling=sampling)[0] for prompt in PROMPTS]
    assert together[0] == naive(model, PROMPTS[0], 8, 1.4)


def test_golden_model_greedy(golden) -> None:
    model, ids = golden("k3-tiny").model(), golden("k3-tiny")["input_ids"]
    prompts = [ids[0, :5].tolist(), ids[1, :40].tolist(), ids[0, :17].tolist()]
    together = model.generate(prompts, 10, sampling=GREEDY)
    assert together == [naive(model, prompt, 10) for prompt in prompts]


def test_a_stop_id_ends_its_row_and_is_given_back(model) -> None:
    free = model.generate(PROMPTS, 12, sampling=GREEDY)
    stop = free[0][4]
    stopped = model.generate(PROMPTS, 12, sampling=GREEDY, stop_ids=[stop, 96])
    for row, whole in zip(stopped, free, strict=True):
        ends = [i for i, one in enumerate(whole) if one in (stop, 96)]
        assert row == (whole[: ends[0] + 1] if ends else whole)
    assert len(stopped[0]) <= 5 and max(map(len, stopped)) == 12


def test_what_a_row_has_seen_stays_with_it_when_others_end(model) -> None:
    sampling = Sampling(temperature=0, repetition_penalty=1.6)
    limits = [2, 9, 4, 9]
    heard = [0] * 4

    def listen(row: int, one: int) -> bool:
        heard[row] += 1
        return heard[row] == limits[row]

    got = model.generate(PROMPTS, 20, sampling=sampling, on_token=listen)
    assert got == [model.generate([prompt], n, sampling=sampling)[0] for prompt, n in zip(PROMPTS, limits, strict=True)]


def test_tokens_are_told_as_they_come_and_the_listener_may_end_a_row(model) -> None:
    free, heard = model.generate(PROMPTS, 6, sampling=GREEDY), []

    def listen(row: int, one: int) -> bool:
        heard.append((row, one))
        return row == 2 and sum(r == 2 for r, _ in heard) == 3

    got = model.generate(PROMPTS, 6, sampling=GREEDY, on_token=listen)
    assert got == [free[0], free[1], free[2][:3], free[3]]
    assert [row for row, _ in heard] == 3 * [0, 1, 2, 3] + 3 * [0, 1, 3]
    assert [[one for r, one in heard if r == row] for row in range(4)] == got


def test_no_step_is_made_after_the_last_row_ended(model, monkeypatch) -> None:
    steps = []
    forward = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, ids, *a, **kw: steps.append(tuple(ids.shape)) or forward(self, ids, *a, **kw))
    model.generate(PROMPTS[:2], 3, sampling=GREEDY, on_token=lambda row, _: row == 1)
    assert steps == [(2, 11), (1, 1), (1, 1)]


def test_the_seed_repeats(model) -> None:
    runs = [model.generate(PROMPTS, 12, seed=seed) for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]
    torch.manual_seed(7)
    first = model.generate(PROMPTS, 6)
    torch.manual_seed(7)
    assert model.generate(PROMPTS, 6) == first


def test_a_seed_leaves_torch_s_own_generator_alone(model) -> None:
    before = torch.get_rng_state()
    model.generate(PROMPTS, 3, seed=1)
    assert torch.equal(before, torch.get_rng_state())


def test_sampled_rows_of_one_prompt_differ(model) -> None:
    assert len({tuple(row) for row in model.generate([PROMPTS[0]] * 6, 8, seed=0)}) > 1


def test_a_cache_continues_what_it_holds(model) -> None:
    whole = model.generate(PROMPTS, 8, sampling=GREEDY)
    cache = model.new_cache(4)
    with torch.no_grad():
        heads = torch.tensor([prompt[:1] for prompt in PROMPTS])
        model(heads, cache=cache)
    assert model.generate([prompt[1:] for prompt in PROMPTS], 8, sampling=GREEDY, cache=cache) == whole
    assert cache.lengths.tolist() == [len(prompt) + 7 for prompt in PROMPTS]  # the last token of a row is not fed


def test_prompts_may_be_a_tensor(model) -> None:
    ids = torch.tensor([[5, 6, 7], [8, 9, 3]])
    assert model.generate(ids, 4, sampling=GREEDY) == model.generate(ids.tolist(), 4, sampling=GREEDY)


def test_nothing_asked_gives_nothing(model) -> None:
    assert model.generate([], 5) == []
    assert model.generate(PROMPTS, 0) == [[], [], [], []]


def test_the_mode_of_the_model_is_kept(model) -> None:
    def fail(row: int, one: int) -> bool:
        assert not model.training
        raise RuntimeError("listener")

    try:
        model.train()
        with pytest.raises(RuntimeError, match="listener"):
            model.generate(PROMPTS, 3, on_token=fail)
        assert model.training
    finally:
        model.eval()
    model.generate(PROMPTS, 2)
    assert not model.training


@pytest.mark.parametrize("prompts,why", [([[1], []], "prompt 1 is empty"), ([[97]], "prompt 0 has a token id outside 0 … 96"),
                                         ([[3], [-1]], "prompt 1 has a token id outside")])  # fmt: skip
def test_a_bad_prompt_is_refused_in_one_line(prompts: list[list[int]], why: str, model) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        model.generate(prompts, 3)
    assert "\n" not in str(caught.value)


def test_generating_counts_no_expert_loads(tiny) -> None:
    model = tiny("k3").train()
    gate = model.model.layers[1].block_sparse_moe.gate
    gate.collect, gate.load = True, torch.zeros(8, dtype=torch.int64)
    gate.histogram = torch.zeros(8, gate.bins, dtype=torch.int32)
    model.generate(PROMPTS, 3, sampling=GREEDY)
    assert gate.load.sum() == 0 and gate.histogram.sum() == 0
