"""The exceptions of fedtrain.

    FedtrainError
    ├── ConfigError        a setting is impossible or unknown: found at start, nothing has run
    ├── DataError          a data set, partition or file is not what was expected
    ├── ParamsError        named arrays differ from what the model declares, or cannot be read
    ├── StrategyError      the parts of a strategy do not fit together: found when it is built
    ├── AggregationError   a round's updates cannot become one: the round is skipped, the model stays
    │   └── TooFew         fewer updates, or less weight, than the rule needs
    ├── Declined           a client can't or won't do a task: an outcome, not a failure
    ├── Cancelled          a task was called off while it ran
    └── ConnectionRefused  the server answered, and the answer is final (for example: the id is taken)

Those that name an event rather than a mistake go without the suffix "Error".

Every message says four things: what was expected, what was found, where, and what to do.
"""


class FedtrainError(Exception):
    """Base of all errors that fedtrain raises on purpose."""


class ConfigError(FedtrainError):
    """A setting is unknown, has the wrong type, or an impossible value."""


class DataError(FedtrainError):
    """A data set, partition or file is not what was expected."""


class ParamsError(FedtrainError):
    """Named arrays differ from those the model declares, or a file of arrays cannot be read."""


class StrategyError(FedtrainError):
    """The parts of a strategy do not fit together."""


class AggregationError(FedtrainError):
    """A round's updates cannot be combined into one; the round is skipped and the model stays."""


class TooFew(AggregationError):  # noqa: N818
    """Fewer updates, or less total weight, than the rule needs."""


class Declined(FedtrainError):  # noqa: N818
    """A client declines a task; the message is the reason that the server records."""


class Cancelled(FedtrainError):  # noqa: N818
    """A task was called off (its round closed, or the client stops) while it ran."""


class ConnectionRefused(FedtrainError):  # noqa: N818
    """The server answered and its answer is final: trying again will not help."""
