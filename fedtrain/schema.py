"""The schema of the configuration: what each key means, its type, unit and range.

The values are in ``conf/config.yaml``: no key has a second default here. Impossible values are refused when a `Config`
is made, which is before anything runs.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard, cast

from fedtrain.errors import ConfigError


@dataclass
class Server:
    """Where the server listens, where clients look for it, how they know it, and when a client counts as lost."""

    host: str
    """Interface that the server listens on; ``0.0.0.0`` or ``::`` for all."""
    port: int
    """In [0, 65535]; 0 takes any free port."""
    addresses: list[str]
    """``HOST:PORT``, tried by a client in this order, at least one; IPv6 in brackets: ``[::1]:9092``."""
    lost_after_s: float
    """Seconds of silence after which a client counts as lost, > 0."""
    certificate: str | None
    """PEM file: the server's certificate, then those between it and its authority; null: none, plain text."""
    key: str | None
    """PEM file of the certificate's private key; given with it, or not at all."""
    ca: str | None
    """PEM file of the authority that a client trusts; null: those of its system."""
    insecure: bool
    """Whether models and updates may travel in plain text between machines."""
    stock: bool
    """Whether the address is that of a stock SuperLink (`flwr run`), whose ServerApp is fedtrain's."""
    max_clients: int
    """Different clients that may join, >= 1; then others are refused."""
    max_strangers: int
    """Connections at once of which no client that has joined is known, >= 1; the oldest makes room for a new one."""
    max_uploads: int
    """Large answers that are received at once, >= 1; others wait their turn."""
    min_bytes_per_s: float
    """A body or a model on its way that is slower, after ten seconds, is given up; >= 0."""

    def check(self) -> None:
        """Raise a `ConfigError` if a value is impossible."""
        require(bool(self.host.strip()), "server.host", "a name or address to listen on", self.host)
        require(0 <= self.port <= 65535, "server.port", "a port in [0, 65535], 0 for any free one", self.port)
        require(bool(self.addresses), "server.addresses", "at least one HOST:PORT", self.addresses)
        for address in self.addresses:
            parse_address(address)
        _require_seconds("server.lost_after_s", self.lost_after_s)
        for key in ("max_clients", "max_strangers", "max_uploads"):
            require(getattr(self, key) >= 1, f"server.{key}", "a number >= 1", getattr(self, key))
        slowest = self.min_bytes_per_s
        require(0 <= slowest < float("inf"), "server.min_bytes_per_s", "bytes per second >= 0", slowest)
        for key, other in (("key", "certificate"), ("certificate", "key")):
            given = getattr(self, key) is not None or getattr(self, other) is None
            require(given, f"server.{key}", f"a path, since server.{other} is given", getattr(self, key))
        for key in ("certificate", "ca"):
            plain = self.insecure and getattr(self, key) is not None
            require(not plain, "server.insecure", f"false where server.{key} is given: drop one of them", True)


@dataclass
class Clients:
    """Who may join."""

    allow: str | None
    """File of client ids and public keys, read again when it changes; null: anyone, and an id is its first user's."""
    open: bool
    """Whether a server that other machines reach may do without such a file."""

    def check(self) -> None:
        """Raise a `ConfigError` if a value is impossible."""
        both = self.open and self.allow is not None
        require(not both, "clients.open", "false where clients.allow is given: drop one of them", True)


@dataclass
class Client:
    """Who a client is."""

    id: str | None
    """Durable name: a letter, then letters, digits and ``._-``, at most 64 characters; null lets the client choose."""
    state_dir: str | None
    """Folder of its key; null: a folder per id under the user's state folder."""
    stay: bool
    """Whether it waits for the next run when one has ended, instead of leaving."""
    tags: dict[str, str]
    """Free text by name that selectors and reports may use, such as ``site: berlin``."""

    def check(self) -> None:
        """Raise a `ConfigError` if a value is impossible."""
        fits = self.id is None or re.fullmatch(r"[A-Za-z][A-Za-z0-9._-]{0,63}", self.id)
        require(bool(fits), "client.id", "a letter, then letters, digits, '.', '_' or '-', at most 64", self.id)


@dataclass
class Cohort:
    """How many clients a round waits for, asks and needs, and for how long."""

    connected: int
    """Clients that must be connected before a round starts, >= 1."""
    connect_deadline_s: float
    """Seconds to wait for them, > 0."""
    asked: int | None
    """Clients asked in a round, >= 1; null: as many as the strategy's selector chooses."""
    answers: int | None
    """Usable answers that a round needs, >= 1; null: more than half of those asked."""
    deadline_s: float
    """Seconds that clients have to answer, > 0."""
    grace_s: float | None
    """Seconds that the others still have once enough have answered, >= 0; null: until the deadline."""
    under_quorum: str
    """With too few answers: ``skip`` the round (the model stays) or ``retry`` it (the same plan, asked again)."""
    max_update_norm: float | None
    """An update whose delta or second payload has a larger L2 norm over its floats is invalid, > 0; null: any may."""
    max_examples: int | None
    """An answer that counts more examples is invalid, >= 1; null: up to 2**53."""

    def check(self) -> None:
        """Raise a `ConfigError` if a value is impossible."""
        require(self.connected >= 1, "cohort.connected", "a number of clients >= 1", self.connected)
        _require_seconds("cohort.connect_deadline_s", self.connect_deadline_s)
        for key, value in (("cohort.asked", self.asked), ("cohort.answers", self.answers)):
            require(value is None or value >= 1, key, "a number of clients >= 1, or null", value)
        if self.asked is not None and self.answers is not None:
            require(
                self.answers <= self.asked,
                "cohort.answers",
                f"at most cohort.asked, which is {self.asked}",
                self.answers,
            )
        _require_seconds("cohort.deadline_s", self.deadline_s)
        if self.grace_s is not None:
            require(0 <= self.grace_s < float("inf"), "cohort.grace_s", "seconds >= 0, or null", self.grace_s)
        _require_choice("cohort.under_quorum", self.under_quorum, "skip", "retry")
        norm, examples = self.max_update_norm, self.max_examples
        if norm is not None:
            require(0 < norm < float("inf"), "cohort.max_update_norm", "a number > 0, or null", norm)
        if examples is not None:
            allowed = "a number of examples in [1, 2**53], or null"
            require(1 <= examples <= 2**53, "cohort.max_examples", allowed, examples)


@dataclass
class Wire:
    """What travels between server and clients."""

    dtype: str | None
    """``bfloat16`` or ``float16``: float32 arrays of model and updates travel rounded to it; null: as they are."""

    def check(self) -> None:
        """Raise a `ConfigError` if a value is impossible."""
        if self.dtype is not None:
            require(self.dtype in ("bfloat16", "float16"), "wire.dtype", "bfloat16, float16 or null", self.dtype)


@dataclass
class Evaluation:
    """Where and how often the global model is measured on held-out data."""

    where: str
    """``server`` (its own held-out data), ``clients`` (theirs), ``both`` or ``none``."""
    every: int
    """Rounds from one evaluation to the next, >= 1; the last round is always evaluated."""

    def check(self) -> None:
        """Raise a `ConfigError` if a value is impossible."""
        _require_choice("evaluation.where", self.where, "server", "clients", "both", "none")
        require(self.every >= 1, "evaluation.every", "a number of rounds >= 1", self.every)


@dataclass
class Config:
    """All that a server, a client or a simulation is told. Groups are mappings with ``_target_`` and its arguments.

    Raises:
        ConfigError: a value is impossible; the message names its key, what is allowed and what was found.
    """

    rounds: int
    """Rounds of the run, >= 1."""
    seed: int
    """In [0, 2**63): decides the initial model, the split of the data, selection and the order of batches."""
    run_dir: str
    """Folder of all that a run writes."""
    display: str
    """``live`` (a terminal), ``lines`` (one per event), ``none``, or ``auto``: live on a terminal, else lines."""
    server: Server
    clients: Clients
    client: Client
    cohort: Cohort
    wire: Wire
    evaluation: Evaluation
    strategy: dict[str, Any]
    """Gives a `Strategy`; its arguments are the strategy's numbers."""
    model: dict[str, Any]
    """Gives the model; ``initial`` is a safetensors file to start from, or null: made by the target from the seed."""
    data: dict[str, Any]
    """Gives a `Split`; ``partition`` is a client's part, in [0, num_partitions), or null for the server's."""
    trainer: dict[str, Any]
    """Gives a `Trainer`; the model and the data are added to its arguments."""
    selection: dict[str, Any] = field(default_factory=dict)
    """Like the five below: replaces this one slot of the strategy; empty keeps the strategy's own."""
    local: dict[str, Any] = field(default_factory=dict)
    on_client: dict[str, Any] = field(default_factory=dict)
    aggregation: dict[str, Any] = field(default_factory=dict)
    on_server: dict[str, Any] = field(default_factory=dict)
    server_optimizer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require(self.rounds >= 1, "rounds", "a number of rounds >= 1", self.rounds)
        require(0 <= self.seed < 2**63, "seed", "a whole number in [0, 2**63)", self.seed)
        require(bool(self.run_dir.strip()), "run_dir", "the path of a folder", self.run_dir)
        _require_choice("display", self.display, "auto", "live", "lines", "none")
        initial = self.model.get("initial")
        require(initial is None or isinstance(initial, str), "model.initial", "a path, or null", initial)
        partition, count = self.data.get("partition"), self.data.get("num_partitions")
        require(_is_int(count) and count >= 1, "data.num_partitions", "a whole number >= 1", count)
        fits = partition is None or (_is_int(partition) and 0 <= partition < cast(int, count))
        require(fits, "data.partition", f"a whole number in [0, {count}) (data.num_partitions), or null", partition)
        # After the data: cohort.connected is often data.num_partitions, and that is the key to name then.
        for part in (self.server, self.clients, self.client, self.cohort, self.wire, self.evaluation):
            part.check()

    @property
    def initial_model(self) -> Path | None:
        """``model.initial``: the safetensors file that the run starts from, if there is one."""
        initial = self.model.get("initial")
        return None if initial is None else Path(initial)

    @property
    def partition(self) -> int | None:
        """``data.partition``: which part of the data a client holds."""
        return cast("int | None", self.data["partition"])

    @property
    def num_partitions(self) -> int:
        """``data.num_partitions``: into how many parts the data is split."""
        return cast(int, self.data["num_partitions"])


def parse_address(address: str, *, key: str = "server.addresses") -> tuple[str, int]:
    """Split ``HOST:PORT`` or ``[IPV6]:PORT``.

    Raises:
        ConfigError: there is no host, no port in [1, 65535], or an IPv6 address without brackets.

    >>> parse_address("[::1]:9092")
    ('::1', 9092)
    """
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+(?:%\w+)?)\]|([^\s:/\[\]@]+)):([0-9]{1,5})", address)
    allowed = "HOST:PORT with a port in [1, 65535]; an IPv6 address in brackets, such as '[::1]:9092'"
    if match is None or not 1 <= int(match[3]) <= 65535:
        raise ConfigError(f"{key}: expected {allowed}, found {address!r}")
    return match[1] or match[2], int(match[3])


def require(holds: bool, key: str, allowed: str, found: object) -> None:
    """Raise a `ConfigError` that names the key, what is allowed and what was found, unless it `holds`."""
    if not holds:
        raise ConfigError(f"{key}: expected {allowed}, found {found!r}")


def _require_seconds(key: str, found: float) -> None:
    require(0 < found < float("inf"), key, "seconds > 0", found)


def _require_choice(key: str, found: str, *choices: str) -> None:
    require(found in choices, key, f"one of {', '.join(choices)}", found)


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
