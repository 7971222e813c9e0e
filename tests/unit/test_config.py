"""Configuration: what is composed, what is refused and how it is said, and what is built from it."""

import dataclasses
import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtrain.aggregation import by_examples, equally
from fedtrain.client.numpy_trainer import NumpyTrainer
from fedtrain.config import Config, build_strategy, build_trainer, compose, parse_address
from fedtrain.errors import ConfigError, DataError
from fedtrain.testing import cohort_of, update_of
from fedtrain.types import ClientInfo

NUMPY = "experiment=quickstart_numpy"


def keys(node: Any, parents: str = "") -> list[str]:
    """All keys of the schema that have one value, such as ``cohort.asked``."""
    found = []
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        name = f"{parents}{field.name}"
        found += keys(value, f"{name}.") if dataclasses.is_dataclass(value) else [name]
    return found


def test_without_arguments_the_documented_defaults_hold() -> None:
    config = compose([])
    assert (config.rounds, config.seed, config.display) == (10, 0, "auto")
    assert re.fullmatch(r"runs/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", config.run_dir)
    assert dataclasses.asdict(config.server) == {
        "host": "127.0.0.1",
        "port": 9092,
        "addresses": ["127.0.0.1:9092"],
        "lost_after_s": 5.0,
        "certificate": None,
        "key": None,
        "ca": None,
        "insecure": False,
        "stock": False,
        "max_clients": 10_000,
        "max_strangers": 256,
        "max_uploads": 64,
        "min_bytes_per_s": 1024.0,
    }
    assert dataclasses.asdict(config.clients) == {"allow": None, "open": False}
    assert dataclasses.asdict(config.client) == {"id": None, "state_dir": None, "stay": False, "tags": {}}
    assert dataclasses.asdict(config.cohort) == {
        "connected": 1,
        "connect_deadline_s": 600.0,
        "asked": None,
        "answers": None,
        "deadline_s": 600.0,
        "grace_s": None,
        "under_quorum": "skip",
        "max_update_norm": None,
        "max_examples": None,
    }
    assert dataclasses.asdict(config.evaluation) == {"where": "server", "every": 1}
    assert (config.partition, config.num_partitions, config.initial_model) == (None, 1, None)
    assert not any([config.selection, config.local, config.on_client, config.aggregation])
    assert not any([config.on_server, config.server_optimizer])


@pytest.mark.parametrize("experiment", ["quickstart", "quickstart_numpy"])
def test_the_quickstart_waits_for_as_many_clients_as_there_are_partitions(experiment: str) -> None:
    config = compose([f"experiment={experiment}"])
    assert (config.num_partitions, config.cohort.connected) == (5, 5)
    assert config.run_dir == f"runs/{experiment}"
    other = compose([f"experiment={experiment}", "data.num_partitions=3", "data.partition=2"])
    assert (other.partition, other.num_partitions, other.cohort.connected) == (2, 3, 3)


def test_the_command_line_wins_over_the_experiment() -> None:
    assert compose([NUMPY, "rounds=3"]).rounds == 3
    assert compose([NUMPY, "strategy.epochs=7"]).strategy["epochs"] == 7


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("rounds=0", "rounds: expected a number of rounds >= 1, found 0"),
        ("rounds=many", "rounds: expected a whole number, found many"),
        ("rounds=1.5", "rounds: expected a whole number, found 1.5"),
        ("rounds=true", "rounds: expected a whole number, found True"),
        ("seed=-1", "seed: expected a whole number in [0, 2**63), found -1"),
        ("seed=9223372036854775808", "seed: expected a whole number in [0, 2**63), found 9223372036854775808"),
        ("run_dir=''", "run_dir: expected the path of a folder, found ''"),
        ("display=off", "display: expected one of auto, live, lines, none, found 'off'"),
        ("model.initial=3", "model.initial: expected a path, or null, found 3"),
        ("data.num_partitions=0", "data.num_partitions: expected a whole number >= 1, found 0"),
        (
            "data.partition=5",
            "data.partition: expected a whole number in [0, 5) (data.num_partitions), or null, found 5",
        ),
        ("data.partition=-1", "data.partition: expected a whole number in [0, 5)"),
        ("server.host=' '", "server.host: expected a name or address to listen on, found ' '"),
        ("server.port=65536", "server.port: expected a port in [0, 65535], 0 for any free one, found 65536"),
        ("server.port=null", "server.port: expected a value, found null"),
        ("server.addresses=[]", "server.addresses: expected at least one HOST:PORT, found []"),
        ("server.addresses=fl:9092", "server.addresses: expected a list, such as [a,b]"),
        ("server.addresses=[fl]", "server.addresses: expected HOST:PORT"),
        ("server.lost_after_s=0", "server.lost_after_s: expected seconds > 0, found 0.0"),
        ("server.certificate=c.pem", "server.key: expected a path, since server.certificate is given, found None"),
        ("server.key=k.pem", "server.certificate: expected a path, since server.key is given, found None"),
        ("server.lost_after_s=soon", "server.lost_after_s: expected a number, found soon"),
        ("client.id=7", "client.id: expected a letter, then letters, digits, '.', '_' or '-', at most 64, found '7'"),
        ("client.id=a/b", "client.id: expected a letter"),
        ("client.id=a" + 64 * "b", "client.id: expected a letter"),
        ("client.stay=perhaps", "client.stay: expected true or false, found perhaps"),
        ("cohort.connected=0", "cohort.connected: expected a number of clients >= 1, found 0"),
        ("cohort.connect_deadline_s=inf", "cohort.connect_deadline_s: expected seconds > 0, found inf"),
        ("cohort.asked=0", "cohort.asked: expected a number of clients >= 1, or null, found 0"),
        ("cohort.answers=0", "cohort.answers: expected a number of clients >= 1, or null, found 0"),
        ("cohort.deadline_s=nan", "cohort.deadline_s: expected seconds > 0, found nan"),
        ("cohort.grace_s=-1", "cohort.grace_s: expected seconds >= 0, or null, found -1.0"),
        ("server.max_clients=0", "server.max_clients: expected a number >= 1, found 0"),
        ("server.max_strangers=0", "server.max_strangers: expected a number >= 1, found 0"),
        ("server.max_uploads=0", "server.max_uploads: expected a number >= 1, found 0"),
        ("server.min_bytes_per_s=-1", "server.min_bytes_per_s: expected bytes per second >= 0, found -1.0"),
        ("cohort.max_update_norm=0", "cohort.max_update_norm: expected a number > 0, or null, found 0.0"),
        (
            "cohort.max_examples=0",
            "cohort.max_examples: expected a number of examples in [1, 2**53], or null, found 0",
        ),
        ("wire.dtype=float32", "wire.dtype: expected bfloat16, float16 or null, found 'float32'"),
        ("wire.dtype='null'", "wire.dtype: expected bfloat16, float16 or null, found 'null'"),
        ("cohort.under_quorum=wait", "cohort.under_quorum: expected one of skip, retry, found 'wait'"),
        ("evaluation.where=here", "evaluation.where: expected one of server, clients, both, none, found 'here'"),
        ("evaluation.every=0", "evaluation.every: expected a number of rounds >= 1, found 0"),
        ("rouds=3", "rouds: no such key (did you mean rounds?); there are rounds, seed, run_dir"),
        ("+rouds=3", "rouds: no such key (did you mean rounds?); there are rounds, seed, run_dir"),
        ("cohort.anwsers=3", "cohort.anwsers: no such key (did you mean answers?); there are connected"),
        ("+cohort.anwsers=3", "cohort.anwsers: no such key (did you mean answers?); there are connected"),
        (
            "strategy.fractoin=1",
            "strategy.fractoin: no such key (did you mean fraction?); there are _target_, fraction",
        ),
        ("selection.size=3", "selection.size: no selection is chosen; choose one with selection=CHOICE"),
        ("strategy=fedavgg", "strategy: no such choice: 'fedavgg' (did you mean fedavg?); there are fedadagrad"),
        ("experiment=quickstat", "experiment: no such choice: 'quickstat' (did you mean quickstart?)"),
        ("data=npz", "data.path: a value is needed: set data.path=VALUE"),
        ("model=custom", "model._target_: a value is needed: set model._target_=VALUE"),
        ("rounds", "Error parsing override 'rounds'"),
    ],
)
def test_an_impossible_setting_is_refused_with_its_key_and_what_is_allowed(override: str, says: str) -> None:
    experiment = [] if override.startswith("experiment=") else [NUMPY]
    with pytest.raises(ConfigError) as refusal:
        compose([*experiment, override])
    assert str(refusal.value).startswith(says)


def test_more_answers_than_asked_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^cohort\.answers: expected at most cohort\.asked, which is 2, found 3$"):
        compose(["cohort.asked=2", "cohort.answers=3"])
    assert compose(["cohort.asked=3", "cohort.answers=3"]).cohort.answers == 3


@pytest.mark.parametrize("found", ["2.0", "true", "two"])
def test_the_number_of_partitions_is_a_whole_number(found: str) -> None:
    with pytest.raises(ConfigError, match=r"^data\.num_partitions: expected a whole number >= 1, found"):
        compose([f"data.num_partitions={found}"])


def test_the_edges_of_the_ranges_are_allowed() -> None:
    config = compose(["seed=9223372036854775807", "server.port=0", "cohort.grace_s=0", f"client.id=a{63 * 'b'}"])
    assert config.seed == 2**63 - 1
    assert config.client.id == f"a{63 * 'b'}"


def test_tags_are_free_text_by_name() -> None:
    assert compose(["+client.tags.site=berlin", "+client.tags.beds=12"]).client.tags == {"site": "berlin", "beds": "12"}


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:9092", ("127.0.0.1", 9092)),
        ("fl.example.org:1", ("fl.example.org", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("[fe80::1%eth0]:9092", ("fe80::1%eth0", 9092)),
    ],
)
def test_an_address_is_a_host_and_a_port(address: str, parts: tuple[str, int]) -> None:
    assert parse_address(address) == parts


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:", ":9092", "host:0", "host:65536", "::1:9092", "http://host:1", "a b:1", "[x]:1", "h:1\n"],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.addresses: expected HOST:PORT"):
        parse_address(address)


def test_the_strategys_numbers_reach_its_parts() -> None:
    strategy = build_strategy(compose([NUMPY, "strategy.fraction=0.5", "strategy.learning_rate=0.25"]))
    clients = [ClientInfo(f"c{number}", 1) for number in range(4)]
    assert len(strategy.select.choose(clients, (), np.random.default_rng(0), None)) == 2
    assert strategy.local.task((), clients[0], 1) == ("sgd_epochs", {"epochs": 2, "learning_rate": 0.25})


def test_a_slot_group_replaces_one_slot_and_no_other() -> None:
    strategy = build_strategy(
        compose([NUMPY, "strategy.epochs=3", "selection=uniform", "selection.size=2", "on_server=identity"])
    )
    clients = [ClientInfo(f"c{number}", 1) for number in range(4)]
    assert len(strategy.select.choose(clients, (), np.random.default_rng(0), None)) == 2
    assert strategy.local.task((), clients[0], 1) == ("sgd_epochs", {"epochs": 3})
    assert strategy.aggregate.weight is by_examples


def test_each_slot_group_fills_its_slot() -> None:
    slots = ["local=sgd_epochs", "on_client=identity", "aggregation=weighted_mean", "server_optimizer=sgd"]
    numbers = ["local.epochs=4", "aggregation.weight=equally", "server_optimizer.learning_rate=0.5"]
    strategy = build_strategy(compose([NUMPY, *slots, *numbers]))
    assert strategy.local.task((), ClientInfo("a", 1), 1) == ("sgd_epochs", {"epochs": 4})
    assert strategy.aggregate.weight is equally
    updates = [update_of({"w": np.array([1.0])}, 1), update_of({"w": np.array([5.0])}, 3)]
    delta = strategy.aggregate(updates, cohort_of(2))
    assert delta["w"].tolist() == [3.0]
    move, _ = strategy.server_optimizer.apply(delta, strategy.server_optimizer.init(delta))
    assert move["w"].tolist() == [1.5]


def test_a_weight_may_be_an_import_path() -> None:
    config = compose(["aggregation=weighted_mean", "aggregation.weight=fedtrain.aggregation.aggregator.equally"])
    assert build_strategy(config).aggregate.weight(update_of({}, 9), cohort_of(1)) == 1.0


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["strategy.fraction=1.5"], "strategy.fraction: selection uniform: fraction must be in (0, 1], found 1.5"),
        (
            ["strategy.fraction=most"],
            "strategy: '<' not supported between instances of 'int' and 'str': check the type",
        ),
        (
            ["+strategy.mu=1"],
            "strategy.mu: fedtrain.strategies.fedavg.build takes no such argument; it takes fraction, ",
        ),
        (["strategy._target_=nowhere.build"], "strategy: cannot use 'nowhere.build': Error loading 'nowhere.build'"),
        (["strategy._target_=builtins.dict"], "strategy._target_: expected a function that returns a Strategy, "),
        (["selection=uniform", "selection.size=0"], "selection.size: selection uniform: size must be >= 1, found 0"),
        (
            ["on_client=identity", "on_client._target_=fedtrain.server_optimizers.sgd"],
            "on_client: strategy slot 'on_cl",
        ),
        (["aggregation=weighted_mean", "aggregation.weight=by_age"], "aggregation.weight: expected by_examples or eq"),
        (["aggregation=weighted_mean", "aggregation.weight=os.nothing"], "aggregation.weight: cannot use 'os.nothing'"),
    ],
)
def test_a_strategy_that_cannot_be_built_is_a_configuration_error(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        build_strategy(compose(overrides))
    assert str(refusal.value).startswith(says)


def test_a_trainer_gets_its_partition_and_model() -> None:
    config = compose([NUMPY, "data.num_partitions=2"])
    trainers = [build_trainer(config, partition=number) for number in range(2)]
    assert all(isinstance(trainer, NumpyTrainer) for trainer in trainers)
    server = build_trainer(config, partition=None)
    assert server.num_examples == 0
    evaluated = server.evaluate(server.initial(0).params)
    assert evaluated is not None
    assert evaluated.metrics["loss"] == pytest.approx(np.log(10))
    assert evaluated.num_examples + sum(trainer.num_examples for trainer in trainers) < 1797


def test_the_seed_decides_the_split() -> None:
    sizes = {seed: build_trainer(compose([NUMPY, f"seed={seed}"]), partition=0).num_examples for seed in (0, 1)}
    assert sizes[0] != sizes[1]
    assert build_trainer(compose([NUMPY, "seed=1"]), partition=0).num_examples == sizes[1]


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["+model.depth=3"],
            "model.depth: fedtrain.models.softmax.softmax takes no such argument; it takes num_features",
        ),
        (
            ["model=custom", "model._target_=fedtrain.models.softmax.Softmax"],
            "model.num_features: fedtrain.models.softm",
        ),
        (["trainer.model=both"], "trainer.model: expected factory or object: what the trainer is given, found 'both'"),
        (
            ["trainer._target_=builtins.dict"],
            "trainer._target_: expected a Trainer, builtins.dict gave a dict without ",
        ),
    ],
)
def test_a_trainer_that_cannot_be_built_is_a_configuration_error(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        build_trainer(compose([NUMPY, *overrides]), partition=0)
    assert str(refusal.value).startswith(says)


OWN_TARGETS = """
def net(hidden):
    return [0] * hidden

def load(path, partition, num_partitions, seed):
    return int(path)

class Trainer:
    local_algorithms, num_examples = (), 0
    initial = fit = evaluate = lambda self, *_: None

    def __init__(self, model, data, batch_size):
        self.model, self.batches = model(), data // batch_size
"""


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("+model.hidden=zz", "model: can't multiply sequence by non-int of type 'str': check the type"),
        ("+data.path=zz", "data: invalid literal for int() with base 10: 'zz': check the type"),
        ("+trainer.batch_size=zz", "trainer: unsupported operand type(s) for //: 'int' and 'str': check the type"),
    ],
)
def test_a_value_of_the_wrong_type_is_a_configuration_error_that_names_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, says: str
) -> None:
    write(tmp_path / "own_targets.py", OWN_TARGETS)
    monkeypatch.syspath_prepend(tmp_path)
    groups = {"model": "net", "data": "load", "trainer": "Trainer"}
    chosen = [
        word for group, name in groups.items() for word in (f"{group}=custom", f"{group}._target_=own_targets.{name}")
    ]
    values = {"+model.hidden": "3", "+data.path": "12", "+trainer.batch_size": "4"}
    build_trainer(compose([*chosen, *(f"{key}={value}" for key, value in values.items())]), partition=0)
    values.update([override.split("=")])
    with pytest.raises(ConfigError) as refusal:
        build_trainer(compose([*chosen, *(f"{key}={value}" for key, value in values.items())]), partition=0)
    assert str(refusal.value).startswith(says)
    assert isinstance(refusal.value.__cause__, (TypeError, ValueError))


def test_a_value_of_the_wrong_type_in_a_torch_model_names_the_model() -> None:
    chosen = ["experiment=quickstart", "model=mlp", "model.hidden=[zz]"]
    with pytest.raises(ConfigError, match=r"^model: "):
        build_trainer(compose(chosen), partition=0)


def test_missing_data_is_a_data_error() -> None:
    with pytest.raises(DataError, match=r"nothing\.npz"):
        build_trainer(compose([NUMPY, "data=npz", "data.path=nothing.npz"]), partition=0)


def test_numbers_tuned_for_an_experiment_and_a_strategy_come_last(tmp_path: Path) -> None:
    write(tmp_path / "experiment/mine.yaml", "# @package _global_\nrounds: 4\nstrategy: {epochs: 3, fraction: 0.5}\n")
    write(tmp_path / "tuned/mine/fedavg.yaml", "epochs: 9\n")
    config = compose(["experiment=mine"], tmp_path)
    assert (config.rounds, config.strategy["epochs"], config.strategy["fraction"]) == (4, 9, 0.5)


def test_an_unknown_key_in_a_file_of_the_users_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "experiment/mine.yaml", "# @package _global_\nrouds: 4\n")
    with pytest.raises(
        ConfigError, match=r"^rouds: no such key \(did you mean rounds\?\).* \(in experiment/mine\.yaml\)$"
    ):
        compose(["experiment=mine"], tmp_path)


def test_the_help_names_every_key() -> None:
    text = files("fedtrain.conf").joinpath("hydra/help/fedtrain.yaml").read_text()
    groups = {"strategy", "model", "data", "trainer"}
    slots = {"selection", "local", "on_client", "aggregation", "on_server", "server_optimizer"}
    names = [name for name in keys(compose([])) if name not in groups | slots]
    assert len(names) == 35
    for name in [*names, "model.initial", "data.partition", "data.num_partitions"]:
        assert re.search(rf"^  {re.escape(name)} ", text, re.MULTILINE), name


def test_importing_the_configuration_imports_neither_torch_nor_flower() -> None:
    code = "import sys, fedtrain.config as c; c.compose([]); print({'torch', 'flwr'} & sys.modules.keys())"
    assert python("-c", code).stdout == "set()\n"


COMMAND = """
import os, sys
from fedtrain.config import Config, build_strategy, build_trainer, main

def task(config: Config) -> int:
    build_strategy(config)
    print("run", config.rounds, config.run_dir, os.environ.get("HYDRA_FULL_ERROR"))
    print("model", build_trainer(config, partition=0).initial(0).params["weight"].shape)
    return config.rounds

main(task)()
"""

MODEL = """
from fedtrain.models.softmax import Softmax

def net(classes):
    return Softmax(64, classes)
"""


def test_a_command_composes_runs_and_exits_with_the_tasks_status(tmp_path: Path) -> None:
    done = command(tmp_path, NUMPY, "rounds=3")
    assert done.stdout == "run 3 runs/quickstart_numpy None\nmodel (10, 64)\n"
    assert (done.returncode, done.stderr) == (3, "")
    assert [path.name for path in tmp_path.iterdir()] == ["command.py"]


def test_without_torch_the_quickstart_says_how_to_install_it(tmp_path: Path) -> None:
    write(tmp_path / "torch.py", """raise ModuleNotFoundError("No module named 'torch'", name="torch")""")
    done = command(tmp_path, "experiment=quickstart")
    says = """error: model: cannot use 'fedtrain.models.cnn.cnn': this needs torch: pip install "fedtrain[torch]"\n"""
    assert (done.returncode, done.stderr) == (2, says)


def test_a_refused_configuration_is_one_line_and_status_2(tmp_path: Path) -> None:
    done = command(tmp_path, NUMPY, "cohort.anwsers=3")
    assert done.returncode == 2
    assert re.fullmatch(r"error: cohort\.anwsers: no such key \(did you mean answers\?\); there are .*\n", done.stderr)
    assert done.stdout == ""
    refused = command(tmp_path, NUMPY, "strategy.fraction=1.5")
    assert refused.stderr == "error: strategy.fraction: selection uniform: fraction must be in (0, 1], found 1.5\n"
    assert refused.returncode == 2


def test_a_sweep_runs_every_job_in_its_own_folder_and_ends_with_the_highest_status(tmp_path: Path) -> None:
    done = command(tmp_path, "-m", NUMPY, "rounds=0,4,1")
    assert re.findall(r"run \S+ \S+", done.stdout) == ["run 4 runs/quickstart_numpy/1", "run 1 runs/quickstart_numpy/2"]
    assert done.stderr == "error: rounds: expected a number of rounds >= 1, found 0\n"
    assert done.returncode == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["command.py", "runs"]


def test_a_sweep_ends_with_the_job_that_is_interrupted(tmp_path: Path) -> None:
    done = command(tmp_path, "-m", NUMPY, "rounds=1,130,2")
    assert re.findall(r"run \d+", done.stdout) == ["run 1", "run 130"]
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_an_interrupt_before_the_task_is_no_traceback(tmp_path: Path) -> None:
    write(tmp_path / "my_models.py", "raise KeyboardInterrupt")
    done = command(tmp_path, "model=custom", "model._target_=my_models.net", "trainer=numpy")
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_models_and_experiments_of_the_users_own_are_found(tmp_path: Path) -> None:
    write(tmp_path / "here/my_models.py", MODEL)
    custom = ["model=custom", "model._target_=my_models.net", "+model.classes=7", "trainer=numpy"]
    assert "model (7, 64)" in command(tmp_path / "here", *custom).stdout
    write(
        tmp_path / "here/experiment/mine.yaml",
        "# @package _global_\ndefaults:\n  - override /model: custom\n  - override /trainer: numpy\n"
        "model: {_target_: my_models.net, classes: 4}\n",
    )
    (tmp_path / "elsewhere").mkdir()
    done = command(tmp_path / "elsewhere", "--config-dir", "../here", "experiment=mine")
    assert "model (4, 64)" in done.stdout


def test_the_help_lists_commands_keys_and_choices(tmp_path: Path) -> None:
    text = command(tmp_path, "--help").stdout
    for part in ("fedtrain-server", "fedtrain-client", "fedtrain-sim", "cohort.answers", "strategy: fedadagrad"):
        assert part in text
    assert "quickstart, quickstart_numpy" in text


def test_help_that_nobody_reads_to_its_end_is_no_error(tmp_path: Path) -> None:
    write(tmp_path / "command.py", COMMAND)
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-B", "command.py", "--help"],
        cwd=tmp_path,
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def python(*arguments: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


def command(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a small command of `fedtrain.config.main` in `folder`."""
    write(folder / "command.py", COMMAND)
    return python("-B", "command.py", *arguments, cwd=folder)


def test_a_config_is_checked_when_it_is_made() -> None:
    with pytest.raises(ConfigError, match=r"^rounds: "):
        dataclasses.replace(compose([]), rounds=0)
    assert isinstance(compose([]), Config)
