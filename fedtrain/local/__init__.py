"""Local algorithms: what a client optimises, and what the server keeps for it.

A local algorithm has two halves. The server's is a `Local`; it sends a name and numbers with each task. The client's is
a `ClientHalf`, looked up by that name in `CLIENT_HALVES`; a client that lacks it declines the task.
"""

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

__all__ = ["CLIENT_HALVES", "ClientHalf", "Local", "feddyn", "proximal", "scaffold", "sgd_epochs"]
