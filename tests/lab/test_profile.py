"""A profile changes nothing of what it times, and times all of it."""

import pytest
import torch

from openk3.errors import UserError
from openk3.lab.profile import DEPTH, HEAD, PARTS, RECURRENCE, REST, Stopwatch, _watched, profile
from openk3.model import attn_res, kda

FEED_FORWARD = {"dense and shared feed-forward"}
MIXTURE = {"router", "experts", "latent projections and norm"}
KDA = {"KDA: projections, convolutions, gates", RECURRENCE}


@pytest.mark.parametrize("name, parts", [
    ("k3", KDA | MIXTURE | FEED_FORWARD | {"MLA", DEPTH, HEAD, REST}),
    ("k2", MIXTURE | FEED_FORWARD | {"MLA", HEAD, REST}),
    ("dense", FEED_FORWARD | {"attention", HEAD, REST}),
])
def test_a_watched_step_is_the_step(tiny, name, parts):
    model = tiny(name).train()
    ids = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(0))
    cu_seqlens = torch.tensor([0, 9, 24, 40, 48], dtype=torch.int32)
    before = (kda.kda_chunk, attn_res.mix)

    def step() -> tuple[float, dict[str, torch.Tensor]]:
        model.zero_grad(set_to_none=True)
        loss = model.loss(ids, ids.roll(-1, 1), cu_seqlens)
        loss.backward()
        return float(loss.detach()), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    plain, watch = step(), Stopwatch(torch.device("cpu"))
    with _watched(model, watch), watch.running(REST, "forward"):
        watched = step()
    assert plain[0] == watched[0] and plain[1].keys() == watched[1].keys()
    assert all(torch.equal(plain[1][n], watched[1][n]) for n in plain[1])
    assert {part for part, _ in watch.seconds} == parts
    assert {part for part, phase in watch.seconds if phase == "backward"} == parts - {REST}
    assert all(seconds > 0 for seconds in watch.seconds.values())
    assert (kda.kda_chunk, attn_res.mix) == before and not any("forward" in vars(m) for m in model.modules())
    assert watch.calls[HEAD] == 1 and sum(watch.calls[p] for p in ("MLA", "attention", "KDA: projections, convolutions, gates")) == len(
        model.model.layers)
    assert step()[0] == plain[0]


def test_what_is_inside_a_part_is_taken_off_it():
    watch = Stopwatch(torch.device("cpu"))
    with watch.running("outer", "forward"):
        with watch.running("inner", "forward"):
            torch.randn(300, 300) @ torch.randn(300, 300)
    inner, outer = watch.seconds["inner", "forward"], watch.seconds["outer", "forward"]
    assert 0 < outer and 0 < inner and watch.inner == [pytest.approx(inner + outer)]


def test_every_part_has_a_name_of_its_own():
    names = [*PARTS.values(), RECURRENCE, DEPTH, HEAD, REST]
    assert len(set(names)) == len(names)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="train.json: no such file"):
        profile(tmp_path)
