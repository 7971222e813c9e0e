import pytest

from fedtrain.cli import require_enough_simulated
from fedtrain.config import build_strategy, compose
from fedtrain.errors import ConfigError

SIZE = ("experiment=quickstart_numpy", "data.num_partitions=5")
AVERAGED = (*SIZE, "cohort.connected=1")
KRUM = (*AVERAGED, "strategy=krum")


@pytest.mark.parametrize(
    "overrides",
    [
        (*SIZE, "cohort.connected=5"),
        (*AVERAGED, "cohort.answers=5"),
        (*AVERAGED, "cohort.asked=9"),
        (*KRUM, "strategy.num_byzantine=1"),
    ],
)
def test_a_simulation_with_as_many_clients_as_are_needed_may_begin(overrides: tuple[str, ...]) -> None:
    config = compose(overrides)
    require_enough_simulated(config, build_strategy(config))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((*SIZE, "cohort.connected=6"), r"cohort.connected: expected at most 5 \(data.num_partitions, .*\), found 6"),
        ((*AVERAGED, "cohort.answers=6"), r"cohort.answers: expected at most 5 \(data.num_partitions, .*\), found 6"),
        ((*KRUM, "strategy.num_byzantine=2"), "data.num_partitions: expected at least 7, .* aggregator needs, found 5"),
        ((*KRUM, "strategy.num_byzantine=1", "cohort.asked=4"), "cohort.asked: expected at least 5, .* found 4"),
    ],
)
def test_a_simulation_with_too_few_clients_is_refused(overrides: tuple[str, ...], message: str) -> None:
    config = compose(overrides)
    with pytest.raises(ConfigError, match=message):
        require_enough_simulated(config, build_strategy(config))
