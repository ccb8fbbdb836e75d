"""The run folder: what a training run leaves behind, and what it needs to go on.

    config.json, model.safetensors, tokenizer.json     a loadable checkpoint
    train.json                                          every option, versions, machine, kernels, git revision, corpus
    metrics.jsonl                                       a JSON object a line
    resume/                                             everything that the next step depends on
"""

import errno
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from openk3 import __version__
from openk3.errors import UserError
from openk3.ops import backend


@contextmanager
def writing(what: Path) -> Iterator[None]:
    """Turn a full disk or a folder that can't be written into one line."""
    try:
        yield
    except OSError as e:
        if e.errno == errno.ENOSPC:
            raise UserError(f"{what}: the disk is full; free some space and resume (what was there before is untouched)") from e
        raise UserError(f"{what}: can't be written ({e.strerror or e}); choose another --out") from e
    except RuntimeError as e:                                           # torch.save reports a failed write this way
        if "write" in str(e) or "PytorchStreamWriter" in str(e):
            raise UserError(f"{what}: writing failed, the disk may be full; free some space and resume "
                            "(what was there before is untouched)") from e
        raise


def write_json(path: Path, value) -> None:
    """Aside, then renamed."""
    with writing(path):
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            aside.write_text(json.dumps(value, indent=1, default=str) + "\n", encoding="utf-8")
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)


class Metrics:
    """Append-only `metrics.jsonl`; on resume, what came after the saved step is cut off, so that nothing stands twice."""

    def __init__(self, path: Path, resume_step: int | None = None):
        self.path = path
        if resume_step is not None and path.exists():
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= resume_step]
            with writing(path):
                aside = path.with_name(f".{path.name}.{os.getpid()}")
                aside.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
                aside.replace(path)
        with writing(path):
            self.file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, kind: str, **values) -> None:
        with writing(self.path):
            self.file.write(json.dumps({"kind": kind, **values}) + "\n")

    def close(self) -> None:
        self.file.close()


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")


def save_resume(folder: Path, state: dict) -> None:
    """Write `resume/` whole beside the old one, then change places: killed at any moment, one of the two is complete."""
    new, old = folder / "resume.new", folder / "resume"
    with writing(old):
        shutil.rmtree(new, ignore_errors=True)
        try:
            new.mkdir()
            with (new / "state.pt").open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            if old.exists():
                trash = folder / "resume.old"
                shutil.rmtree(trash, ignore_errors=True)
                old.rename(trash)
                new.rename(old)
                shutil.rmtree(trash, ignore_errors=True)
            else:
                new.rename(old)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise


def load_resume(folder: Path) -> dict:
    """The newest complete state of a run. Errors: none there, or one that can't be read."""
    for name in ("resume", "resume.old"):                               # between two renames only resume.old is there
        path = folder / name / "state.pt"
        if path.exists():
            try:
                return torch.load(path, map_location="cpu", weights_only=True)
            except Exception as e:
                raise UserError(f"{path}: can't be read ({type(e).__name__}); the run can't be resumed, start it anew") from e
    raise UserError(f"{folder}: nothing to resume here (no resume/state.pt); start a run with --out {folder} first")


def machine(device: torch.device) -> dict:
    """What a reader needs to know of the machine, in a few words."""
    cpu = platform.processor() or platform.machine()
    try:
        names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0] if names else cpu
    except OSError:
        pass
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError, AttributeError):
        memory = None
    return {"cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads(),
            "memory_gb": None if memory is None else round(memory, 1), "platform": platform.platform(),
            "device": str(device) if device.type != "cuda" else torch.cuda.get_device_name(device)}


def versions() -> dict[str, str]:
    return {"openk3": __version__, "torch": torch.__version__, "python": sys.version.split()[0]}


def git_revision() -> str | None:
    """The revision of this source tree, with a + when it was changed; None outside a checkout."""
    here = Path(__file__).parent
    try:
        run = [subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, timeout=10)
               for args in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))]
    except (OSError, subprocess.SubprocessError):
        return None
    return None if run[0].returncode else run[0].stdout.strip() + ("+" if run[1].stdout.strip() else "")


def describe(options: dict, device: torch.device, corpus: dict, parameters: dict, groups: list[dict]) -> dict:
    """The contents of train.json."""
    return {"options": options, "versions": versions(), "machine": machine(device), "kernels": backend.chosen(),
            "git": git_revision(), "corpus": corpus, "parameters": parameters, "optimizer_groups": groups}
