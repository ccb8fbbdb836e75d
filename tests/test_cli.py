"""The command line: what a person types, what is printed, and one clear line where something is wrong."""

import json
import re
from pathlib import Path

import pytest

from openk3.cli import main
from openk3.presets import PRESETS

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run folder, trained for two steps by the command itself."""
    base = tmp_path_factory.mktemp("cli")
    (base / "data").mkdir()
    for n in range(12):
        (base / "data" / f"m{n}.py").write_text(f"def f{n}(x):\n    return x + {n}\n" * 20)
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(base / "cache"))
    main(["train", "--data", str(base / "data"), "--out", str(base / "run"), "--vocab-size", "320", "--tokens", "512", "--batch-size", "2",
          "--seq-len", "128", "--samples", "1", "--eval-every", "0"])
    patch.undo()
    return base / "run"


def refused(capsys, *args: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(args))
    err = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and err.startswith("openk3: ") and "\n" not in err and "Traceback" not in err
    return err


def test_config_prints_the_real_k3(capsys):
    main(["config", "k3"])
    text = capsys.readouterr().out
    for count in ("2,779,484,476,000", "2,779,931,834,976", "104,189,612,640", "30,618,086,496", "5,572,706,304", "2,722,740,830,208",
                  "12,155,092,992", "4,727,310,336", "590,955,008", "1,174,405,120", "726,663,168", "3,999,744", "48,620,371,968"):
        assert count in text, count


def test_config_lists_presets_and_writes_json(capsys):
    main(["config"])
    listed = capsys.readouterr().out
    assert all(name in listed for name in PRESETS)
    main(["config", "nano", "--json"])
    assert json.loads(capsys.readouterr().out)["text_config"]["num_experts"] == 64


def test_generate_streams_the_prompt_and_more(run, capsys):
    main(["generate", str(run), "--prompt", "def f", "--max-new-tokens", "5", "--seed", "1"])
    first = capsys.readouterr().out
    assert first.startswith("def f")
    main(["generate", str(run), "--prompt", "def f", "--max-new-tokens", "5", "--seed", "1"])
    assert capsys.readouterr().out == first


def test_generate_takes_many_prompts(run, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("def\nreturn\n")
    main(["generate", str(run), "--input", str(tmp_path / "prompts.txt"), "--max-new-tokens", "3", "--temperature", "0"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["prompt"] for r in rows] == ["def", "return"] and {r["finish_reason"] for r in rows} <= {"stop", "length"}


def test_chat_answers_from_a_pipe(run, capsys, monkeypatch):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain\n"))
    main(["chat", str(run), "--max-new-tokens", "4", "--temperature", "0"])
    assert capsys.readouterr().out.count("\n") >= 2


def test_inspect_finds_nothing_wrong_and_convert_packs(run, tmp_path, capsys):
    main(["inspect", str(run)])
    assert "nothing is missing" in capsys.readouterr().out
    main(["convert", str(run), str(tmp_path / "packed"), "--to", "mxfp4"])
    capsys.readouterr()
    main(["inspect", str(tmp_path / "packed"), "--full"])
    assert "weight_packed" in capsys.readouterr().out
    main(["generate", str(tmp_path / "packed"), "--prompt", "def", "--max-new-tokens", "3"])


def test_eval_scores_the_held_out_text(run, capsys):
    main(["eval", str(run), "--data", str(run.parent / "data"), "--context", "64", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["bits_per_byte"] < 10 and found["bytes"] > 0 and found["xz_bits_per_byte"] > 0
    main(["eval", str(run), "--data", str(run.parent / "data"), "--json"])       # as the run did, so the run's figure
    again = json.loads(capsys.readouterr().out)
    final = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    assert again["context"] == 512 and again["bits_per_byte"] == pytest.approx(final["bits_per_byte"], rel=1e-4)


def test_report_is_made_anew(run, capsys):
    (run / "report.html").unlink()
    main(["report", str(run)])
    assert (run / "report.html").exists()


@pytest.mark.parametrize("args, words", [
    (("config", "k4"), "nearest: k3"),
    (("generate", "/nonexistent", "--prompt", "x"), "/nonexistent"),
    (("inspect", "/nonexistent"), "/nonexistent"),
    (("report", "/nonexistent"), "/nonexistent"),
    (("train", "--minutes", "-1"), "--minutes"),
    (("train", "--resume", "--out", "/nonexistent/run"), "/nonexistent/run"),
    (("train", "--data", "/nonexistent"), "/nonexistent"),
])
def test_what_is_wrong_is_said_in_one_line(args, words, capsys):
    assert words in refused(capsys, *args)


def test_an_unknown_config_field_names_the_nearest(tmp_path, capsys):
    main(["config", "nano", "--json"])
    config = json.loads(capsys.readouterr().out)
    config["text_config"]["hiden_size"] = config["text_config"].pop("hidden_size")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "hidden_size" in refused(capsys, "config", str(tmp_path))


def test_a_broken_checkpoint_is_refused(run, tmp_path, capsys):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("resume"))
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert "model.safetensors" in refused(capsys, "generate", str(copy), "--prompt", "x")
    weights.write_bytes(whole)
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["moe_intermediate_size"] *= 2
    (copy / "config.json").write_text(json.dumps(config))
    assert "experts" in refused(capsys, "generate", str(copy), "--prompt", "x")


def test_every_command_the_readme_names_exists(capsys):
    text = (ROOT / "README.md").read_text()
    named = set(re.findall(r"^\s*(?:\.venv/bin/)?openk3 (\w+)", text, re.M))
    assert {"train", "generate", "chat", "eval", "config", "inspect", "convert", "doctor", "report"} <= named
    for command in named:
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
    capsys.readouterr()


def test_profile_adds_up_and_leaves_the_run_alone(run, capsys):
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    main(["profile", str(run), "--steps", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["ms"] == pytest.approx(sum(p["forward_ms"] + p["backward_ms"] for p in found["parts"]))
    assert {"experts", "MLA", "optimizer", "balancing", "attention residuals"} <= {p["name"] for p in found["parts"]}
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before
    main(["profile", str(run), "--steps", "1"])
    assert "GFLOP/s" in capsys.readouterr().out
