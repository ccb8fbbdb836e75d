"""Workers side by side: one sum in one order, whoever is first."""

import pytest
import torch
from torch import Tensor

from openk3.optim.balance import QuantileBalancer
from openk3.train.workers import Workers

CPU = torch.device("cpu")


def micro_batches(count: int = 5, rows: int = 1, width: int = 24):
    draw = torch.Generator().manual_seed(3)
    for n in range(count):
        ids = torch.randint(97, (rows, width), generator=draw)
        targets = ids.roll(-1, 1)
        targets[:, -1] = -100
        yield ids, targets, torch.tensor([0, 7 + n, rows * width], dtype=torch.int32)


def step(model, count: int) -> tuple[float, dict[str, Tensor], Tensor]:
    """Loss, gradients, and expert load of one step."""
    balancer = QuantileBalancer(model)
    balancer.begin_step()
    workers = Workers(CPU, count, rows=5)
    assert workers.count == count
    loss = workers.backward(model, micro_batches(), counted=5 * 23)
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss, grads, torch.stack([layer.load for layer in balancer.end_step()])


@pytest.mark.parametrize("count", [2, 5])
def test_any_number_of_workers_gives_the_same_bits(tiny, count):
    alone, together, again = (step(tiny("k3").train(), n) for n in (1, count, count))
    for other in (together, again):
        assert alone[0] == other[0] and torch.equal(alone[2], other[2])
        assert alone[1].keys() == other[1].keys() and all(torch.equal(alone[1][k], other[1][k]) for k in alone[1])
    assert alone[2].sum() == 5 * 24 * 3 * len(alone[2])


def test_the_sum_is_the_gradient_of_the_whole(tiny):
    model, batches = tiny("k3").double().train(), list(micro_batches())
    ids, targets = (torch.cat([b[n] for b in batches]) for n in (0, 1))
    starts = [24 * n + start for n, b in enumerate(batches) for start in b[2][:-1].tolist()]
    model.loss(ids, targets, torch.tensor([*starts, 5 * 24])).backward()
    whole = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    _, grads, _ = step(model, 2)
    assert whole.keys() == grads.keys()
    for name, grad in whole.items():
        assert torch.allclose(grad, grads[name], rtol=1e-8, atol=1e-12), name


def test_a_fault_in_a_worker_is_raised_and_the_threads_are_given_back(tiny):
    threads = torch.get_num_threads()

    def broken():
        yield from micro_batches(2)
        ids, targets, cu_seqlens = next(micro_batches(1))
        yield ids + 1000, targets, cu_seqlens

    with pytest.raises(IndexError):
        Workers(CPU, 2, rows=3).backward(tiny("k3").train(), broken(), counted=10)
    assert torch.get_num_threads() == threads


def test_as_many_workers_as_threads_and_rows_allow():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert [Workers(CPU, 0, rows).count for rows in (1, 2, 8)] == [1, 2, 2]
        assert Workers(CPU, 3, 8).count == 3
    finally:
        torch.set_num_threads(threads)
