"""Quantile Balancing of a model's routers over whole training steps: balance, masking, counting once, ranks, resume."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from openk3.errors import UserError
from openk3.ops.routing import expert_load, required_bias_histogram, route
from openk3.optim.balance import LayerBalance, LoadMeter, QuantileBalancer

EXPERTS, TOP = 32, 4


class Gate(nn.Module):
    """A router by the contract in `optim/balance.py`; its input is the logits."""

    def __init__(self, seed, experts=EXPERTS, k=TOP):
        super().__init__()
        self.num_experts, self.k, self.collect = experts, k, False
        self.offset = nn.Parameter(0.5 * torch.randn(experts, generator=torch.Generator().manual_seed(seed)))
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))

    def forward(self, x, valid=None):
        counting = self.training and self.collect
        routing = route(x + self.offset, self.e_score_correction_bias, self.k, cutoff=counting)
        if counting:
            self.load += expert_load(routing.indices, self.num_experts, valid)
            self.histogram += required_bias_histogram(
                routing.scores.detach(), routing.cutoff, self.hist_lo, self.hist_width, self.bins, valid
            )
        return routing


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        layers = [nn.Module(), nn.Module(), nn.Module()]  # layer 0 is dense
        for index, layer in enumerate(layers[1:], 1):
            layer.block_sparse_moe = nn.Module()
            layer.block_sparse_moe.gate = Gate(index, **options)
        self.layers = nn.ModuleList(layers)

    @property
    def gates(self):
        return [layer.block_sparse_moe.gate for layer in self.layers[1:]]

    def forward(self, x, valid=None):
        return [gate(x, valid) for gate in self.gates]


def tokens(seed, count=2048, scale=1.0):
    return scale * torch.randn(count, EXPERTS, generator=torch.Generator().manual_seed(seed))


def run(model, balancer, steps, valid=None, micro_batches=1, scale=1.0):
    """Layers' balance for each step."""
    history = []
    for step in steps:
        balancer.begin_step()
        x = tokens(step, scale=scale)
        masks = [None] * micro_batches if valid is None else valid.chunk(micro_batches)
        for part, mask in zip(x.chunk(micro_batches), masks, strict=True):
            model(part, mask)
        history.append(balancer.end_step())
    return history


def biases(model):
    return torch.stack([gate.e_score_correction_bias for gate in model.gates])


@pytest.mark.parametrize("observed", [True, False])
def test_all_layers_are_balanced_within_four_steps(observed):
    model = Model()
    before = [gate.e_score_correction_bias for gate in model.gates]
    history = run(model, QuantileBalancer(model, observed=observed), range(5))
    assert all(layer.max_vio > 1.5 for layer in history[0]) and all(layer.max_vio < 0.25 for layer in history[4])
    assert [layer.layer for layer in history[0]] == [1, 2]
    assert all(gate.e_score_correction_bias is b for gate, b in zip(model.gates, before, strict=True))  # in place
    assert biases(model).mean(-1).abs().max() < 1e-6


def test_metrics_by_definition():
    model = Model()
    old = biases(model)
    balance = run(model, QuantileBalancer(model), [0])[0][0]
    load = expert_load(route(tokens(0) + model.gates[0].offset, old[0], TOP).indices, EXPERTS)
    assert torch.equal(balance.load, load) and balance.q == 2048 * TOP / EXPERTS
    assert balance.max_vio == pytest.approx(load.max().item() / balance.q - 1)
    assert balance.min_load == pytest.approx(load.min().item() / balance.q)
    assert balance.dead == (load == 0).sum().item()
    new = biases(model)[0]
    assert balance.bias_range == pytest.approx((new.max() - new.min()).item())
    assert balance.delta == pytest.approx(new.abs().max().item())


def test_a_batch_is_never_routed_by_its_own_bias():
    model = Model()
    balancer = QuantileBalancer(model)
    balancer.begin_step()
    first = model(tokens(0))[0].indices
    assert torch.equal(first, model(tokens(0))[0].indices)
    balancer.end_step()
    assert not torch.equal(first, model(tokens(0))[0].indices)


def test_micro_batches_do_not_matter():
    whole, parts = Model(), Model()
    run(whole, QuantileBalancer(whole), range(3))
    run(parts, QuantileBalancer(parts), range(3), micro_batches=5)
    assert torch.equal(biases(whole), biases(parts))


def test_padding_does_not_matter():
    valid = torch.arange(2048) < 1200
    masked, short = Model(), Model()
    layers = run(masked, QuantileBalancer(masked), [0], valid=valid)[0]
    balancer = QuantileBalancer(short)
    balancer.begin_step()
    short(tokens(0)[:1200])
    balancer.end_step()
    assert torch.equal(biases(masked), biases(short)) and layers[0].load.sum() == 1200 * TOP


def test_evaluation_is_not_counted():
    plain, evaluated = Model(), Model()
    run(plain, QuantileBalancer(plain), [0])
    balancer = QuantileBalancer(evaluated)
    balancer.begin_step()
    evaluated(tokens(0))
    evaluated.eval()
    evaluated(tokens(7))
    evaluated.train()
    balancer.end_step()
    evaluated(tokens(8))  # between steps
    assert torch.equal(biases(plain), biases(evaluated))


def test_recomputation_in_the_backward_pass_is_not_counted():
    model = Model()
    balancer = QuantileBalancer(model)
    for pause, expected in ((False, 2), (True, 1)):  # without the pause the recomputation does count, so the test can fail
        balancer.begin_step()
        x = tokens(0).requires_grad_()
        weights = checkpoint(lambda x: model(x)[0].weights, x, use_reentrant=False)
        if pause:
            with balancer.paused():
                weights.sum().backward()
        else:
            weights.sum().backward()
        assert balancer.end_step()[0].load.sum() == expected * 2048 * TOP


def test_a_layer_without_tokens_keeps_its_bias():
    model = Model()
    balancer = QuantileBalancer(model)
    run(model, balancer, [0])
    before = biases(model)
    balancer.begin_step()
    model.gates[0](tokens(1))
    layers = balancer.end_step()
    assert torch.equal(biases(model)[1], before[1]) and not torch.equal(biases(model)[0], before[0])
    assert layers[1].q == 0 and layers[1].max_vio == 0 and layers[1].delta == 0


def test_counts_of_different_tokens_are_a_loud_fault():
    model = Model()
    balancer = QuantileBalancer(model)
    balancer.begin_step()
    model(tokens(0))
    model.gates[1].load += expert_load(torch.zeros(3, 1, dtype=torch.int64), EXPERTS)
    with pytest.raises(RuntimeError, match=r"layers\.2\.block_sparse_moe\.gate"):
        balancer.end_step()


def test_ema_mixes_old_and_new():
    replaced, mixed = Model(), Model()
    run(mixed, QuantileBalancer(mixed), [0])
    replaced.load_state_dict(mixed.state_dict())
    old = biases(mixed)
    run(replaced, QuantileBalancer(replaced), [1])
    run(mixed, QuantileBalancer(mixed, ema=0.75), [1])
    torch.testing.assert_close(biases(mixed), 0.75 * old + 0.25 * biases(replaced))


def test_sign_updates_move_by_gamma_towards_balance():
    model = Model()
    layers = run(model, QuantileBalancer(model, method="sign", gamma=0.01), [0])[0]
    expected = 0.01 * torch.sign(layers[0].q - layers[0].load.float())
    assert torch.equal(biases(model)[0], expected) and expected.abs().max() > 0


def test_method_none_only_measures():
    model = Model()
    layers = run(model, QuantileBalancer(model, method="none"), [0, 1])
    assert biases(model).abs().max() == 0 and layers[1][0].max_vio > 1


@pytest.mark.parametrize("observed", [True, False])
def test_resume_is_bit_equal(observed):
    straight, first, second = Model(), Model(), Model()
    run(straight, QuantileBalancer(straight, observed=observed), range(6), scale=0.05)
    before = QuantileBalancer(first, observed=observed)
    run(first, before, range(3), scale=0.05)
    second.load_state_dict(first.state_dict())
    after = QuantileBalancer(second, observed=observed)
    after.load_state_dict(before.state_dict())
    run(second, after, range(3, 6), scale=0.05)
    assert torch.equal(biases(straight), biases(second))


def test_bad_options_and_models_are_errors():
    with pytest.raises(UserError, match="unknown balancing method"):
        QuantileBalancer(Model(), method="aux-loss")
    with pytest.raises(UserError, match="ema"):
        QuantileBalancer(Model(), ema=1.0)
    with pytest.raises(UserError, match=r"layers\.1\.block_sparse_moe\.gate sends each token to 4 of 4"):
        QuantileBalancer(Model(experts=4))
    with pytest.raises(UserError, match="bfloat16: keep it float32"):
        QuantileBalancer(Model().bfloat16())


def test_a_dense_model_has_nothing_to_balance():
    balancer = QuantileBalancer(nn.Linear(2, 2))
    balancer.begin_step()
    assert balancer.end_step() == [] and LoadMeter().add([]) is None


def test_the_models_own_router_keeps_the_contract(tiny):
    model = tiny("k3").train()
    balancer = QuantileBalancer(model)
    ids = torch.randint(0, 97, (4, 64), generator=torch.Generator().manual_seed(0))
    violations = []
    for _ in range(6):
        balancer.begin_step()
        model(ids)
        layers = balancer.end_step()
        violations.append(max(layer.max_vio for layer in layers))
    assert all(layer.load.sum() == 4 * 64 * 3 for layer in layers) and [layer.layer for layer in layers] == [1, 2, 3, 4]
    assert violations[-1] < 0.3 < violations[0]


RANK = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, sys.argv[4])
import test_balance as t
from openk3.optim.balance import QuantileBalancer
torch.set_num_threads(1)
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
model = t.Model()
balancer = QuantileBalancer(model, observed=True)
for step in range(3):
    balancer.begin_step()
    model(t.skewed(step)[[slice(0, 500), slice(500, None)][rank]])  # ranks of different size and with different experts in favour
    balancer.end_step(dist.group.WORLD)
torch.save(t.biases(model), sys.argv[3])
dist.destroy_process_group()
"""


def skewed(step):
    x = tokens(step)
    x[:500] += torch.linspace(-1, 1, EXPERTS)
    return x


def test_two_ranks_equal_one_process(tmp_path):
    here = str(Path(__file__).parent)
    outputs = [tmp_path / f"bias{rank}.pt" for rank in range(2)]
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(tmp_path / "store"), str(outputs[rank]), here])
        for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in ranks] == [0, 0]
    model = Model()
    balancer = QuantileBalancer(model, observed=True)
    for step in range(3):
        balancer.begin_step()
        model(skewed(step))
        balancer.end_step()
    for output in outputs:
        assert torch.equal(torch.load(output), biases(model))


def layer(load, index=1):
    return LayerBalance(index, torch.tensor(load), sum(load) / len(load), 0.0, 0.0, 0, 0.5, 0.1)


def test_meter_sums_until_the_load_says_something():
    meter = LoadMeter(min_q=100)
    assert meter.add([layer([90, 0, 30]), layer([40, 40, 40], 2)]) is None  # q = 40
    assert meter.add([layer([90, 0, 30]), layer([40, 40, 40], 2)]) is None
    record = meter.add([layer([90, 0, 30]), layer([40, 40, 40], 2)])
    assert record["q"] == 120 and record["layer_ids"] == [1, 2] and record["bias_range"] == [0.5, 0.5]
    assert record["layers"] == [pytest.approx([2.25, 0, 0.75]), pytest.approx([1, 1, 1])]
    assert record["max_vio"] == pytest.approx([1.25, 0]) and record["worst_max_vio"] == pytest.approx(1.25)
    assert record["dead"] == [1, 0] and record["dead_experts"] == 1
    assert meter.flush() is None  # it started again
    meter.add([layer([1, 1, 1])])
    assert meter.flush()["q"] == 1
