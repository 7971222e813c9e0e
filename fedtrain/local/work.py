"""How much a client does and how: the numbers that local algorithms share."""

from fedtrain.errors import StrategyError


def work(
    algorithm: str,
    *,
    epochs: float = 1,
    steps: int | None = None,
    learning_rate: float | None = None,
    batch_size: int | None = None,
) -> dict[str, float]:
    """The numbers of a task that say how much and how a client trains; those that are None are left to the client.

    Args:
        algorithm: Name of the local algorithm, for error messages.
        epochs: Passes over the client's own examples, > 0; a part of one is rounded up to whole batches.
        steps: Optimizer steps in place of epochs, >= 1; None: epochs.
        learning_rate: Replaces the client's own, > 0.
        batch_size: Replaces the client's own, >= 1.

    Raises:
        StrategyError: a number is out of its range.

    >>> work("sgd_epochs", steps=100, learning_rate=0.1)
    {'steps': 100, 'learning_rate': 0.1}
    """
    amount = {"epochs": epochs} if steps is None else {"steps": steps}
    optional = {"learning_rate": learning_rate, "batch_size": batch_size}
    numbers = {**amount, **{name: value for name, value in optional.items() if value is not None}}
    for name, value in numbers.items():
        if not 0 < value < float("inf"):
            raise StrategyError(f"local {algorithm}: {name} must be > 0 and finite, found {value}")
    return numbers
