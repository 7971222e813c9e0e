"""A client of a stock SuperLink, without one: what it answers to a message."""

import threading
from pathlib import Path

import numpy as np
import pytest
from fakes import Adder
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.app.message.message import make_message
from flwr.app.metadata import Metadata
from flwr.proto.node_pb2 import Node

from fedtrain.client.identity import take_state_dir
from fedtrain.errors import ConfigError
from fedtrain.flower.records import read_answer, read_enrolment, start_records, task_content
from fedtrain.flower.stock import StockClient
from fedtrain.state import start_digest
from fedtrain.testing import task_of
from fedtrain.types import Start

START = Start({"w": np.zeros(2, np.float32)}, {"n": np.array(0)})


def message_of(content: RecordDict, kind: str = "train") -> Message:
    metadata = Metadata(
        run_id=1,
        message_id="m",
        src_node_id=1,
        dst_node_id=2,
        reply_to_message_id="",
        group_id="1",
        created_at=2e9,
        ttl=1e9,
        message_type=kind,
    )
    return make_message(metadata, content)


@pytest.fixture
def client(tmp_path: Path) -> StockClient:
    return StockClient(Adder(0.5), superlink="127.0.0.1:9", client_id="ward-3", state_dir=tmp_path, tags={"site": "x"})


def test_a_query_is_answered_with_who_the_client_is(client: StockClient) -> None:
    info = read_enrolment(client._handled(message_of(RecordDict(), "query")).content)
    assert (info.id, dict(info.tags), info.num_examples) == ("ward-3", {"site": "x"}, 1)


def test_a_task_is_done_and_one_from_another_start_is_not(client: StockClient) -> None:
    for start, kind in ((start_digest(START), "ok"), ("0" * 64, "failed")):
        task = task_of(4, "ward-3", start=start)
        reply = client._handled(message_of(task_content(task, "run", start_records(START), {})))
        assert read_answer(reply.content, task, "run", 0.0).kind == kind


def test_a_message_that_is_not_of_fedtrain_is_answered_with_an_error_that_says_so(client: StockClient) -> None:
    reply = client._handled(message_of(RecordDict({"config": ConfigRecord({"lr": 0.1})})))
    assert reply.has_error()
    assert "the message is no task of fedtrain" in str(reply.error.reason)


def test_an_address_that_is_none_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        StockClient(Adder(0.5), superlink="nowhere", client_id="a", state_dir=tmp_path)


def test_an_interrupt_ends_a_client_whose_superlink_is_away(
    client: StockClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = list[str]()

    def asked(line: object, route: str, request: object, answer: object) -> None:
        if routes:
            pytest.fail("it went on")
        routes.append(route)
        raise KeyboardInterrupt  # while it waits for messages; the port of its SuperLink is closed by now

    monkeypatch.setattr("fedtrain.flower.stock._asked", asked)
    monkeypatch.setattr(client, "_join", lambda line: Node(node_id=7))
    with pytest.raises(KeyboardInterrupt):
        client.run()
    assert threading.active_count() == 1


def test_a_second_client_of_the_state_folder_is_refused(client: StockClient) -> None:
    with take_state_dir(client.state_dir), pytest.raises(ConfigError, match="a client that is running uses this"):
        client.run()
