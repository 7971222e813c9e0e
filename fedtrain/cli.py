"""The commands: fedtrain-server, fedtrain-client, fedtrain-sim.

Flower and torch are imported by the function that needs them, so that ``--help`` and a mistyped key answer at once.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import FrameType

from fedtrain.client.trainer import Trainer
from fedtrain.config import Config, build_strategy, build_trainer, main
from fedtrain.errors import ConfigError
from fedtrain.plan import require_enough_asked
from fedtrain.run_folder import run_folder
from fedtrain.schema import require
from fedtrain.security.allow import AllowList, require_listed
from fedtrain.security.tls import ServerCertificate, require_encrypted
from fedtrain.strategy import Strategy
from fedtrain.training import Training, cohort_settings, initial_model
from fedtrain.types import Partitioning

_INTERRUPTED = 130
"""Exit status of a command that was stopped with Ctrl-C or SIGTERM, as shells have it."""


@main
def server(config: Config) -> int:
    """Wait for clients, run the rounds, keep the model."""
    _stop_on_signals()
    for chatty in ("alembic", "uvicorn"):  # what they have to say is not the operator's business
        logging.getLogger(chatty).setLevel(logging.WARNING)
    wanted, (certificate, allow) = config.server, _protection(config)
    from fedtrain.flower.fleet import FlowerFleet, new_run_id
    from fedtrain.flower.limits import Limits
    from fedtrain.flower.server import listen, serving

    logging.getLogger("flwr").setLevel(logging.WARNING)  # Flower sets its own level when it is imported
    strategy = build_strategy(config)
    require_enough_asked(strategy, cohort_settings(config))
    trainer = build_trainer(config, partition=None)
    start = initial_model(config, trainer)
    with run_folder(Path(config.run_dir)) as folder, closing(listen(wanted.host, wanted.port)) as listener:
        training = Training(config, strategy, trainer, start, folder, run=new_run_id())
        fleet = FlowerFleet(
            training.run,
            folder,
            lost_after_s=wanted.lost_after_s,
            report=training.report,
            allow=allow,
            max_clients=wanted.max_clients,
            partitioning=_partitioning(config),
        )
        port = serving(
            fleet,
            wanted.host,
            wanted.port,
            training.status.snapshot,
            certificate=certificate,
            insecure=wanted.insecure,
            anyone=config.clients.open,
            limits=Limits(wanted.max_strangers, wanted.max_uploads, wanted.min_bytes_per_s),
            listener=listener,
        )
        with training, port as (host, number):
            status = training.train(fleet, address=f"[{host}]:{number}" if ":" in host else f"{host}:{number}")
            if status != "stopped":  # a server that was stopped may come back: its clients wait for it
                fleet.finish(status, timeout_s=3.0)
    return _exit_status(status)


@main
def simulate(config: Config) -> int:
    """Server and clients in one process; clients are called as `fedtrain-client` calls them by default."""
    from fedtrain.fleet.memory import MemoryFleet

    _stop_on_signals()
    strategy = build_strategy(config)
    require_enough_simulated(config, strategy)
    trainer = build_trainer(config, partition=None)
    start = initial_model(config, trainer)
    clients = {_default_id(part): build_trainer(config, partition=part) for part in range(config.num_partitions)}
    with (
        run_folder(Path(config.run_dir)) as folder,
        Training(config, strategy, trainer, start, folder, run="simulated") as training,
    ):
        status = training.train(MemoryFleet(clients), address="")
    return _exit_status(status)


@main
def client(config: Config) -> int:
    """Train on this client's data whenever the server asks, until it says that the run is over."""
    from fedtrain.client.agent import Client

    _stop_on_signals()
    if config.client.id is None and config.partition is None:
        raise ConfigError("client.id: a client needs a name that stays its own, such as client.id=hospital-7")
    trainer = build_trainer(config, partition=config.partition)
    if config.partition is None and not trainer.num_examples:
        raise ConfigError(
            "data.partition: without it this client has no examples to train on: set which part of the data is its "
            f"own, in [0, {config.num_partitions}), or choose data that it holds itself"
        )
    if config.server.stock:
        return _client_of_stock(config, trainer)
    member = Client(
        trainer,
        server=config.server.addresses,
        client_id=config.client.id or _default_id(config.partition),
        state_dir=config.client.state_dir,
        tags=config.client.tags,
        stay=config.client.stay,
        ca=config.server.ca,
        insecure=config.server.insecure,
        partitioning=None if config.partition is None else _partitioning(config),
        tell=_say_nothing if config.display == "none" else lambda word, details: _say(member.id, word, details),
    )
    try:
        member.start()
        while not member.wait(0.5):
            pass
    except KeyboardInterrupt:
        print(f"{member.id}: stopped; its key and id stay in {member.state_dir}", flush=True)
        if not member.stop(timeout_s=1.5):
            os._exit(_INTERRUPTED)  # a trainer that does not return must not hold up Ctrl-C
        return _INTERRUPTED
    if member.status.phase == "refused":
        print(f"error: {member.status.error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _client_of_stock(config: Config, trainer: Trainer) -> int:
    from fedtrain.flower.stock import StockClient

    member = StockClient(
        trainer,
        superlink=config.server.addresses[0],
        client_id=config.client.id or _default_id(config.partition),
        state_dir=config.client.state_dir,
        tags=config.client.tags,
        ca=config.server.ca,
        insecure=config.server.insecure,
        tell=_say_nothing if config.display == "none" else lambda word, details: _say(member.id, word, details),
    )
    try:
        member.run()
    except KeyboardInterrupt:
        print(f"{member.id}: stopped; its key and id stay in {member.state_dir}", flush=True)
    return _INTERRUPTED


def require_enough_simulated(config: Config, strategy: Strategy) -> None:
    """Refuse a simulation that would wait for clients that never come, or never count a round.

    Raises:
        ConfigError: there are fewer simulated clients than must be connected, must answer or make a cohort.
    """
    require_enough_asked(strategy, cohort_settings(config))
    there = config.num_partitions
    for key, needed in (("cohort.connected", config.cohort.connected), ("cohort.answers", config.cohort.answers or 1)):
        number = "data.num_partitions, the number of simulated clients"
        require(needed <= there, key, f"at most {there} ({number})", needed)
    least = strategy.aggregate.min_updates
    allowed = f"at least {least}, one client for each update that the strategy's aggregator needs"
    require(least <= there, "data.num_partitions", allowed, there)


def _protection(config: Config) -> tuple[ServerCertificate | None, AllowList | None]:
    """The server's certificate and its list of clients.

    What `serving` would refuse is refused here, before anything is written.
    """
    server = config.server
    certificate = ServerCertificate(server.certificate, server.key) if server.certificate and server.key else None
    try:
        allow = AllowList(config.clients.allow) if config.clients.allow else None
    except ConfigError as error:
        raise ConfigError(f"clients.allow: {error}") from error
    require_encrypted(server.host, certificate=certificate is not None, insecure=server.insecure)
    require_listed(server.host, listed=allow is not None, anyone=config.clients.open)
    return certificate, allow


def _partitioning(config: Config) -> Partitioning:
    return Partitioning(config.data["_target_"], config.num_partitions, config.seed)


def _default_id(partition: int | None) -> str:
    return f"client-{partition}"


def _exit_status(status: str) -> int:
    return {"completed": 0, "stopped": _INTERRUPTED}.get(status, 1)


def _stop_on_signals() -> None:
    """Let SIGTERM and SIGINT end a command cleanly, also one that a shell has started in the background."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)


def _say_nothing(word: str, details: Mapping[str, object]) -> None:
    pass


def _say(client: str, word: str, details: Mapping[str, object]) -> None:
    """One line per event of a client."""
    match word:
        case "connected":
            text = f"connected to {details['server']}, run {details['run']}"
        case "disconnected":
            text = f"connection lost ({details['reason']}); trying again"
        case "done":
            numbers = ", ".join(f"{name} {value:.4g}" for name, value in _metrics(details).items())
            verb = "trained" if details["kind"] == "train" else "evaluated"
            how = f"{verb} in {details['seconds']:.2f} s" if details["outcome"] == "ok" else details["outcome"]
            text = f"round {details['round']}: {how}" + (f" ({numbers})" if numbers else "")
            text += f": {details['reason']}" if details["reason"] else ""
            text += "" if details["taken"] else " (too late)"
        case "cancelled":
            text = f"round {details['round']}: called off by the server"
        case "error":
            text = f"the trainer raised:\n{details['error']}"
        case "refused":
            text = f"refused: {details['reason']}"
        case "over":
            text = f"the run is over: {details['status']}"
        case _:
            return
    print(f"{time.strftime('%H:%M:%S')} {client}: {text}", flush=True)


def _metrics(details: Mapping[str, object]) -> Mapping[str, float]:
    metrics = details["metrics"]
    return metrics if isinstance(metrics, Mapping) else {}
