"""What we rely on in Flower's insides. A Flower release that moves one of these fails here, and says which."""

import ast
import importlib
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import flwr
import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from fastapi import HTTPException
from flwr.app import Message, RecordDict
from flwr.app.message import ConfigRecord
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PullMessagesResponse, PushMessagesRequest, PushMessagesResponse
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate import LinkState
from flwr.supercore.constant import NodeStatus
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.supercore.run import RunStatus
from flwr.superlink.routers.fleet.node_auth import authenticate_node
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

import fedtrain
from fedtrain.flower import wire
from fedtrain.flower.auth import NotAuthenticated, Signer, authenticate
from fedtrain.flower.broker import Broker
from fedtrain.security.keys import public_pem
from fedtrain.testing import task_of

ROOT = Path(fedtrain.__file__).parent
KEY, OTHER = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))


def flower_imports(file: Path) -> set[tuple[str, str]]:
    """(module, name) of everything that a file imports from flwr; the name is empty for a whole module."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {(node.module, alias.name) for alias in node.names}
    return {(module, name) for module, name in found if module.split(".")[0] == "flwr"}


def test_flower_is_the_tested_release() -> None:
    assert flwr.__version__.startswith("1.42."), "read the contract tests that fail, then widen the range in pyproject"


@pytest.mark.parametrize("file", sorted((ROOT / "flower").glob("*.py")), ids=lambda file: file.name)
def test_everything_that_is_imported_from_flower_is_still_there(file: Path) -> None:
    for module, name in flower_imports(file):
        assert not name or hasattr(importlib.import_module(module), name), f"{module}.{name} has moved"


def test_only_one_package_imports_flower() -> None:
    folders = [ROOT, ROOT.parent / "strategies", ROOT.parent / "conf"]
    files = {file for folder in folders for file in folder.rglob("*.py")}
    elsewhere = {str(file.relative_to(ROOT.parent)) for file in files if flower_imports(file)}
    assert {file for file in elsewhere if not file.startswith("fedtrain/flower/")} == set()
    assert "fedtrain/flower/broker.py" in elsewhere, "the search finds imports where there are some"


@pytest.mark.parametrize(
    "module", ["fedtrain", "fedtrain.client.trainer", "fedtrain.rounds", "fedtrain.fleet", "fedtrain.client.worker"]
)
def test_the_core_loads_neither_flower_nor_torch(module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'flwr', 'torch', 'hydra', 'fastapi'}} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"


# The link state.


@pytest.fixture
def broker() -> Broker:
    return Broker()


@pytest.fixture
def state(broker: Broker) -> LinkState:
    return broker._state


def instruction(broker: Broker, node: int, number: int = 0, attempt: int = 1) -> Message:
    task = task_of(number, "a")
    return wire.task_message(
        task, run="r", flower_run=broker.run, node=node, attempt=attempt, now=1.75e9, start=b"model"
    )


def test_a_run_is_running_after_its_task_was_claimed_and_activated(broker: Broker, state: LinkState) -> None:
    (run,) = state.get_run_info(run_ids=[broker.run])
    assert RunStatus(*_fields(run.status)) == RunStatus("running", "", "")


def _fields(status: RunStatus) -> tuple[str, str, str]:
    return status.status, status.sub_status, status.details


def test_a_node_is_found_by_its_key_and_stays_the_same(broker: Broker, state: LinkState) -> None:
    key = public_pem(KEY)
    assert state.get_node_id_by_public_key(key) is None
    node = broker.node(key)
    assert node > 0
    assert state.get_node_id_by_public_key(key) == node
    assert broker.node(key) == node, "a client that comes back is the same node"
    assert broker.node(public_pem(OTHER)) != node


def test_a_key_can_be_registered_once_only(broker: Broker, state: LinkState) -> None:
    broker.node(public_pem(KEY))
    with pytest.raises(ValueError, match=r"[Pp]ublic key"):
        state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public_pem(KEY), 30.0)


def test_a_node_is_online_for_good(broker: Broker, state: LinkState) -> None:
    node = broker.node(public_pem(KEY))
    (info,) = state.get_node_info(node_ids=[node])
    assert info.status == NodeStatus.ONLINE
    assert info.online_until > (datetime.now(UTC) + timedelta(days=10_000)).timestamp()
    assert not state.activate_node(node, 30.0), "which needs no second activation"


def test_an_instruction_is_given_to_its_node_once(broker: Broker) -> None:
    node, other = broker.node(public_pem(KEY)), broker.node(public_pem(OTHER))
    sent = instruction(broker, node)
    broker.put(sent)
    assert broker.take(other) is None
    taken = broker.take(node)
    assert taken is not None
    assert taken.metadata.message_id == sent.metadata.message_id
    assert broker.take(node) is None


def test_a_reply_is_accepted_once_and_takes_its_instruction_away(broker: Broker) -> None:
    sent = instruction(broker, broker.node(public_pem(KEY)))
    broker.put(sent)
    broker.take(sent.metadata.dst_node_id)
    reply = wire.reply_message(sent, b"answer")
    assert broker.num_messages == 1
    assert broker.accept(reply)
    assert broker.num_messages == 0
    assert not broker.accept(reply)


def test_the_link_state_itself_keeps_one_reply_per_instruction(broker: Broker, state: LinkState) -> None:
    sent = instruction(broker, broker.node(public_pem(KEY)))
    broker.put(sent)
    broker.take(sent.metadata.dst_node_id)
    reply = wire.reply_message(sent, b"answer")
    assert state.store_message_res(reply) == reply.metadata.message_id
    assert (state.num_message_ins(), state.num_message_res()) == (1, 1)
    state.store_message_res(reply)
    assert state.num_message_res() == 1
    state.delete_messages({sent.metadata.message_id})
    assert (state.num_message_ins(), state.num_message_res()) == (0, 0)


def test_a_reply_from_another_node_or_to_nothing_is_not_accepted(broker: Broker) -> None:
    node, other = broker.node(public_pem(KEY)), broker.node(public_pem(OTHER))
    sent = instruction(broker, node)
    broker.put(sent)
    broker.take(node)
    assert not broker.accept(wire.reply_message(instruction(broker, other), b"another node's"))
    assert not broker.accept(wire.reply_message(instruction(broker, node, number=1), b"to nothing"))
    assert broker.num_messages == 1
    assert broker.accept(wire.reply_message(sent, b"answer"))


def test_a_message_can_be_dropped_twice(broker: Broker) -> None:
    sent = instruction(broker, broker.node(public_pem(KEY)))
    broker.put(sent)
    for _ in range(2):
        broker.drop(sent.metadata.message_id)
        assert broker.num_messages == 0


def test_an_instruction_to_an_unknown_node_is_refused(broker: Broker) -> None:
    with pytest.raises(fedtrain.errors.FedtrainError, match="refused the message"):
        broker.put(instruction(broker, 12345))


def test_a_message_outlives_jumps_of_the_wall_clock(broker: Broker) -> None:
    """Made in June 2025 (see `instruction`) it is still there and may be answered: it lives for ten years."""
    sent = instruction(broker, broker.node(public_pem(KEY)))
    broker.put(sent)
    assert broker.take(sent.metadata.dst_node_id) is not None
    assert broker.accept(wire.reply_message(sent, b"answer"))


# Messages.


def test_the_content_of_a_message_travels_inside_its_protobuf_form(broker: Broker) -> None:
    large = bytes(range(256)) * 4096
    message = instruction(broker, 7)
    message.content["extra"] = ConfigRecord({"large": large, "text": "ü"})
    pulled = PullMessagesResponse(messages_list=[message_to_proto(message)]).SerializeToString()
    (proto,) = PullMessagesResponse.FromString(pulled).messages_list
    back = message_from_proto(proto)
    assert back.content == message.content
    assert back.content.config_records["extra"]["large"] == large
    assert back.metadata == message.metadata


def test_the_fields_of_flowers_requests_are_those_that_we_fill_and_read() -> None:
    assert PullMessagesRequest(node=Node(node_id=2**63)).node.node_id == 2**63
    push = PushMessagesRequest(node=Node(node_id=7), messages_list=[message_to_proto(_message())])
    assert (push.node.node_id, push.messages_list[0].metadata.src_node_id) == (7, 1)
    assert PushMessagesResponse(results={"m": 0}).results["m"] == 0


def _message() -> Message:
    task = task_of()
    return wire.task_message(task, run="r", flower_run=5, node=7, attempt=1, now=1.75e9, start=None)


def test_a_message_can_be_made_outside_of_flowers_processes() -> None:
    message = _message()
    assert message.metadata.src_node_id == SUPERLINK_NODE_ID == 1
    assert (message.metadata.message_id, message.metadata.message_type) == ("r-0-1", "train")
    assert isinstance(message.content, RecordDict)
    assert not message.has_error()


def test_our_paths_are_flowers() -> None:
    from flwr.superlink.routers.fleet.router import router

    paths = {getattr(route, "path", "") for route in router.routes}
    assert {wire.PULL_PATH, wire.PUSH_PATH} <= {
        path if path.startswith("/v1") else f"/v1/fleet{path}" for path in paths
    }


# Signatures.


def test_a_request_signed_by_flowers_interceptor_is_authentic_for_us() -> None:
    seen: list[httpx.Request] = []

    def send(context: ProtobufRequestContext) -> httpx.Response:
        seen.append(context.request)
        return httpx.Response(200)

    request = httpx.Request("POST", f"http://localhost{wire.PULL_PATH}")
    context = ProtobufRequestContext("PullMessages", PullMessagesRequest(), request)
    NodeAuthHttpInterceptor(KEY, KEY.public_key()).intercept(context, send)
    assert authenticate(dict(seen[0].headers)) == public_pem(KEY)
    seen[0].headers["flwr-timestamp"] = "2020-01-01T00:00:00+00:00"
    with pytest.raises(NotAuthenticated):
        authenticate(dict(seen[0].headers))


@pytest.fixture
def flowers_check(broker: Broker, state: LinkState) -> SimpleNamespace:
    """The least that Flower's own check looks at."""
    return SimpleNamespace(
        headers=Signer(KEY).headers(),
        state=SimpleNamespace(protobuf_request=PullMessagesRequest(node=Node(node_id=broker.node(public_pem(KEY))))),
        app=SimpleNamespace(state=SimpleNamespace(linkstate_factory=SimpleNamespace(state=lambda: state))),
    )


def test_a_request_signed_by_us_passes_flowers_check(flowers_check: SimpleNamespace) -> None:
    authenticate_node(flowers_check)  # type: ignore[arg-type]


def test_flowers_check_refuses_another_keys_signature_and_another_node(flowers_check: SimpleNamespace) -> None:
    good = flowers_check.headers
    flowers_check.headers = {**good, "flwr-signature": Signer(OTHER).headers()["flwr-signature"]}
    with pytest.raises(HTTPException) as refused:
        authenticate_node(flowers_check)  # type: ignore[arg-type]
    assert refused.value.status_code == 401
    flowers_check.headers, flowers_check.state.protobuf_request.node.node_id = good, 99
    with pytest.raises(HTTPException):
        authenticate_node(flowers_check)  # type: ignore[arg-type]


def test_a_signed_request_has_flowers_three_headers() -> None:
    assert list(Signer(KEY).headers()) == ["flwr-public-key", "flwr-timestamp", "flwr-signature"]
