"""The interval of a paired difference; a comparison of tiny models, whole and interrupted."""

import json
import os
import signal

import pytest

from openk3.errors import UserError
from openk3.lab.compare import compare, paired, student_t
from openk3.train.listener import Listener
from openk3.train.options import TrainOptions


@pytest.mark.parametrize("degrees, expected", [(1, 12.7062), (2, 4.30265), (3, 3.18245), (9, 2.26216), (100, 1.98397)])
def test_students_quantile_is_the_tables(degrees, expected):
    assert student_t(0.95, degrees) == pytest.approx(expected, rel=1e-5)


def test_a_paired_difference_has_its_interval():
    found = paired([1.5, 1.6, 1.7], [1.4, 1.5, 1.5])
    assert found["mean"] == pytest.approx(0.4 / 3)
    assert found["half_width"] == pytest.approx(4.30265 * 0.057735 / 3**0.5, rel=1e-4)
    assert paired([1.0], [2.0])["half_width"] is None


class StopAtRun(Listener):
    """Ctrl-C in the first step of the n-th run."""

    def __init__(self, run: int):
        self.left = run

    def step(self, metrics, progress):
        if metrics["step"] == 1:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupted_comparison_goes_on_where_it_was(tiny_config, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    for n in range(12):
        (tmp_path / "data" / f"m{n}.py").write_text("\n".join(f"def f{n}(x, y={k}):\n    return x + {k * n} * y\n" for k in range(20)))
    configs = []
    for name in ("k3", "dense"):
        tiny_config(name).save(tmp_path / name)
        configs.append(str((tmp_path / name / "config.json").rename(tmp_path / f"{name}.json")))
    options = TrainOptions(data=(tmp_path / "data",), vocab_size=300, seq_len=32, batch_size=4, dtype="float32", device="cpu")
    told: list[str] = []

    def go(listener: Listener | None = None) -> dict:
        return compare(configs, tmp_path / "out", options=options, seeds=2, minutes=0.004, rates=(0.005, 0.01), tune_minutes=0.002,
                       listener=listener, tell=told.append)

    with pytest.raises(KeyboardInterrupt):
        go(StopAtRun(3))
    assert len(told) == 3 and not (tmp_path / "out" / "comparison.json").exists()
    found = go()
    assert len(told) == 3 + 2 + 4                                        # the third run anew, and those that were missing
    assert found == json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [(r["config"], r["seed"]) for r in found["runs"]] == [(c, seed) for seed in (1, 2) for c in ("k3", "dense")]
    ours, theirs = ([r["bits_per_byte"] for r in found["runs"] if r["config"] == c] for c in ("k3", "dense"))
    assert found["difference"]["dense"]["pairs"] == [b - a for a, b in zip(ours, theirs, strict=True)]
    assert {r["lr"] for r in found["runs"]} <= {0.005, 0.01} and set(found["profile"]) == {"k3", "dense"}
    assert {p["name"] for p in found["profile"]["dense"]["parts"]} >= {"attention", "optimizer"}


def test_configs_of_one_name_are_refused(tmp_path):
    with pytest.raises(UserError, match="one name"):
        compare(["nano", str(tmp_path / "nano.json")], tmp_path, options=TrainOptions())
