"""fedtrain: owners of data that may not be moved train one model together.

The parts of a strategy are in `selection`, `local`, `transforms`, `aggregation` and `server_optimizers`; ready-made
strategies in `fedtrain.strategies`; a client that lives in your own program is `fedtrain.Client`.
"""

from pathlib import Path as _Path
from typing import TYPE_CHECKING, Any

# In a checkout, `strategies/` and `conf/` lie beside this package; in a wheel they lie inside it. Adding the checkout
# to the package's path makes `fedtrain.strategies` and `fedtrain.conf` the same names in both.
if (_Path(__file__).parents[1] / "pyproject.toml").is_file():
    __path__.append(str(_Path(__file__).parents[1]))

from fedtrain.state import RoundRecord, RunState
from fedtrain.strategy import Strategy

if TYPE_CHECKING:
    from fedtrain.client import Client

__version__ = "0.1.0"

__all__ = ["Client", "RoundRecord", "RunState", "Strategy", "__version__"]


def __getattr__(name: str) -> Any:
    # The client brings Flower with it (0.5 s); who only builds strategies need not wait for that.
    if name == "Client":
        from fedtrain.client import Client

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
