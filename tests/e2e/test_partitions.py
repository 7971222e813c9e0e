"""Clients that hold parts of the same data: the parts must be of the split that the server expects."""

from pathlib import Path
from typing import Any

import pytest
from commands import site

from fedtrain.client.identity import client_info, enrolment
from fedtrain.errors import ConnectionRefused
from fedtrain.flower.fleet import FlowerFleet, new_run_id
from fedtrain.types import ClientInfo, Partitioning

NUMPY = "experiment=quickstart_numpy"
OURS = Partitioning("fedtrain.data.digits.load", 3, 1)


def fleet_of(folder: Path, partitioning: Partitioning | None = OURS) -> FlowerFleet:
    return FlowerFleet(new_run_id(), folder, partitioning=partitioning)


@pytest.mark.parametrize("its", [Partitioning(OURS.data, 3, 2), Partitioning(OURS.data, 4, 1)])
def test_a_client_with_a_part_of_another_split_is_refused_and_told_what_to_set(
    tmp_path: Path, its: Partitioning
) -> None:
    fleet = fleet_of(tmp_path)
    with pytest.raises(ConnectionRefused, match=r"set seed=1 data\.num_partitions=3, as the server has"):
        fleet.enrol(b"key", ClientInfo("a", 10, partitioning=its))
    assert fleet.clients() == []
    fleet.enrol(b"key", ClientInfo("a", 10, partitioning=OURS))
    assert [client.id for client in fleet.clients()] == ["a"]


@pytest.mark.parametrize("its", [None, OURS, Partitioning("own.load", 8, 9)])
@pytest.mark.parametrize("ours", [None, OURS])
def test_a_client_with_the_same_split_or_with_data_of_its_own_joins(
    tmp_path: Path, its: Partitioning | None, ours: Partitioning | None
) -> None:
    fleet = fleet_of(tmp_path, ours)
    fleet.enrol(b"key", ClientInfo("a", 10, partitioning=its))
    assert [client.id for client in fleet.clients()] == ["a"]


@pytest.mark.parametrize("its", [None, OURS])
def test_a_client_says_how_it_splits_its_data(its: Partitioning | None) -> None:
    info = ClientInfo("a", 10, {"site": "x"}, local_algorithms=("sgd_epochs",), partitioning=its)
    assert client_info(enrolment(info)) == info


@pytest.mark.parametrize(
    "values",
    [
        3,
        [],
        {"data": "d", "seed": 1},
        {"data": "d", "num_partitions": True, "seed": 1},
        {"data": "d", "num_partitions": 2, "seed": -1},
        {"data": "\x1b", "num_partitions": 2, "seed": 1},
        {"data": None, "num_partitions": 2, "seed": 1},
    ],
)
def test_an_impossible_split_is_refused(values: Any) -> None:
    with pytest.raises(ConnectionRefused, match="partitioning must be"):
        client_info({**enrolment(ClientInfo("a", 1)), "partitioning": values})


def test_a_client_started_with_another_split_ends_and_names_what_to_set(tmp_path: Path) -> None:
    with site(tmp_path, NUMPY) as place:
        place.server("seed=1", "data.num_partitions=3")
        for other in (("seed=2", "data.num_partitions=3"), ("seed=1", "data.num_partitions=4")):
            client = place.client(0, *other)
            assert client.wait() == 1
            assert "set seed=1 data.num_partitions=3, as the server has" in client.output
        place.client(0, "seed=1", "data.num_partitions=3").wait_for("connected")


def test_a_client_without_a_part_of_the_data_is_refused_before_it_joins(tmp_path: Path) -> None:
    with site(tmp_path, NUMPY, "data.num_partitions=3") as place:
        client = place.start("fedtrain-client", "client.id=ward-3", "client.state_dir=state")
        assert client.wait() == 2
    assert "data.partition: without it this client has no examples to train on" in client.output
    assert "in [0, 3)" in client.output
