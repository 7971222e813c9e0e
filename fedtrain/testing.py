"""Small builders for tests and examples: a cohort, an update."""

from collections.abc import Mapping

from fedtrain.types import Cohort, Params, Task, Update


def task_of(number: int = 0, client: str = "a", **fields: object) -> Task:
    """A training task for `client`, with other fields as given."""
    defaults: dict[str, object] = {"round": 1, "start": "", "local": ("sgd_epochs", {"epochs": 1}), "num_examples": 1}
    return Task(number=number, client=client, **{**defaults, **fields})  # type: ignore[arg-type]


def update_of(
    delta: Params, num_examples: int = 1, *, client: str = "a", metrics: Mapping[str, float] | None = None
) -> Update:
    """An update of `client` with this delta."""
    return Update(task_of(client=client), delta, num_examples, metrics=metrics or {})


def cohort_of(size: int, *, quorum: int = 1, **fields: object) -> Cohort:
    """A cohort of `size` clients named c00, c01, …, one task each."""
    defaults: dict[str, object] = {
        "round": 1,
        "tasks": tuple(task_of(number, f"c{number:02d}") for number in range(size)),
        "num_eligible": size,
        "eligible_examples": size,
        "deadline_s": None,
        "grace_s": None,
        "retry": False,
        "entropy": 0,
    }
    return Cohort(quorum=quorum, **{**defaults, **fields})  # type: ignore[arg-type]
