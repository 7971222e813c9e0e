"""What a client says of itself when it joins."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedtrain.errors import ConfigError
from fedtrain.types import Capacity

CLIENT_ID = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
"""A letter, then letters, digits, dots, underscores and hyphens; at most 64 characters."""


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
