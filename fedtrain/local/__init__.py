"""Local algorithms: what a client optimises, and what the server keeps for it.

A local algorithm has two halves. The server's is a `Local`; it sends a name and numbers with each task. The client's is
a `ClientHalf`, looked up by that name in `CLIENT_HALVES`; a client that lacks it declines the task.
"""

from fedtrain.errors import Declined
from fedtrain.local.algorithm import ClientHalf, Local
from fedtrain.local.feddyn import client_half as _feddyn
from fedtrain.local.feddyn import feddyn
from fedtrain.local.proximal import client_half as _proximal
from fedtrain.local.proximal import proximal
from fedtrain.local.scaffold import client_half as _scaffold
from fedtrain.local.scaffold import scaffold
from fedtrain.local.sgd_epochs import client_half as _sgd_epochs
from fedtrain.local.sgd_epochs import sgd_epochs

CLIENT_HALVES: dict[str, ClientHalf] = {
    "sgd_epochs": _sgd_epochs,
    "proximal": _proximal,
    "scaffold": _scaffold,
    "feddyn": _feddyn,
}
"""The client's half of each local algorithm, by the name that travels in the task."""


def client_half(name: str) -> ClientHalf:
    """The client's half of a local algorithm.

    Raises:
        Declined: this release of fedtrain has none of that name.
    """
    if name not in CLIENT_HALVES:
        raise Declined(f"this client can do {', '.join(CLIENT_HALVES)}, found {name!r}: update fedtrain on the client")
    return CLIENT_HALVES[name]


__all__ = ["CLIENT_HALVES", "ClientHalf", "Local", "client_half", "feddyn", "proximal", "scaffold", "sgd_epochs"]
