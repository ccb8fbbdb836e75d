"""Learning rates by progress: ends, corners, continuity, and bad options."""

import pytest

from openk3.errors import UserError
from openk3.optim.schedule import SHAPES, lr_at


@pytest.mark.parametrize("shape", SHAPES)
def test_warms_up_from_zero_to_the_peak(shape):
    def at(x):
        return lr_at(x, peak=2.0, warmup=0.1, shape=shape)

    assert at(0) == 0 and at(0.05) == pytest.approx(1.0) and at(0.1) == pytest.approx(2.0)
    assert at(-1) == 0 and at(2) == at(1)


def test_cosine():
    assert lr_at(0.55, peak=2.0, warmup=0.1) == pytest.approx(1.0)
    assert lr_at(1.0, peak=2.0, warmup=0.1) == pytest.approx(0.0)
    assert lr_at(1.0, peak=2.0, floor=0.1) == pytest.approx(0.2)
    assert lr_at(0.55, peak=2.0, warmup=0.1, floor=0.5) == pytest.approx(1.5)


def test_wsd_holds_then_falls_linearly():
    def at(x):
        return lr_at(x, peak=2.0, warmup=0.1, floor=0.1, shape="wsd", decay=0.4)

    assert at(0.2) == at(0.6) == 2.0
    assert at(0.8) == pytest.approx(1.1) and at(1.0) == pytest.approx(0.2)


def test_constant_stays():
    assert {lr_at(x, peak=3.0, warmup=0.0, shape="constant") for x in (0, 0.3, 1)} == {3.0}


@pytest.mark.parametrize("shape", SHAPES)
def test_continuous_and_never_above_the_peak(shape):
    rates = [lr_at(i / 10000, peak=1.0, warmup=0.02, floor=0.05, shape=shape) for i in range(10001)]
    assert max(abs(a - b) for a, b in zip(rates, rates[1:], strict=False)) < 0.006 and max(rates) <= 1.0


@pytest.mark.parametrize("bad", [{"shape": "step"}, {"warmup": 1.0}, {"floor": 2.0}, {"shape": "wsd", "warmup": 0.5, "decay": 0.6}])
def test_bad_options_are_errors(bad):
    with pytest.raises(UserError, match="schedule"):
        lr_at(0.5, peak=1.0, **bad)
