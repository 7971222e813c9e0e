"""What a client says of itself when it joins."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fedtrain.errors import ConfigError, ConnectionRefused
from fedtrain.types import Capacity, ClientInfo, Partitioning

CLIENT_ID = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
"""A letter, then letters, digits, dots, underscores and hyphens; at most 64 characters."""

_MAX_NAMES, _MAX_NAME = 64, 200
"""Of a client's tags, devices and local algorithms, and the length of each: a server keeps them of every client."""


def require_client_id(client: str) -> str:
    """The id itself, if it is one.

    Raises:
        ConfigError: it is not.
    """
    if not CLIENT_ID.fullmatch(client):
        raise ConfigError(
            f"client.id={client!r}: expected a letter, then letters, digits and ._- (64 characters at most)"
        )
    return client


def default_state_dir(client: str) -> Path:
    """Where a client keeps its key if nothing else is said: the user's state folder, one folder per client id."""
    import platformdirs

    return Path(platformdirs.user_state_dir("fedtrain")) / "clients" / client


def take_state_dir(state_dir: Path) -> FileLock:
    """The lock of a client's folder, held until it is released (by any thread) or this process ends.

    Raises:
        ConfigError: another client uses the folder.
    """
    lock = FileLock(state_dir / "lock", thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ConfigError(
            f"client.state_dir={state_dir}: a client that is running uses this folder: "
            "stop it, or give this one an id and a state folder of its own"
        ) from None
    return lock


def capacity_from(values: Mapping[str, Any]) -> Capacity:
    """A `Capacity` from what a client sent.

    Raises:
        TypeError, ValueError, KeyError: a value is missing or of the wrong type.
    """
    return Capacity(
        num_cores=int(values["num_cores"]),
        memory_bytes=int(values["memory_bytes"]),
        devices=tuple(str(device) for device in values["devices"])[:64],
        device_memory_bytes=int(values["device_memory_bytes"]),
    )


def enrolment(info: ClientInfo) -> dict[str, Any]:
    """What a client says of itself, as JSON can hold it."""
    return {
        "client": info.id,
        "num_examples": info.num_examples,
        "tags": dict(info.tags),
        "capacity": asdict(info.capacity),
        "local_algorithms": list(info.local_algorithms),
        "partitioning": None if info.partitioning is None else asdict(info.partitioning),
    }


def client_info(values: Mapping[str, Any]) -> ClientInfo:
    """A `ClientInfo` from what a client sent: the inverse of `enrolment`, which believes nothing.

    Raises:
        ConnectionRefused: a value is missing or not what it should be.
    """
    try:
        client, num_examples, tags = values["client"], values["num_examples"], values["tags"]
        algorithms, capacity = values["local_algorithms"], capacity_from(values["capacity"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ConnectionRefused("the enrolment lacks a field, or has one of the wrong type: update fedtrain") from None
    if not isinstance(client, str) or not CLIENT_ID.fullmatch(client):
        raise ConnectionRefused("a client's id must be a letter, then up to 63 letters, digits and ._-")
    if type(num_examples) is not int or not 0 <= num_examples <= 2**53:
        raise ConnectionRefused("num_examples must be a whole number from 0 to 2**53")
    few = f"at most {_MAX_NAMES}, of up to {_MAX_NAME} characters"
    if not isinstance(tags, dict) or not _are_names([text for pair in tags.items() for text in pair], 2 * _MAX_NAMES):
        raise ConnectionRefused(f"tags must be printable text by name: {few}")
    if not isinstance(algorithms, list) or not _are_names(algorithms):
        raise ConnectionRefused(f"local_algorithms must be a list of names: {few}")
    if not _are_names(capacity.devices):
        raise ConnectionRefused(f"capacity.devices must be a list of names: {few}")
    amounts = (capacity.num_cores, capacity.memory_bytes, capacity.device_memory_bytes)
    if not all(0 <= amount < 2**63 for amount in amounts):
        raise ConnectionRefused("capacity must be given in numbers from 0 to 2**63")
    partitioning = _partitioning_from(values.get("partitioning"))
    return ClientInfo(client, num_examples, tags, capacity, tuple(algorithms), partitioning)


def _partitioning_from(values: Any) -> Partitioning | None:
    if values is None:  # its data is its own
        return None
    try:
        found = Partitioning(values["data"], values["num_partitions"], values["seed"])
    except (KeyError, TypeError):
        found = Partitioning("", -1, -1)
    numbers = (found.num_partitions, found.seed)
    if not _are_names([found.data]) or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise ConnectionRefused("partitioning must be a data target, num_partitions and a seed, or null")
    return found


def _are_names(values: Sequence[object], most: int = _MAX_NAMES) -> bool:
    return len(values) <= most and all(
        isinstance(value, str) and value.isprintable() and len(value) <= _MAX_NAME for value in values
    )
