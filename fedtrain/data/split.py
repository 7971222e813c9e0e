"""Examples and Split: what a data set gives to a client or to the server."""

from dataclasses import dataclass

from fedtrain.errors import DataError
from fedtrain.types import Array


@dataclass(frozen=True)
class Examples:
    """Inputs and targets, one example per index of the first dimension.

    Raises:
        DataError: the two have no first dimension, or not the same number of examples.
    """

    inputs: Array
    targets: Array

    def __post_init__(self) -> None:
        if self.inputs.ndim < 1 or self.targets.ndim < 1 or len(self.inputs) != len(self.targets):
            raise DataError(
                "inputs and targets must have the same first dimension, one entry per example; "
                f"found shapes {self.inputs.shape} and {self.targets.shape}: check where the data is loaded"
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, indices: Array) -> "Examples":
        """The examples at `indices`, copied, in that order."""
        return Examples(self.inputs[indices], self.targets[indices])


@dataclass(frozen=True)
class Split:
    """What one party may see: its training examples and its held-out examples; None where it has none."""

    train: Examples | None
    test: Examples | None
    order: Array | None = None
    """Prescribed batches, to repeat a published run: training examples of each update, of shape (updates, batch size).

    -1 fills a short batch. A round goes on where the one before it ended, as if all rounds had as many updates; after
    the last row comes the first again. None: the task's seed decides.
    """


def require_partition(partition: int | None, num_partitions: int) -> None:
    """Refuse a partition number that does not exist; None, the server's view, always does.

    Raises:
        DataError: `num_partitions` < 1, or `partition` outside of [0, num_partitions).
    """
    if num_partitions < 1:
        raise DataError(f"num_partitions must be >= 1, found {num_partitions}: set data.num_partitions")
    if partition is not None and not 0 <= partition < num_partitions:
        raise DataError(
            f"partition must be in 0 .. {num_partitions - 1} (num_partitions is {num_partitions}), found {partition}: "
            "set data.partition, or data.num_partitions on the server and on every client"
        )
