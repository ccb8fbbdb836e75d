"""A run repeats itself, survives what can happen to it, and says in one line what it can't do."""

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from openk3 import checkpoint
from openk3.config import K3Config
from openk3.errors import UserError
from openk3.presets import dense_nano, layer_split, nano
from openk3.train import runfolder
from openk3.train.loop import Listener, Trainer, micro_batches, train
from openk3.train.options import TrainOptions


def tiny(config: K3Config) -> K3Config:
    """Every part of a preset at the size of a test."""
    text = config.text_config
    changes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2,
                   qk_nope_head_dim=8 if text.kv_lora_rank else 0, qk_rope_head_dim=8, v_head_dim=16)
    if text.num_experts:
        changes |= dict(num_experts=8, num_experts_per_token=2, moe_intermediate_size=16, routed_expert_hidden_size=16,
                        attn_res_block_size=2, q_lora_rank=16, kv_lora_rank=16)
    if text.linear_attn_config:
        changes["linear_attn_config"] = dataclasses.replace(text.linear_attn_config, num_heads=2, head_dim=16, **layer_split(4))
    return config.replace_text(**changes)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(0)
    for n in range(20):
        lines = [f"def f{draw.randrange(50)}(x, y={draw.randrange(9)}):\n    return x + {draw.randrange(100)} * y\n" for _ in range(30)]
        (folder / f"m{n}.py").write_text("\n".join(lines))
    return folder


@pytest.fixture
def options(corpus, tmp_path, monkeypatch) -> TrainOptions:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny(nano()).save(tmp_path / "config")
    return TrainOptions(data=(corpus,), config=str(tmp_path / "config" / "config.json"), out=tmp_path / "run", vocab_size=300, seq_len=64,
                        batch_size=4, tokens=4 * 64 * 12, lr=0.01, eval_every=0, save_every=0, samples=2, dtype="float32", device="cpu")


def records(folder: Path, kind: str) -> list[dict]:
    return [r for r in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if r["kind"] == kind]


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(r["step"], r["loss"]) for r in records(folder, "step")]


class StopAt(Listener):
    def __init__(self, step: int):
        self.at = step

    def step(self, metrics, progress):
        if metrics["step"] == self.at:
            os.kill(os.getpid(), signal.SIGINT)


def test_a_run_leaves_a_folder_that_loads_and_a_report(options):
    folder = train(options)
    names = {p.name for p in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "train.json", "metrics.jsonl", "report.html", "resume"} <= names
    found = losses(folder)
    assert [s for s, _ in found] == list(range(1, 13)) and found[-1][1] < found[0][1] - 0.5
    final = records(folder, "final")[0]
    assert 0 < final["bits_per_byte"] < 8 and final["xz_bits_per_byte"] > 0 and final["dead_experts"] is not None
    assert len(records(folder, "sample")) == 2 and {e["subset"] for e in records(folder, "eval")} == {"sample", "full"}
    assert records(folder, "probe")[0]["attn_res"] and records(folder, "probe")[0]["decay"]
    model = checkpoint.load(folder)
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()
    described = json.loads((folder / "train.json").read_text())
    assert "torch chunk" in described["kernels"]["kda"] and sum(g["parameters"] for g in described["optimizer_groups"]) == sum(
        p.numel() for p in model.parameters())


def test_the_same_options_repeat_bit_for_bit_and_another_seed_does_not(options, tmp_path):
    short = dataclasses.replace(options, tokens=4 * 64 * 4, samples=0, final_eval=False)
    a = train(dataclasses.replace(short, out=tmp_path / "a"))
    b = train(dataclasses.replace(short, out=tmp_path / "b"))
    c = train(dataclasses.replace(short, out=tmp_path / "c", seed=1))
    assert losses(a) == losses(b) != losses(c)


@pytest.mark.parametrize("preset", [nano, dense_nano])
def test_interrupted_and_resumed_equals_uninterrupted(options, tmp_path, preset):
    tiny(preset()).save(tmp_path / "config")
    plain = dataclasses.replace(options, samples=0, final_eval=False)
    whole = train(dataclasses.replace(plain, out=tmp_path / "whole"))
    cut = dataclasses.replace(plain, out=tmp_path / "cut")
    train(cut, StopAt(5))
    assert losses(cut.out)[-1][0] == 5 and not records(cut.out, "final")
    train(TrainOptions(out=cut.out, resume=True))
    assert losses(cut.out) == losses(whole)
    same = zip(checkpoint.load(whole).state_dict().values(), checkpoint.load(cut.out).state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)


def test_killed_at_any_moment_it_resumes_and_repeats(options, tmp_path):
    plain = dataclasses.replace(options, samples=0, final_eval=False)
    whole = train(dataclasses.replace(plain, out=tmp_path / "whole"))
    args = [sys.executable, "-m", "openk3", "train", "--data", str(options.data[0]), "--config", options.config,
            "--out", str(tmp_path / "killed"), "--vocab-size", "300", "--seq-len", "64", "--batch-size", "4",
            "--tokens", str(options.tokens), "--lr", "0.01", "--eval-every", "0", "--save-every", "0.001",
            "--samples", "0", "--no-final-eval", "--dtype", "float32", "--device", "cpu",
            "--threads", str(torch.get_num_threads())]
    process = subprocess.Popen(args, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    metrics, deadline = tmp_path / "killed" / "metrics.jsonl", time.monotonic() + 120
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") >= 4):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not records(tmp_path / "killed", "final")
    train(TrainOptions(out=tmp_path / "killed", resume=True))
    assert losses(tmp_path / "killed") == losses(whole)


def test_a_resume_state_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    runfolder.save_resume(tmp_path, {"step": 1})
    monkeypatch.setattr(torch, "save", lambda *a, **k: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(UserError, match="disk is full"):
        runfolder.save_resume(tmp_path, {"step": 2})
    assert runfolder.load_resume(tmp_path) == {"step": 1} and [p.name for p in tmp_path.iterdir()] == ["resume"]
    (tmp_path / "resume").rename(tmp_path / "resume.old")                # killed between the two renames
    assert runfolder.load_resume(tmp_path) == {"step": 1}


def test_micro_batches_give_the_gradients_of_the_whole_batch(options):
    trainer = Trainer(options, Listener())
    batch = next(trainer.data)
    gradients = []
    for rows in (4, 1):
        trainer.model.zero_grad()
        for ids, targets, cu_seqlens in micro_batches(batch, rows):
            assert cu_seqlens[0] == 0 and cu_seqlens[-1] == ids.numel()
            trainer.model.loss(ids, targets, cu_seqlens, reduction="sum").backward()
        gradients.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]))
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[0].norm()


def test_expert_load_is_counted_once_over_micro_batches(options):
    loads = []
    for rows in (None, 2):
        trainer = Trainer(dataclasses.replace(options, micro_batch=rows, overwrite=True), Listener())
        trainer.model.train()
        trainer.step()
        loads.append(trainer.model.model.layers[1].block_sparse_moe.gate.load.clone())
    assert torch.equal(*loads) and loads[0].sum() == 4 * 64 * 2


def test_the_balancing_bias_keeps_more_of_itself_as_the_rate_falls(options):
    trainer = Trainer(options, Listener())
    trainer.step_number = 0
    assert trainer._ema(options.lr) == 0                                # the first bias replaces nothing worth keeping
    trainer.step_number = 10_000
    kept = [trainer._ema(options.lr * part) for part in (1, 0.25, 0.01, 1e-6)]
    assert kept[0] == options.balance_ema and kept == sorted(kept) and kept[2] == kept[3] == options.balance_ema**0.1
    k3s = Trainer(dataclasses.replace(options, balance_ema=0.0, overwrite=True), Listener())
    k3s.step_number = 10_000
    assert [k3s._ema(options.lr * part) for part in (1, 0.01)] == [0, 0]


@pytest.mark.parametrize("change, words", [
    ({"config": "nona"}, "nearest: nano"),
    ({"data": (Path("/nonexistent"),)}, "/nonexistent"),
    ({"resume": True}, "there's no run in"),
    ({"vocab_size": 100}, "100"),
    ({"device": "cuda"}, "no such device"),
])
def test_what_cannot_be_done_is_said_in_one_line(options, change, words):
    if change.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("there's a GPU here")
    with pytest.raises(UserError) as error:
        train(dataclasses.replace(options, **change))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_folder_that_holds_a_run_is_not_overwritten_unasked(options):
    quick = dataclasses.replace(options, tokens=4 * 64, samples=0, final_eval=False)
    train(quick)
    before = (options.out / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match="already holds a run"):
        train(quick)
    assert (options.out / "metrics.jsonl").read_text() == before
    train(dataclasses.replace(quick, overwrite=True))


def test_resuming_with_another_corpus_is_refused(options, corpus, tmp_path):
    quick = dataclasses.replace(options, tokens=4 * 64, samples=0, final_eval=False)
    train(quick)
    described = json.loads((options.out / "train.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    for n in range(5):
        (other / f"x{n}.txt").write_text(f"something else {n}\n" * 40)
    described["options"]["data"] = [str(other)]
    (options.out / "train.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match="corpus has changed"):
        train(TrainOptions(out=options.out, resume=True, tokens=4 * 64 * 2))


@pytest.mark.parametrize("bad", [
    {"minutes": 0}, {"minutes": 1, "tokens": 5}, {"lr": -1}, {"micro_batch": 3, "batch_size": 8}, {"warmup": 1.0}])
def test_options_out_of_range_are_refused(bad):
    with pytest.raises(UserError):
        TrainOptions(**bad).check()


def test_options_survive_train_json(options):
    assert TrainOptions.from_json(json.loads(json.dumps(options.to_json()))) == options
    with pytest.raises(UserError, match="sails"):
        TrainOptions.from_json({"sails": 1})
