"""The same strategy, loop and client as an ordinary Flower app: for ``flwr run`` with stock SuperLink and SuperNodes.

A Flower project needs two lines, one in the module that its pyproject.toml names as the ServerApp, one in that of the
ClientApp:

    app = server_app()
    app = client_app()

What fedtrain-server and fedtrain-client take as arguments goes into the run config, as one string:

    [tool.flwr.app.config]
    overrides = "experiment=quickstart data.num_partitions=2 run_dir=/srv/runs/first"

A node's own settings go into its node config: ``partition-id`` and ``num-partitions`` as in all Flower apps,
``client-id`` (without it the client is called client-PARTITION, or node-NUMBER where there is no partition), and
``overrides`` for whatever else is this node's own, such as the path of its data.
"""

import json
import shlex
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedtrain.client.capacity import measure_capacity
from fedtrain.client.identity import require_client_id
from fedtrain.client.trainer import Trainer
from fedtrain.client.worker import Worker
from fedtrain.config import Config, build_strategy, build_trainer, compose
from fedtrain.errors import ConfigError
from fedtrain.flower.grid import GridFleet
from fedtrain.flower.memory import NodeMemory
from fedtrain.flower.records import answer_content, enrolment_content, performed, read_task
from fedtrain.run_folder import RESULT, run_folder
from fedtrain.training import Training, initial_model
from fedtrain.types import ClientInfo

_OVERRIDES = "overrides"
"""Name of a text in the run config and in the node config."""


def server_app(overrides: Sequence[str] = (), *, config_dir: str | Path | None = None) -> ServerApp:
    """A ServerApp that runs what fedtrain-server would run, and leaves the same files in ``run_dir``.

    Args:
        overrides: As on the command line; those in the run config come after them and win.
        config_dir: Folder with the user's own configuration files, as ``--config-dir``.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config = compose([*overrides, *_words(context.run_config)], config_dir)
        strategy, trainer = build_strategy(config), build_trainer(config, partition=None)
        start = initial_model(config, trainer)
        with (
            run_folder(Path(config.run_dir)) as folder,
            Training(config, strategy, trainer, start, folder, run=str(context.run_id)) as training,
        ):
            fleet = GridFleet(grid, run=training.run, lost_after_s=config.server.lost_after_s, report=training.report)
            status = training.train(fleet, address="a Flower grid")
        if status != "completed":  # an exception is how a ServerApp tells Flower that the run has failed
            reason = json.loads((folder / RESULT).read_text()).get("reason", "")
            raise RuntimeError(f"the run has {status}: {reason} (see {folder / RESULT})")

    return app


def client_app(overrides: Sequence[str] = (), *, config_dir: str | Path | None = None) -> ClientApp:
    """A ClientApp that does what fedtrain-client would do.

    Flower starts a new process for each message, so what the local algorithm remembers lies in the node's
    `Context.state`; as everywhere it changes only when the server says that the update was counted.

    Args:
        overrides: As on the command line; those in the run config come after them, then those in the node config.
        config_dir: Folder with the user's own configuration files, as ``--config-dir``.
    """
    app = ClientApp()

    def trainer_of(context: Context) -> tuple[Config, Trainer]:
        config = _node_config(context, overrides, config_dir)
        return config, build_trainer(config, partition=config.partition)

    @app.query()
    def enrol(message: Message, context: Context) -> Message:
        config, trainer = trainer_of(context)
        info = ClientInfo(
            id=_client_id(config, context),
            num_examples=trainer.num_examples,
            tags=config.client.tags,
            capacity=measure_capacity(),
            local_algorithms=tuple(trainer.local_algorithms),
        )
        return Message(enrolment_content(info), reply_to=message)

    @app.train()
    @app.evaluate()
    def perform(message: Message, context: Context) -> Message:
        _, trainer = trainer_of(context)
        task, run, start, verdicts = read_task(message.content)
        memory = NodeMemory(context.state)
        memory.settle(verdicts)
        worker = Worker(trainer, memory.state)
        outcome = performed(worker, task, start, traceback.print_exception)
        if outcome.update is not None:
            memory.keep(task.number, worker.pending(task.number))
        return Message(answer_content(outcome, run), reply_to=message)

    return app


def _words(config: Any) -> list[str]:
    """The overrides in a run or node config, split as a shell would."""
    text = config.get(_OVERRIDES, "")
    if not isinstance(text, str):
        raise ConfigError(f'{_OVERRIDES}: expected text such as "experiment=quickstart rounds=3", found {text!r}')
    return shlex.split(text)


def _node_config(context: Context, overrides: Sequence[str], config_dir: str | Path | None) -> Config:
    """The configuration of a node: the run's, with the node's own part of the data.

    Raises:
        ConfigError: the node and the run disagree about the number of partitions, or a value is impossible.
    """
    node = context.node_config
    words = [*overrides, *_words(context.run_config), *_words(node)]
    if "partition-id" in node:
        words.append(f"data.partition={node['partition-id']}")
    config = compose(words, config_dir)
    num_partitions = node.get("num-partitions", config.num_partitions)
    if num_partitions != config.num_partitions:  # the parts of two different splits would overlap
        raise ConfigError(
            f"num-partitions in the node config is {num_partitions}, data.num_partitions of the run is "
            f"{config.num_partitions}: make them equal"
        )
    return config


def _client_id(config: Config, context: Context) -> str:
    own = context.node_config.get("client-id", config.client.id)
    if own is None:
        own = f"node-{context.node_id}" if config.partition is None else f"client-{config.partition}"
    return require_client_id(str(own))
