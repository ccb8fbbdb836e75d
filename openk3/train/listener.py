"""What a training run tells those who watch it. No torch here: the command line subclasses it before anything is loaded."""


class Listener:
    """What a run tells while it works; every method may be left as it is."""

    def message(self, text: str) -> None:
        """A line worth reading."""

    def step(self, metrics: dict, progress: float) -> None:
        """After every step; progress in 0 … 1."""

    def scoring(self, done: int, total: int) -> None:
        """Held-out windows scored so far."""

    def evaluated(self, metrics: dict) -> None:
        """A look at the held-out text."""
