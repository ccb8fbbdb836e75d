"""Which form of each operation ran: the plain PyTorch forms record themselves here, so that a run can say what it used."""

_chosen: dict[str, set[str]] = {}


def record(op: str, form: str) -> None:
    """Note that operation `op` (e.g. "kda") ran in `form` (e.g. "torch chunk 16")."""
    _chosen.setdefault(op, set()).add(form)


def chosen() -> dict[str, str]:
    """Every operation that has run in this process, with the forms it took."""
    return {op: ", ".join(sorted(forms)) for op, forms in sorted(_chosen.items())}


def forget() -> None:
    """Start the record anew (between two measurements)."""
    _chosen.clear()
