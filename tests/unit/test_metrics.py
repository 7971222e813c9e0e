from collections.abc import Mapping

import numpy as np
import pytest

from fedtrain.metrics import mean_metrics, metrics_by_client
from fedtrain.testing import task_of
from fedtrain.types import Outcome

NAN, INF = float("nan"), float("inf")


def measured(client: str, num_examples: int, **metrics: float) -> Outcome:
    return Outcome(task_of(0, client), "ok", metrics=metrics, num_examples=num_examples)


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([], {}),
        ([measured("a", 1, loss=1.0), measured("b", 3, loss=5.0)], {"loss": 4.0}),
        ([measured("a", 1, loss=1.0, extra=9.0), measured("b", 3, loss=5.0)], {"loss": 4.0, "extra": 9.0}),
        ([measured("a", 1), measured("b", 3, loss=5.0)], {"loss": 5.0}),
        ([measured("a", 1, loss=NAN), measured("b", 3, loss=5.0)], {"loss": 5.0}),
        ([measured("a", 1, loss=INF), measured("b", 3, loss=-INF), measured("c", 2, loss=5.0)], {"loss": 5.0}),
        ([measured("a", 1, loss=NAN)], {}),
        ([measured("a", 0, loss=1.0), measured("b", 3, loss=5.0)], {"loss": 5.0}),
        ([measured("a", 0, loss=1.0)], {}),
        ([measured("a", 2**53, loss=1e300), measured("b", 2**53, loss=3e300)], {}),
    ],
)
def test_each_metric_is_averaged_over_those_who_have_it(outcomes: list[Outcome], expected: Mapping[str, float]) -> None:
    assert mean_metrics(outcomes) == pytest.approx(expected, rel=1e-15)


def test_outcomes_that_are_not_ok_are_left_out() -> None:
    late = Outcome(task_of(0, "b"), "late", metrics={"loss": 100.0}, num_examples=50)
    assert mean_metrics([measured("a", 1, loss=1.0), late]) == {"loss": 1.0}
    assert metrics_by_client([measured("a", 1, loss=1.0), late]) == {"a": {"loss": 1.0}}


def test_metrics_come_in_the_order_of_their_names() -> None:
    assert list(mean_metrics([measured("a", 1, b=1.0, a=2.0, c=3.0)])) == ["a", "b", "c"]


def test_each_clients_metrics_are_given_by_its_id_as_they_are() -> None:
    found = metrics_by_client([measured("a", 1, loss=1.0), measured("b", 0, accuracy=NAN)])
    assert found["a"] == {"loss": 1.0}
    assert np.isnan(found["b"]["accuracy"])
