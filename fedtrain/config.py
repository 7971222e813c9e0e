"""Configuration: from the command line to a checked `Config`, and from that to a strategy and a trainer.

Hydra composes ``conf/config.yaml``, the chosen files of each group, the user's own files (``--config-dir``) and the
command line; `Config` (in `schema.py`) says what each key means and refuses what is impossible. One schema serves all
commands, so one experiment file does too.
"""

import dataclasses
import difflib
import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import hydra
import hydra.utils
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from fedtrain.client.trainer import Trainer
from fedtrain.errors import ConfigError, DataError, FedtrainError, StrategyError
from fedtrain.schema import Config, parse_address, require
from fedtrain.strategy import Strategy, require_kind

__all__ = ["Config", "build_strategy", "build_trainer", "compose", "main", "parse_address"]

_FULL_ERROR = "HYDRA_FULL_ERROR"
"""Hydra's own environment variable: with 1, errors are raised (and shown) whole."""


ConfigStore.instance().store(name="schema", node=Config, provider="fedtrain")


_SLOTS = {
    "selection": "select",
    "local": "local",
    "on_client": "on_client",
    "aggregation": "aggregate",
    "on_server": "on_server",
    "server_optimizer": "server_optimizer",
}
"""Configuration group of each slot of a strategy."""

_OPEN = ("strategy", "model", "data", "trainer", "client.tags", *_SLOTS)
"""Mappings without a fixed set of keys: most are the arguments of a target."""

_WEIGHTS = ("by_examples", "equally")

_INTERRUPTED = 130
"""Exit status of a command that was stopped with Ctrl-C, as shells have it."""


def build_strategy(config: Config) -> Strategy:
    """The chosen strategy, with the slots replaced for which a group is chosen.

    Raises:
        ConfigError: a target or an argument of it is unknown, or has an impossible value.
        StrategyError: the parts do not fit together.
    """
    strategy = _build("strategy", config.strategy)
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            f"strategy._target_: expected a function that returns a Strategy, "
            f"{config.strategy['_target_']} returned a {type(strategy).__name__}"
        )
    parts: dict[str, Any] = {}
    for group, slot in _SLOTS.items():
        node = getattr(config, group)
        if node:
            arguments = {"weight": _weight(group, node["weight"])} if isinstance(node.get("weight"), str) else {}
            part = _build(group, node, **arguments)
            with _key_in_errors(group, node):
                require_kind(slot, part)
            parts[slot] = part
    return dataclasses.replace(strategy, **parts)  # all at once: which fit together is a question for the last of them


def _weight(group: str, name: str) -> Callable[..., Any]:
    """The weight function of an aggregator, by its name in `fedtrain.aggregation` or its import path."""
    require("." in name or name in _WEIGHTS, f"{group}.weight", f"{' or '.join(_WEIGHTS)}, or an import path", name)
    module, _, attribute = (name if "." in name else f"fedtrain.aggregation.{name}").rpartition(".")
    try:
        return cast("Callable[..., Any]", getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{group}.weight: cannot use {name!r}: {error}") from error


def build_trainer(config: Config, *, partition: int | None) -> Trainer:
    """The trainer with its data and model.

    The data's target is called with ``partition``, ``num_partitions`` and ``seed``; the trainer's with the resulting
    ``data`` and with ``model``: a function without arguments that makes a new model or, with ``trainer.model=object``,
    such a model.

    Args:
        partition: In [0, num_partitions): a client's data; None: the server's, which is held out from all clients.

    Raises:
        ConfigError: a target or an argument of it is unknown, or has an impossible value.
        DataError: the data is missing or not what was expected.
    """
    options = dict(config.trainer)
    kind = options.pop("model", "factory")
    require(kind in ("factory", "object"), "trainer.model", "factory or object: what the trainer is given", kind)
    node = {key: value for key, value in config.model.items() if key != "initial"}
    factory = functools.partial(_call, "model", node, _factory("model", node))
    data = _build("data", {**config.data, "partition": partition}, seed=config.seed)
    trainer = _build("trainer", options, model=factory if kind == "factory" else factory(), data=data)
    if not isinstance(trainer, Trainer):
        lacks = [name for name in ("num_examples", "initial", "fit", "evaluate") if not hasattr(trainer, name)]
        raise ConfigError(
            f"trainer._target_: expected a Trainer, {config.trainer['_target_']} gave a {type(trainer).__name__} "
            f"without {', '.join(lacks) or 'local_algorithms'}: see fedtrain.client.trainer.Trainer"
        )
    return trainer


def _build(key: str, node: Mapping[str, Any], **arguments: Any) -> Any:
    return _call(key, node, _factory(key, node, *arguments), **arguments)


def _call(key: str, node: Mapping[str, Any], factory: Callable[..., Any], **arguments: Any) -> Any:
    with _key_in_errors(key, node):
        return factory(**arguments)


def _factory(key: str, node: Mapping[str, Any], *added: str) -> Callable[..., Any]:
    """The node's target with the node's arguments; to be called with the `added` ones."""
    if not isinstance(node.get("_target_"), str):
        raise ConfigError(f"{key}._target_: expected an import path such as my_package.Name, found none: set it")
    try:
        factory = hydra.utils.instantiate({**node, "_partial_": True}, _convert_="all")
    except InstantiationException as error:
        _refuse_without_torch(key, node, error)
        reason = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        raise ConfigError(
            f"{key}: cannot use {node['_target_']!r}: {' '.join(str(reason).split())} "
            "(its module may lie in the folder that the command is started in)"
        ) from error
    names = {name for name in node if name not in ("_target_", "_convert_", "_recursive_", "_partial_")}
    _require_arguments(key, str(node["_target_"]), factory.func, names.union(added))
    return cast("Callable[..., Any]", factory)


def _refuse_without_torch(key: str, node: Mapping[str, Any], error: BaseException) -> None:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ImportError) and cause.name == "torch":
            raise ConfigError(
                f'{key}: cannot use {node["_target_"]!r}: this needs torch: pip install "fedtrain[torch]"'
            ) from error
        cause = cause.__cause__ or cause.__context__


def _require_arguments(key: str, path: str, target: Callable[..., Any], given: set[str]) -> None:
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError:  # some functions written in C have no signature
        return
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [] if takes_any else sorted(given - named.keys())
    missing = [name for name, p in named.items() if p.default is p.empty and name not in given]
    if unknown:
        raise ConfigError(
            f"{key}.{unknown[0]}: {path} takes no such argument{_near(unknown[0], named)}; "
            f"it takes {', '.join(named) or 'none'}"
        )
    if missing:
        raise ConfigError(f"{key}.{missing[0]}: {path} needs this argument: add +{key}.{missing[0]}=VALUE")


class _KeyedError(ConfigError):
    """Names its key already, which may be another than that of the target that was called."""


@contextmanager
def _key_in_errors(key: str, node: Mapping[str, Any]) -> Iterator[None]:
    try:
        yield
    except (DataError, _KeyedError):
        raise
    except FedtrainError as error:
        # A part names its own argument; which key that came from can be told where one alone has the value it found.
        same = [name for name, value in node.items() if str(error).endswith((f"found {value}", f"found {value!r}"))]
        raise _KeyedError(f"{key}.{same[0]}: {error}" if len(same) == 1 else f"{key}: {error}") from error
    except (TypeError, ValueError) as error:
        raise _KeyedError(
            f"{key}: {error}: check the type of each of its values ({_FULL_ERROR}=1 shows where it was raised)"
        ) from error


def _near(found: str, allowed: Iterable[str]) -> str:
    close = difflib.get_close_matches(found, list(allowed), 1)
    return f" (did you mean {close[0]}?)" if close else ""


# From the command line, or a list of overrides, to keys


def main(task: Callable[[Config], int]) -> Callable[[], None]:
    """Make a command of a function: it is called with the command line's configuration and returns the exit status.

    An impossible configuration, missing data or a strategy whose parts do not fit are told in one message on standard
    error, without a traceback, and the status is 2; with ``HYDRA_FULL_ERROR=1`` the exception is shown whole.

    In a sweep (``--multirun``) every job runs, in ``run_dir`` followed by its number, until one is interrupted; the
    highest status is the command's. Modules in the folder that it is started in, and in that of ``--config-dir``, can
    be named as targets.
    """

    @functools.wraps(task)
    def command() -> None:
        whole = os.environ.get(_FULL_ERROR) == "1"
        statuses: list[int] = []
        began = False

        def job(cfg: DictConfig) -> None:
            nonlocal began
            began = True
            try:
                with _environment(_FULL_ERROR, "1" if whole else None):
                    _import_from(os.getcwd(), *_config_dirs())
                    config = _typed(cfg)
                    if HydraConfig.get().mode is RunMode.MULTIRUN:
                        config.run_dir = str(Path(config.run_dir, str(HydraConfig.get().job.num)))
                    statuses.append(task(config))
                    if statuses[-1] == _INTERRUPTED and HydraConfig.get().mode is RunMode.MULTIRUN:
                        raise KeyboardInterrupt  # Hydra would go on with the next job
            except (ConfigError, DataError, StrategyError) as error:
                if whole:
                    raise
                statuses.append(_refused(error))

        run = hydra.main(config_path="pkg://fedtrain.conf", config_name="config", version_base="1.3")(job)
        try:
            # Hydra would print its errors itself; told to raise them, they can be worded here.
            with _environment(_FULL_ERROR, "1"):
                run()
        except (HydraException, OmegaConfBaseException) as error:
            if whole:
                raise
            statuses.append(_refused(ConfigError(_explained(error))))
        except KeyboardInterrupt:  # a task ends itself in its own way; this is before it, or between two of a sweep
            print("interrupted", file=sys.stderr)
            statuses.append(_INTERRUPTED)
        except BrokenPipeError:
            if began:
                raise
            # who reads the help has seen enough of it
        _flush_output()
        sys.exit(max(statuses, default=0))

    return command


def _flush_output() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # Python would try again at exit, and complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def compose(overrides: Sequence[str] = (), config_dir: str | Path | None = None) -> Config:
    """The configuration that a command started with these arguments would have.

    Args:
        overrides: As on the command line, such as ``["experiment=quickstart", "rounds=3"]``.
        config_dir: Folder with the user's own files, as ``--config-dir``.

    Raises:
        ConfigError: a key is unknown, or has the wrong type or an impossible value.
    """
    folders = [] if config_dir is None else [str(Path(config_dir).resolve())]
    search = [f"hydra.searchpath=['file://{folder}']" for folder in folders]
    try:
        with hydra.initialize_config_module("fedtrain.conf", version_base="1.3"):
            return _typed(hydra.compose("config", overrides=[*overrides, *search]))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explained(error)) from error


def _typed(cfg: DictConfig) -> Config:
    try:
        config = cast(Config, OmegaConf.to_object(cfg))
    except OmegaConfBaseException as error:
        raise ConfigError(_explained(error)) from error
    _refuse_added(config)
    return config


def _refuse_added(node: object, parents: str = "") -> None:
    """Refuse keys that were added with ``+`` beside those of the schema: OmegaConf makes attributes of them."""
    names = [field.name for field in dataclasses.fields(node)] if dataclasses.is_dataclass(node) else []
    for name, value in vars(node).items() if names else ():
        if name not in names:
            raise ConfigError(f"{parents}{name}: no such key{_near(name, names)}; there are {', '.join(names)}")
        if dataclasses.is_dataclass(value):
            _refuse_added(value, f"{parents}{name}.")


_WORDING = {
    r"Value '(.*)' of type '.*' could not be converted to Integer": r"expected a whole number, found \1",
    r"Value '(.*)' of type '.*' could not be converted to Float": r"expected a number, found \1",
    r"Value '(.*)' is not a valid bool.*": r"expected true or false, found \1",
    r"Invalid value assigned: .* is not a ListConfig, list or tuple.": "expected a list, such as [a,b]",
    r"field '.*' is not Optional": "expected a value, found null",
}
"""OmegaConf's messages in the words of ours."""


def _explained(error: BaseException) -> str:
    """What to tell about an error of Hydra or OmegaConf: the key, what was expected, what was found."""
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, choice = str(error.missing_cfg_file).rpartition("/")
        return (
            f"{group}: no such choice: {choice!r}{_near(choice, error.options)}; there are {', '.join(error.options)}"
        )
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return str(error).partition("\nConfig search path")[0].rstrip()
    key, text = cause.full_key or "", str(cause).partition("\n")[0]
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)):
        allowed = [str(name) for name in cause.parent_node or () if name != "hydra"]
        group, _, leaf = key.rpartition(".")
        if group in _SLOTS and not allowed:
            text = f"no {group} is chosen; choose one with {group}=CHOICE"
        else:
            text = f"no such key{_near(leaf, allowed)}; there are {', '.join(allowed) or 'none'}"
            text += f"; +{key}=VALUE adds one" if group in _OPEN else ""
    elif isinstance(cause, MissingMandatoryValue):
        text = f"a value is needed: set {key}=VALUE"
    else:
        for pattern, words in _WORDING.items():
            text = re.sub(pattern, words, text)
    file = re.match(r"In '(.*?)': ", str(error))
    text = f"{text} (in {file[1]}.yaml)" if file else text
    return f"{key}: {text}" if key else text


def _refused(error: Exception) -> int:
    sys.stdout.flush()
    print(f"error: {error}", file=sys.stderr, flush=True)
    return 2


def _config_dirs() -> list[str]:
    sources = HydraConfig.get().runtime.config_sources
    return [source.path for source in sources if source.provider == "command-line"]


def _import_from(*folders: str) -> None:
    """Let the user's own modules be found first, as ``python -m`` does (and does not, in Python's safe-path mode)."""
    if not sys.flags.safe_path:
        sys.path[:0] = [folder for folder in folders if folder not in sys.path]


@contextmanager
def _environment(name: str, value: str | None) -> Iterator[None]:
    before = os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
