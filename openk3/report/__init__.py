"""The report of a run: one HTML page that works offline, made from the run folder's files alone."""

from pathlib import Path

from .reader import summary

__all__ = ["summary", "write_report"]


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run folder (finished or still in progress) and return its path; see `page.write_report`."""
    from .page import write_report as write  # here, so that `summary` doesn't wait for matplotlib

    return write(run_dir)
