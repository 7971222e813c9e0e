"""Flower's link state for one run: nodes by their key, instructions and replies as Flower messages."""

from flwr.app import Message
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID, TaskType
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager

from fedtrain.errors import FedtrainError

_ONLINE_S = 1e9  # liveness is ours, in seconds; Flower's patience is never to run out


class Broker:
    """An in-memory link state with one running run. Thread-safe, as the link state is."""

    def __init__(self) -> None:
        factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory())
        self._state = factory.state()
        self.run = self._state.create_run(
            fab_id=None,
            fab_version=None,
            fab_hash=None,
            override_config={},
            federation_id=NOOP_FEDERATION_ID,
            federation_config=None,
            flwr_aid=NOOP_FLWR_AID,
            primary_task_type=TaskType.SERVER_APP,
        )
        task = self._state.get_run_info(run_ids=[self.run])[0].primary_task_id
        if task is None or self._state.claim_task(task) is None or not self._state.activate_task(task):
            raise FedtrainError("Flower's link state did not start the run: is flwr a tested release (1.42)?")

    def node(self, public_key: bytes) -> int:
        """The node of a key, created and online for good if there is none."""
        node = self._state.get_node_id_by_public_key(public_key)
        if node is None:
            node = self._state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, public_key, _ONLINE_S)
            if not self._state.activate_node(node, _ONLINE_S):
                raise FedtrainError("Flower's link state did not activate a node: is flwr a tested release (1.42)?")
        return node

    def put(self, message: Message) -> None:
        """Store an instruction for its node."""
        if self._state.store_message_ins(message) is None:
            raise FedtrainError(f"Flower's link state refused the message {message.metadata.message_id!r}")

    def take(self, node: int) -> Message | None:
        """The node's next instruction that was not delivered yet."""
        messages = self._state.get_message_ins(node, limit=1)
        return messages[0] if messages else None

    def accept(self, reply: Message) -> bool:
        """Whether a reply answers an instruction that was given to its node; each is accepted once."""
        if self._state.store_message_res(reply) is None:
            return False
        self.drop(reply.metadata.reply_to_message_id)
        return True

    def drop(self, message_id: str) -> None:
        """Forget an instruction and its reply."""
        self._state.delete_messages({message_id})

    @property
    def num_messages(self) -> int:
        """Instructions and replies that are stored."""
        return self._state.num_message_ins() + self._state.num_message_res()
