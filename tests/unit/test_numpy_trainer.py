import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from torch import nn

from fedtrain.client.numpy_trainer import NumpyTrainer
from fedtrain.client.torch_trainer import TorchTrainer
from fedtrain.client.trainer import Trainer, Work
from fedtrain.data import Examples, Split, digits
from fedtrain.errors import Cancelled, ConfigError, Declined, ParamsError
from fedtrain.local import CLIENT_HALVES, ClientHalf
from fedtrain.models.softmax import softmax
from fedtrain.params import digest
from fedtrain.types import Start

TWO = Examples(np.array([[1.0], [2.0]], np.float32), np.array([1.0, 3.0], np.float32))
ZEROS = Start({"weight": np.array(0.0, np.float32), "bias": np.zeros(1, np.float32)}, {})


class Line:
    """y = weight * x + bias with mean squared error; one array without dimensions."""

    def initial(self, random):
        return {
            "weight": np.asarray(random.normal(), dtype=np.float32),
            "bias": random.normal(size=1).astype(np.float32),
        }

    def loss_and_gradient(self, params, x, y):
        error = params["weight"] * x[:, 0] + params["bias"] - y
        # float64 on purpose: the trainer keeps the dtype of the parameters
        gradient = {"weight": np.float64(2 * (error * x[:, 0]).mean()), "bias": np.array([2.0 * error.mean()])}
        return float((error**2).mean()), gradient

    def metrics(self, params, x, y):
        return {"loss": self.loss_and_gradient(params, x, y)[0]}


def line(data=Split(TWO, TWO), **settings):  # noqa: B008
    return NumpyTrainer(Line(), data, **settings)


def work(seed=1, **numbers):
    return Work(round=1, local=("sgd_epochs", numbers), seed=seed)


def test_one_step_of_linear_regression_is_the_one_worked_by_hand():
    # errors -1, -3; loss (1 + 9) / 2 = 5; d/dweight = -1 * 1 - 3 * 2 = -7, d/dbias = -1 - 3 = -4
    fitted = line(learning_rate=0.25).fit(ZEROS, work())
    assert fitted.model["weight"].item() == 1.75
    assert fitted.model["bias"].tolist() == [1.0]
    assert {name: (array.shape, array.dtype) for name, array in fitted.model.items()} == {
        "weight": ((), np.float32),
        "bias": ((1,), np.float32),
    }
    assert fitted.metrics == {"loss": 5.0}
    assert (fitted.num_examples, fitted.num_steps) == (2, 1)


def test_the_tasks_numbers_override_the_trainers_own():
    fitted = line(learning_rate=9.0, batch_size=1).fit(ZEROS, work(learning_rate=0.25, batch_size=2))
    assert fitted.model["weight"].item() == 1.75
    assert line(batch_size=1).fit(ZEROS, work(epochs=3)).num_steps == 6
    assert line(batch_size=1).fit(ZEROS, work(epochs=3, steps=5)).num_steps == 5


def test_it_is_a_trainer():
    assert isinstance(line(), Trainer)
    assert line().num_examples == 2


def test_it_steps_as_the_torch_trainer_does_over_the_same_batches():
    data = digits.load(0, 5, 0, flat=True)
    numpy = NumpyTrainer(softmax(), data)
    torch = TorchTrainer(partial(nn.Linear, 64, 10), data, device="cpu", threads=1)
    start, task = numpy.initial(0), work(seed=9, epochs=3, learning_rate=0.5, batch_size=16)
    one, other = numpy.fit(start, task), torch.fit(start, task)
    assert one.num_steps == other.num_steps
    assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], rel=1e-4)
    for name in ("weight", "bias"):
        np.testing.assert_allclose(one.model[name], other.model[name], atol=1e-5)
    measured, expected = numpy.evaluate(one.model), torch.evaluate(one.model)
    assert measured.num_examples == expected.num_examples
    assert measured.metrics["accuracy"] == expected.metrics["accuracy"]
    assert measured.metrics["loss"] == pytest.approx(expected.metrics["loss"], rel=1e-5)


def test_equal_starts_and_tasks_give_equal_bits():
    trainer = NumpyTrainer(softmax(), digits.load(0, 5, 0, flat=True))
    start = trainer.initial(0)
    first = digest(trainer.fit(start, work(seed=1)).model)
    assert digest(trainer.fit(start, work(seed=2)).model) != first
    assert digest(trainer.fit(start, work(seed=1)).model) == first


def test_start_is_left_unchanged_also_when_it_is_read_only():
    start = Start({name: np.array(array) for name, array in ZEROS.params.items()}, {})
    for array in start.params.values():
        array.flags.writeable = False
    fitted = line(learning_rate=0.25).fit(start, work())
    assert start.params["weight"].item() == 0.0
    assert fitted.model["weight"].flags.writeable


def test_initial_is_a_function_of_the_seed():
    assert digest(line().initial(1).params) == digest(line().initial(1).params)
    assert digest(line().initial(1).params) != digest(line().initial(2).params)


def test_without_examples_the_start_comes_back():
    start = Start({"weight": np.array(3.0, np.float32), "bias": np.array([4.0], np.float32)}, {})
    fitted = line(Split(None, None)).fit(start, work())
    assert digest(fitted.model) == digest(start.params)
    assert (fitted.num_examples, fitted.num_steps) == (0, 0)
    assert not np.shares_memory(fitted.model["bias"], start.params["bias"])


def test_evaluation_measures_the_held_out_examples():
    # errors 1.75 + 1 - 1 and 3.5 + 1 - 3
    model = {"weight": np.array(1.75, np.float32), "bias": np.array([1.0], np.float32)}
    evaluated = line().evaluate(model)
    assert evaluated.num_examples == 2
    assert evaluated.metrics == {"loss": (1.75**2 + 1.5**2) / 2}
    assert line(Split(TWO, None)).evaluate(model) is None


def test_a_local_algorithm_corrects_gradients_and_gives_its_second_payload(monkeypatch):
    def correct(gradient, params, start, payload, client_state, numbers):
        return {
            name: gradient[name] + payload[name] - client_state[name] + numbers["mu"] * (params[name] - start[name])
            for name in gradient
        }

    def finish(start, params, payload, client_state, numbers):
        moved = {name: (start[name] - params[name]) * (1 / numbers["num_steps"]) for name in params}
        return moved, moved

    monkeypatch.setitem(CLIENT_HALVES, "controlled", ClientHalf(correct, finish))
    payload = {"weight": np.array(1.0, np.float32), "bias": np.array([2.0], np.float32)}
    control = {"weight": np.array(0.5, np.float32), "bias": np.array([0.0], np.float32)}
    numbers = {"learning_rate": 0.25, "mu": 2.0, "steps": 2}
    fitted = line().fit(Start(ZEROS.params, {}, payload), Work(1, ("controlled", numbers), 1, client_state=control))
    # first along (-7 + 1 - 0.5, -4 + 2): to (1.625, 0.5); there errors 1.125, 0.75, so d/dw = 2.625, d/db = 1.875;
    # then along (2.625 + 0.5 + 2 * 1.625, 1.875 + 2 + 2 * 0.5) = (6.375, 4.875)
    assert fitted.model["weight"].item() == 1.625 - 6.375 / 4
    assert fitted.model["bias"].tolist() == [0.5 - 4.875 / 4]
    assert fitted.extra["weight"].item() == -(1.625 - 6.375 / 4) / 2
    assert fitted.client_state["bias"].tolist() == [-(0.5 - 4.875 / 4) / 2]


def test_a_cancelled_task_stops_at_the_next_batch():
    calls = []

    def cancelled():
        calls.append(None)
        return len(calls) > 3

    with pytest.raises(Cancelled, match="after 3 of 10 steps"):
        line().fit(ZEROS, Work(1, ("sgd_epochs", {"steps": 10}), 1, cancelled=cancelled))


def test_progress_rises_to_one():
    told = []
    line().fit(ZEROS, Work(1, ("sgd_epochs", {"steps": 4}), 1, progress=told.append))
    assert told == [0.25, 0.5, 0.75, 1.0]


def test_what_it_can_not_do_is_declined():
    with pytest.raises(Declined, match="found 'magic'"):
        line().fit(ZEROS, Work(1, ("magic", {}), 1))
    with pytest.raises(Declined, match="batch_size"):
        line().fit(ZEROS, work(batch_size=0))


def test_a_start_that_does_not_fit_is_refused_by_name():
    with pytest.raises(ParamsError, match="'bias'"):
        line().fit(Start({"weight": np.array(0.0, np.float32)}, {}), work())
    with pytest.raises(ParamsError, match=r"'bias' has shape \(1,\)"):
        line().evaluate({"weight": np.array(0.0, np.float32), "bias": np.zeros(2, np.float32)})


def test_a_model_with_arrays_that_can_not_be_trained_is_refused():
    class Counting(Line):
        def initial(self, random):
            return {"count": np.array(1)}

    with pytest.raises(ParamsError, match="'count' of int64"):
        NumpyTrainer(Counting(), Split(None, None))


@pytest.mark.parametrize("setting", ["learning_rate", "batch_size"])
def test_an_impossible_setting_is_refused(setting):
    with pytest.raises(ConfigError, match=f"{setting} must be"):
        line(**{setting: 0})


def test_neither_torch_nor_flower_is_imported():
    script = """
import sys
from fedtrain.client.numpy_trainer import NumpyTrainer
from fedtrain.client.trainer import Work
from fedtrain.data import digits
from fedtrain.models.softmax import softmax
trainer = NumpyTrainer(softmax(), digits.load(0, 5, 0, flat=True))
trainer.fit(trainer.initial(0), Work(1, ("sgd_epochs", {}), 1))
print([name for name in ("torch", "flwr") if name in sys.modules])
"""
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert there.stdout.strip() == "[]"


def test_prescribed_batches_are_trained_on_in_both_trainers_and_go_on_in_the_next_round():
    # One example per batch: x = 1, y = 1, then x = 2, y = 3 twice; two updates a round, so round 2 begins at the third.
    data = Split(TWO, None, order=np.array([[0], [1], [1]]))
    start = Start({"weight": np.zeros((1, 1), np.float32), "bias": np.zeros(1, np.float32)}, {})
    torch_line = TorchTrainer(partial(nn.Linear, 1, 1), Split(*_columns(data)), loss="mse", device="cpu")
    for trainer, begin in ((line(data), ZEROS), (torch_line, start)):
        steps = {"steps": 2, "learning_rate": 0.25, "batch_size": 1}
        first = trainer.fit(begin, Work(1, ("sgd_epochs", steps), seed=1)).model
        # from (0, 0): error -1, so (0.5, 0.5); then error 1.5 - 3, so (0.5 + 0.5 * 1.5 * 2, 0.5 + 0.5 * 1.5)
        assert (first["weight"].item(), first["bias"].item()) == (2.0, 1.25)
        second = trainer.fit(begin, Work(2, ("sgd_epochs", steps), seed=1)).model
        # from (0, 0): error -3, so (3, 1.5); then the first example again: error 4.5 - 1, so (3 - 1.75, 1.5 - 1.75)
        assert (second["weight"].item(), second["bias"].item()) == (1.25, -0.25)


def _columns(data):
    return Examples(data.train.inputs, data.train.targets[:, np.newaxis]), data.test, data.order
