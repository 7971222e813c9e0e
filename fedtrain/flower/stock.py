"""A client of a stock SuperLink: what a SuperNode and its ClientApp processes do, in one process.

The run's ServerApp is `fedtrain.flower.app.server_app`. Beside a SuperNode it saves the process that Flower starts for
each message, and asks often while there is work and seldom while there is none.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from flwr.app import Error, Message
from flwr.app.message import remove_content_from_message
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    ActivateNodeResponse,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
    PushMessagesResponse,
    RegisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest, SendNodeHeartbeatResponse
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedResponse,
    PullObjectResponse,
    PushObjectResponse,
)
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, no_object_id_recompute
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
    make_push_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, push_objects
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from fedtrain.client.capacity import measure_capacity
from fedtrain.client.identity import default_state_dir, require_client_id, take_state_dir
from fedtrain.client.trainer import Trainer
from fedtrain.client.worker import Worker
from fedtrain.errors import ParamsError
from fedtrain.flower.auth import Signer
from fedtrain.flower.records import answer_content, enrolment_content, performed, read_task
from fedtrain.flower.supernode import Line, NotEnrolled, Unavailable
from fedtrain.security.keys import load_or_create_key, public_pem
from fedtrain.security.tls import Trust
from fedtrain.types import ClientInfo

FIRST_POLL_S, POLL_GROWTH, LONGEST_POLL_S = 0.05, 1.5, 3.0
"""Pauses between questions for a message: the first one after there was one, and how they grow."""

_HEARTBEAT_S = 30.0
_TIMEOUT_S = 30.0
_AGAIN_S = 5.0
"""Pause after the SuperLink was away, or refused to activate the node of a process that it believes alive."""

_Answer = TypeVar("_Answer")
Tell = Callable[[str, Mapping[str, object]], None]


class StockClient:
    """Takes part in the runs of a stock SuperLink. It ends when it is told to: a SuperLink never says that it is over.

    Args:
        trainer: The model and its data, loaded once.
        superlink: ``HOST:PORT`` of the SuperLink.
        client_id: As for `fedtrain.Client`; on a stock SuperLink nothing ties it to the key.
        state_dir: Where the client keeps its key.
        tags: Text by name that the server may select by.
        ca: PEM file of the authority that signs the SuperLink's certificate; None: those that the system trusts.
        insecure: Speak plain text to every address.
        tell: As for `fedtrain.Client`.

    Raises:
        ConfigError: the id, the address, the state folder or the authority can't be used.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        superlink: str,
        client_id: str,
        state_dir: str | Path | None = None,
        tags: Mapping[str, str] | None = None,
        ca: str | Path | None = None,
        insecure: bool = False,
        tell: Tell = lambda word, details: None,
    ) -> None:
        self.id = require_client_id(client_id)
        self.state_dir = Path(state_dir) if state_dir else default_state_dir(client_id)
        self._worker, self._tags = Worker(trainer), dict(tags or {})
        key = load_or_create_key(self.state_dir)
        self._public, self._run = public_pem(key), ""
        self._superlink, self._signer, self._trust = superlink, Signer(key), Trust(ca, insecure=insecure)
        self._line()  # a wrong address is told now
        self._stopping, self._tell = threading.Event(), tell

    def run(self) -> None:
        """Take part until `stop` is called.

        Raises:
            ConfigError: another client uses the state folder.
        """
        lock = take_state_dir(self.state_dir)
        try:
            while not self._stopping.is_set():
                line = self._line()
                try:
                    self._serve(line, self._join(line))
                except Exception as error:  # whatever a SuperLink answers, or a network does: try again
                    self._tell("disconnected", {"reason": str(error) or "the SuperLink does not know this node"})
                    self._stopping.wait(_AGAIN_S)
                finally:
                    line.close()
        finally:
            lock.release()

    def _line(self) -> Line:
        return Line(self._superlink, self._signer, self._trust)

    def stop(self) -> None:
        """End after the message that is being handled."""
        self._stopping.set()

    def _join(self, line: Line) -> Node:
        """Register the key and activate its node. A process that was killed leaves it active for up to a minute."""
        _post(line, "register-node", RegisterNodeFleetRequest(public_key=self._public), allowed=(200, 412))
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=_HEARTBEAT_S)
        answer = _asked(line, "activate-node", request, ActivateNodeResponse)
        self._tell("connected", {"server": line.address, "run": "of a SuperLink"})
        return Node(node_id=answer.node_id)

    def _serve(self, line: Line, node: Node) -> None:
        """Handle messages until told to stop. Heartbeats go on beside, also while the trainer works."""
        done = threading.Event()
        beats = threading.Thread(
            target=self._beat, args=(node, done), name=f"fedtrain-{self.id}-heartbeat", daemon=True
        )
        beats.start()
        pause = FIRST_POLL_S
        try:
            while not self._stopping.wait(pause):
                pulled = _asked(line, "pull-messages", PullMessagesRequest(node=node), PullMessagesResponse)
                pause = min(POLL_GROWTH * pause, LONGEST_POLL_S)
                if pulled.messages_list:
                    self._reply(line, node, self._handled(_fetched(line, node, pulled)))
                    pause = FIRST_POLL_S
        finally:
            done.set()
            with contextlib.suppress(Unavailable, NotEnrolled):  # what ended this, an interrupt too, goes on
                _post(line, "deactivate-node", DeactivateNodeRequest(node_id=node.node_id))
            beats.join()

    def _beat(self, node: Node, done: threading.Event) -> None:
        line = self._line()
        while not done.wait(0.8 * _HEARTBEAT_S):
            request = SendNodeHeartbeatRequest(node=node, heartbeat_interval=_HEARTBEAT_S)
            with contextlib.suppress(Unavailable, NotEnrolled):  # the poll sees it too, and joins again
                _asked(line, "send-node-heartbeat", request, SendNodeHeartbeatResponse)
        line.close()

    def _handled(self, message: Message) -> Message:
        """The reply to a message; an error that says so if it is not one of fedtrain's."""
        try:
            return self._answered(message)
        except ParamsError as error:
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=message)

    def _answered(self, message: Message) -> Message:
        """Who this client is, or what came of a task."""
        if message.metadata.message_type.startswith("query"):
            info = ClientInfo(
                id=self.id,
                num_examples=self._worker.num_examples,
                tags=self._tags,
                capacity=measure_capacity(),
                local_algorithms=self._worker.local_algorithms,
            )
            return Message(enrolment_content(info), reply_to=message)
        task, run, start, verdicts = read_task(message.content)
        if run != self._run:
            self._run = run
            self._worker.forget()
        for number, counted in verdicts.items():
            self._worker.settle(number, counted)
        outcome = performed(self._worker, task, start, lambda error: self._tell("error", {"error": error}))
        details = {"reason": outcome.reason, "seconds": outcome.seconds, "metrics": dict(outcome.metrics)}
        self._tell("done", {"kind": task.kind, "round": task.round, "outcome": outcome.kind, "taken": True, **details})
        return Message(answer_content(outcome, run), reply_to=message)

    def _reply(self, line: Line, node: Node, reply: Message) -> None:
        """Push a reply and the objects that it is made of."""
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            request = PushMessagesRequest(
                node=node,
                messages_list=[message_to_proto(remove_content_from_message(reply))],
                message_object_trees=[get_object_tree(reply)],
            )
            pushed = _asked(line, "push-messages", request, PushMessagesResponse)
            push = make_push_object_fn_protobuf(
                lambda asked: _asked(line, "push-object", asked, PushObjectResponse),
                node,
                reply.metadata.run_id,
                pushed.session_id,
            )
            wanted = set(pushed.objects_to_push)
            # One at a time: a kept connection serves one request.
            push_objects(get_all_nested_objects(reply), push, object_ids_to_push=wanted, max_concurrent_pushes=1)


def _fetched(line: Line, node: Node, pulled: PullMessagesResponse) -> Message:
    """The pulled message with its content, which comes object by object."""
    tree, run = pulled.message_object_trees[0], pulled.messages_list[0].metadata.run_id
    message = pull_and_inflate_object_from_tree(
        tree,
        make_pull_object_fn_protobuf(lambda asked: _asked(line, "pull-object", asked, PullObjectResponse), node, run),
        make_confirm_message_received_fn_protobuf(
            lambda asked: _asked(line, "confirm-message-received", asked, ConfirmMessageReceivedResponse), node, run
        ),
        return_type=Message,
        max_concurrent_pulls=1,
    )
    message.metadata.__dict__["_message_id"] = tree.object_id
    return message


def _asked(line: Line, route: str, request: Any, answer: type[_Answer]) -> _Answer:
    found: Any = answer()
    found.ParseFromString(_post(line, route, request))
    return found  # type: ignore[no-any-return]


def _post(line: Line, route: str, request: Any, *, allowed: Sequence[int] = (200,)) -> bytes:
    status, body, _ = line.request(
        "POST",
        f"/v1/fleet/{route}",
        request.SerializeToString(),
        {"content-type": PROTOBUF_MEDIA_TYPE},
        timeout_s=_TIMEOUT_S,
    )
    if status not in allowed:
        raise Unavailable(f"{line.address} answered {status} to {route}: {body[:300].decode(errors='replace')}")
    return body
