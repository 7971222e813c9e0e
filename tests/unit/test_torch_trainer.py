import subprocess
import sys
from functools import partial

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedtrain.client.torch_trainer import TorchTrainer
from fedtrain.client.trainer import Trainer, Work
from fedtrain.data import Examples, Split, digits
from fedtrain.errors import Cancelled, ConfigError, Declined, ParamsError
from fedtrain.local import CLIENT_HALVES, ClientHalf
from fedtrain.models.cnn import cnn
from fedtrain.models.mlp import mlp
from fedtrain.params import digest
from fedtrain.random import generator
from fedtrain.types import Start

TWO = Examples(np.array([[1.0], [2.0]], np.float32), np.array([[1.0], [3.0]], np.float32))
ZEROS = Start({"weight": np.zeros((1, 1), np.float32), "bias": np.zeros(1, np.float32)}, {})


def work(seed=1, **numbers):
    return Work(round=1, local=("sgd_epochs", numbers), seed=seed)


def linear(data=Split(TWO, TWO), **settings):  # noqa: B008
    return TorchTrainer(partial(nn.Linear, 1, 1), data, loss="mse", device="cpu", **settings)


def images(num_examples, num_features=4, num_classes=3, seed=0):
    random = generator(seed)
    inputs = random.normal(size=(num_examples, num_features)).astype(np.float32)
    return Examples(inputs, random.integers(num_classes, size=num_examples))


def of(module_factory, num_examples=10, **settings):
    examples = images(num_examples)
    return TorchTrainer(module_factory, Split(examples, examples), device="cpu", threads=1, **settings)


def equal_bits(one, other):
    return one.keys() == other.keys() and digest(one) == digest(other)


def test_one_step_of_linear_regression_is_the_one_worked_by_hand():
    # predictions 0, 0; errors -1, -3; mean squared error (1 + 9) / 2 = 5;
    # d/dweight = -1 * 1 - 3 * 2 = -7, d/dbias = -1 - 3 = -4
    fitted = linear(learning_rate=0.25).fit(ZEROS, work())
    assert fitted.model["weight"].tolist() == [[1.75]]
    assert fitted.model["bias"].tolist() == [1.0]
    assert fitted.metrics == {"loss": 5.0}
    assert (fitted.num_examples, fitted.num_steps) == (2, 1)
    assert fitted.extra == {}


def test_the_tasks_numbers_override_the_trainers_own():
    fitted = linear(learning_rate=9.0, batch_size=1).fit(ZEROS, work(learning_rate=0.25, batch_size=2, epochs=1))
    assert fitted.model["weight"].tolist() == [[1.75]]
    assert linear(batch_size=1).fit(ZEROS, work(epochs=3)).num_steps == 6
    assert linear(batch_size=1).fit(ZEROS, work(epochs=3, steps=5)).num_steps == 5


def test_num_examples_counts_the_local_examples_whatever_the_epochs():
    assert linear().num_examples == 2
    assert linear().fit(ZEROS, work(epochs=4)).num_examples == 2


def test_it_is_a_trainer():
    assert isinstance(linear(), Trainer)
    assert linear().local_algorithms == tuple(CLIENT_HALVES)


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.01), (0.9, 0.01)])
def test_fit_equals_a_plain_torch_loop_bit_for_bit(momentum, weight_decay):
    train = digits.load(0, 5, 0).train
    trainer = TorchTrainer(
        cnn, Split(train, None), momentum=momentum, weight_decay=weight_decay, device="cpu", threads=1
    )
    start = trainer.initial(3)
    fitted = trainer.fit(start, work(seed=11, epochs=2, learning_rate=0.1, batch_size=16))

    module = cnn()
    module.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in start.params.items()})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=momentum, weight_decay=weight_decay)
    inputs, targets = torch.from_numpy(train.inputs), torch.from_numpy(train.targets)
    random = generator(11, "batches")
    for _ in range(2):
        losses = 0.0
        for batch in torch.from_numpy(random.permutation(len(train))).split(16):
            optimizer.zero_grad()
            loss = functional.cross_entropy(module(inputs[batch]), targets[batch])
            loss.backward()
            optimizer.step()
            losses += loss.item() * len(batch)
    assert equal_bits(fitted.model, {name: tensor.numpy() for name, tensor in module.state_dict().items()})
    assert fitted.metrics["loss"] == pytest.approx(losses / len(train), rel=1e-12)
    assert fitted.num_steps == 2 * -(-len(train) // 16)


@pytest.mark.parametrize(
    ("named", "own"),
    [
        ("adam", torch.optim.Adam),
        ("torch.optim.Adam", torch.optim.Adam),
        ("adamw", partial(torch.optim.AdamW, weight_decay=0.0)),
    ],
)
def test_an_optimizer_is_given_by_name_import_path_or_itself(named, own):
    start = of(mlp_small).initial(0)
    one = of(mlp_small, optimizer=named).fit(start, work(learning_rate=0.01))
    other = of(mlp_small, optimizer=own).fit(start, work(learning_rate=0.01))
    assert equal_bits(one.model, other.model)
    assert not equal_bits(one.model, of(mlp_small).fit(start, work(learning_rate=0.01)).model)


def mlp_small():
    return mlp(4, (5,), 3)


def test_weight_decay_reaches_a_named_optimizer():
    start = of(mlp_small).initial(0)
    plain = of(mlp_small, optimizer="adamw").fit(start, work())
    assert not equal_bits(plain.model, of(mlp_small, optimizer="adamw", weight_decay=0.5).fit(start, work()).model)


def test_equal_starts_and_tasks_give_equal_bits_whatever_came_before():
    trainer = of(with_everything)
    start = trainer.initial(0)
    first = trainer.fit(start, work(seed=5, epochs=2))
    trainer.fit(trainer.initial(1), work(seed=6))
    trainer.evaluate({**start.params, **start.buffers})
    assert equal_bits(first.model, trainer.fit(start, work(seed=5, epochs=2)).model)
    assert not equal_bits(first.model, trainer.fit(start, work(seed=6, epochs=2)).model)


def test_a_new_process_gives_the_same_bits():
    script = """
from fedtrain.client.torch_trainer import TorchTrainer
from fedtrain.client.trainer import Work
from fedtrain.data import digits
from fedtrain.models.cnn import cnn
from fedtrain.params import digest
trainer = TorchTrainer(cnn, digits.load(1, 5, 0), device="cpu", threads=1)
print(digest(trainer.fit(trainer.initial(2), Work(1, ("sgd_epochs", {"epochs": 1}), 7)).model))
"""
    there = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    trainer = TorchTrainer(cnn, digits.load(1, 5, 0), device="cpu", threads=1)
    here = trainer.fit(trainer.initial(2), Work(1, ("sgd_epochs", {"epochs": 1}), 7))
    assert there.stdout.strip() == digest(here.model)


def test_importing_and_fitting_does_not_load_the_compiler():
    script = """
import sys
import numpy as np
from torch import nn
from fedtrain.client.torch_trainer import TorchTrainer
from fedtrain.client.trainer import Work
from fedtrain.data import Examples, Split
train = Examples(np.ones((2, 1), np.float32), np.ones((2, 1), np.float32))
trainer = TorchTrainer(lambda: nn.Linear(1, 1), Split(train, train), loss="mse", device="cpu", clip_grad_norm=1.0)
start = trainer.initial(0)
trainer.evaluate(trainer.fit(start, Work(1, ("sgd_epochs", {}), 7)).model)
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


class WithEverything(nn.Module):
    """Dropout, batch normalisation, a frozen parameter, a mask, a counter, tied weights, empty and 0-d arrays."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.full((4,), 0.5), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("mask", torch.tensor([True, True, False, True]))
        self.register_buffer("infinite", torch.tensor([0.0, float("-inf")]))
        self.register_buffer("cache", torch.zeros(()), persistent=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        self.cache = self.cache + 1
        x = functional.dropout(self.second(self.first(x)), 0.5, self.training)
        x = self.norm(x * self.mask + self.frozen) * self.scale * self.cache
        return self.head(x) * self.low.float()


def with_everything():
    return WithEverything()


def test_state_is_parted_into_trainable_params_and_all_other_buffers():
    start = of(with_everything).initial(0)
    assert set(start.params) == {
        "first.weight", "first.bias", "second.bias", "norm.weight", "norm.bias",
        "scale", "low", "empty", "head.weight", "head.bias",
    }  # fmt: skip
    assert set(start.buffers) == {
        "frozen", "mask", "infinite", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"
    }  # fmt: skip
    assert start.params["scale"].shape == ()
    assert start.params["empty"].shape == (0, 3)
    assert start.params["low"].dtype == ml_dtypes.bfloat16
    assert start.buffers["mask"].dtype == np.bool_
    assert start.buffers["norm.num_batches_tracked"].dtype == np.int64


def test_training_keeps_names_shapes_and_dtypes_and_moves_running_statistics():
    trainer = of(with_everything)
    start = trainer.initial(0)
    model = trainer.fit(start, work(epochs=2, batch_size=5)).model
    before = {**start.params, **start.buffers}
    assert {name: (a.shape, a.dtype) for name, a in model.items()} == {
        name: (a.shape, a.dtype) for name, a in before.items()
    }
    assert model["norm.num_batches_tracked"] == 4
    assert not np.array_equal(model["norm.running_mean"], before["norm.running_mean"])
    assert model["frozen"].tolist() == [0.5] * 4
    assert not np.array_equal(model["low"], before["low"])
    assert model["infinite"].tolist() == [0.0, float("-inf")]


def test_tied_weights_stay_tied_and_receive_both_gradients():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(1, 1, bias=False)
            self.b = nn.Linear(1, 1, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    train = Examples(np.array([[1.0]], np.float32), np.array([[0.0]], np.float32))
    trainer = TorchTrainer(Tied, Split(train, train), loss="mse", learning_rate=0.125, device="cpu")
    start = Start({"a.weight": np.array([[1.0]], np.float32)}, {})
    # loss w ** 4, its derivative 4 at w = 1
    assert trainer.fit(start, work()).model == {"a.weight": np.array([[0.5]])}
    # w = 0.5 under both names: (0.5 * 0.5) ** 2
    assert trainer.evaluate({"a.weight": np.array([[0.5]], np.float32)}).metrics == {"loss": 0.0625}


def test_start_is_left_unchanged_and_the_result_shares_no_memory():
    trainer = of(with_everything)
    start = trainer.initial(0)
    before = digest({**start.params, **start.buffers})
    fitted = trainer.fit(start, work())
    for array in fitted.model.values():
        array[...] = 0
    assert digest({**start.params, **start.buffers}) == before
    again = trainer.fit(start, work())
    assert again.model["head.weight"].any()


def test_received_read_only_arrays_are_accepted():
    start = Start({name: np.array(array) for name, array in ZEROS.params.items()}, {})
    for array in start.params.values():
        array.flags.writeable = False
    assert linear(learning_rate=0.25).fit(start, work()).model["weight"].tolist() == [[1.75]]


def test_initial_is_a_function_of_the_seed_and_of_nothing_else():
    trainer = of(mlp_small)
    one = trainer.initial(1)
    torch.rand(3)
    assert equal_bits(one.params, trainer.initial(1).params)
    assert not equal_bits(one.params, trainer.initial(2).params)
    torch.manual_seed(1)
    assert equal_bits(one.params, {name: p.detach().numpy() for name, p in mlp_small().named_parameters()})


def test_torchs_global_state_is_as_before():
    def state():
        return (
            torch.get_rng_state().tolist(),
            np.random.get_state()[1].tolist(),  # noqa: NPY002
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_autocast_enabled("cpu"),
        )

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before = state()
        trainer = of(with_everything)
        start = trainer.initial(4)
        trainer.fit(start, work(epochs=2))
        trainer.evaluate({**start.params, **start.buffers})
        with pytest.raises(Cancelled):
            trainer.fit(start, Work(1, ("sgd_epochs", {}), 1, cancelled=lambda: True))
        assert state() == before
    finally:
        torch.set_num_threads(threads)


def test_the_trainers_threads_hold_during_a_call():
    seen = []

    def model():
        seen.append(torch.get_num_threads())
        return nn.Linear(1, 1)

    TorchTrainer(model, Split(None, None), device="cpu", threads=3)
    assert seen == [3]


def test_it_trains_when_the_program_has_turned_gradients_off():
    with torch.no_grad():
        assert linear(learning_rate=0.25).fit(ZEROS, work()).model["weight"].tolist() == [[1.75]]
    with torch.inference_mode():
        assert linear(learning_rate=0.25).fit(ZEROS, work()).model["weight"].tolist() == [[1.75]]


@pytest.mark.parametrize("train", [None, Examples(np.zeros((0, 1), np.float32), np.zeros((0, 1), np.float32))])
def test_without_examples_the_start_comes_back(train):
    start = Start({"weight": np.array([[3.0]], np.float32), "bias": np.array([4.0], np.float32)}, {})
    fitted = linear(Split(train, None)).fit(start, work())
    assert equal_bits(fitted.model, start.params)
    assert (fitted.num_examples, fitted.num_steps) == (0, 0)
    assert not np.shares_memory(fitted.model["weight"], start.params["weight"])


def test_evaluation_measures_the_held_out_examples():
    # predictions 1.75 x + 1 = 2.75, 4.5; errors 1.75, 1.5
    evaluated = linear().evaluate({"weight": np.array([[1.75]], np.float32), "bias": np.array([1.0], np.float32)})
    assert evaluated.num_examples == 2
    assert evaluated.metrics == {"loss": (1.75**2 + 1.5**2) / 2}


def test_evaluation_in_small_batches_gives_the_same_metrics():
    model = of(mlp_small).initial(0).params
    whole, parts = (of(mlp_small, num_examples=7, eval_batch_size=size).evaluate(model).metrics for size in (7, 3))
    assert whole["accuracy"] == parts["accuracy"]
    assert whole["accuracy"] * 7 == pytest.approx(round(whole["accuracy"] * 7), abs=1e-12)
    assert whole["loss"] == pytest.approx(parts["loss"], rel=1e-6)


def test_evaluation_uses_running_statistics_and_no_dropout():
    def model():
        return nn.Sequential(nn.BatchNorm1d(1, affine=False), nn.Dropout(0.5))

    trainer = TorchTrainer(model, Split(None, TWO), loss="mse", device="cpu")
    statistics = {
        "0.running_mean": np.array([1.0], np.float32),
        "0.running_var": np.array([4.0 - 1e-5], np.float32),
        "0.num_batches_tracked": np.array(7),
    }
    # outputs (1 - 1) / 2 and (2 - 1) / 2; errors -1, -2.5
    assert trainer.evaluate(statistics).metrics["loss"] == pytest.approx((1 + 6.25) / 2, rel=1e-6)


def test_no_gradients_are_kept_between_tasks():
    kept = []

    def optimizer(params, lr):
        kept.extend(params)
        return torch.optim.SGD(params, lr)

    linear(optimizer=optimizer).fit(ZEROS, work())
    assert [param.grad for param in kept] == [None, None]


@pytest.mark.parametrize("test", [None, Examples(np.zeros((0, 1), np.float32), np.zeros((0, 1), np.float32))])
def test_evaluation_without_held_out_examples_is_none(test):
    assert linear(Split(TWO, test)).evaluate(ZEROS.params) is None


def absolute_error(outputs, targets):
    return (outputs - targets).abs().mean()


def test_own_metrics_are_averaged_over_the_examples():
    metrics = {"mae": absolute_error, "each": lambda outputs, targets: (outputs - targets).abs()[:, 0]}
    evaluated = linear(metrics=metrics, eval_batch_size=1).evaluate(ZEROS.params)
    assert evaluated.metrics == {"loss": 5.0, "mae": 2.0, "each": 2.0}


def test_a_last_batch_of_one_example_joins_the_one_before_under_batch_normalisation():
    trainer = of(lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), num_examples=7, batch_size=3)
    fitted = trainer.fit(trainer.initial(0), work(epochs=2))
    assert fitted.num_steps == 4
    assert fitted.model["1.num_batches_tracked"] == 4
    assert of(mlp_small, num_examples=7, batch_size=3).fit(of(mlp_small).initial(0), work()).num_steps == 3


def test_gradients_are_clipped_to_their_joint_norm():
    # the gradient (-7, -4) has norm sqrt(65); torch adds 1e-6 to it
    fitted = linear(learning_rate=1.0, clip_grad_norm=65**0.5 / 2).fit(ZEROS, work())
    assert fitted.model["weight"][0, 0] == pytest.approx(3.5, rel=1e-6)
    assert fitted.model["bias"][0] == pytest.approx(2.0, rel=1e-6)


def test_autocast_computes_in_bfloat16_and_keeps_the_parameters_dtype():
    trainer = of(mlp_small, autocast="bfloat16")
    start = trainer.initial(0)
    fitted = trainer.fit(start, work(epochs=3))
    exact = of(mlp_small).fit(start, work(epochs=3))
    for name, array in fitted.model.items():
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, exact.model[name], atol=0.02)
    assert not equal_bits(fitted.model, exact.model)


def test_values_that_are_not_finite_are_returned_as_they_are():
    fitted = linear().fit(ZEROS, work(learning_rate=1e30, steps=10))
    assert not np.isfinite(fitted.model["weight"]).all()


def test_a_cancelled_task_stops_at_the_next_batch_and_the_trainer_can_go_on():
    calls = []

    def cancelled():
        calls.append(None)
        return len(calls) > 3

    trainer = linear(learning_rate=0.25)
    with pytest.raises(Cancelled, match="after 3 of 10 steps"):
        trainer.fit(ZEROS, Work(1, ("sgd_epochs", {"steps": 10}), 1, cancelled=cancelled))
    assert trainer.fit(ZEROS, work()).model["weight"].tolist() == [[1.75]]


def test_progress_rises_to_one_and_is_told_about_a_hundred_times_at_most():
    told = []
    linear().fit(ZEROS, Work(1, ("sgd_epochs", {"steps": 1000}), 1, progress=told.append))
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert len(told) == 100


def test_an_unknown_local_algorithm_is_declined():
    with pytest.raises(Declined, match="found 'magic'"):
        linear().fit(ZEROS, Work(1, ("magic", {}), 1))


def test_an_impossible_number_is_declined():
    with pytest.raises(Declined, match="learning_rate must be a finite number > 0, found -1"):
        linear().fit(ZEROS, work(learning_rate=-1))


@pytest.mark.parametrize(
    ("params", "buffers", "message"),
    [
        ({"weight": np.zeros((1, 2), np.float32), "bias": np.zeros(1, np.float32)}, {}, r"'weight' has shape \(1, 1\)"),
        ({"weight": np.zeros((1, 1)), "bias": np.zeros(1, np.float32)}, {}, "'weight' is float32"),
        ({"weight": np.zeros((1, 1), np.float32)}, {}, "'bias'"),
        (ZEROS.params, {"extra": np.zeros(1)}, "'extra'"),
    ],
)
def test_a_start_that_does_not_fit_is_refused_by_name(params, buffers, message):
    with pytest.raises(ParamsError, match=message):
        linear().fit(Start(params, buffers), work())


def test_a_model_to_evaluate_that_does_not_fit_is_refused_by_name():
    with pytest.raises(ParamsError, match="'bias'"):
        linear().evaluate({"weight": np.zeros((1, 1), np.float32)})


def test_a_local_algorithm_corrects_gradients_and_gives_its_second_payload(monkeypatch):
    seen = {}

    def correct(gradient, params, start, payload, client_state, numbers):
        seen.update(numbers)
        return {
            name: gradient[name]
            + payload[name]
            - client_state["c"][name]
            + numbers["mu"] * (params[name] - start[name])
            for name in gradient
        }

    def finish(start, params, payload, client_state, numbers):
        moved = {name: (start[name] - params[name]) * (1 / numbers["num_steps"]) for name in params}
        return moved, {"c": moved, "rounds": client_state["rounds"] + 1}

    monkeypatch.setitem(CLIENT_HALVES, "controlled", ClientHalf(correct, finish))
    payload = {"weight": np.array([[1.0]], np.float32), "bias": np.array([2.0], np.float32)}
    control = {"weight": np.array([[0.5]], np.float32), "bias": np.array([0.0], np.float32)}
    task = Work(1, ("controlled", {"learning_rate": 0.25, "mu": 2.0}), 1, client_state={"c": control, "rounds": 3})
    fitted = linear().fit(Start(ZEROS.params, {}, payload), task)
    # steps along (-7 + 1 - 0.5, -4 + 2 - 0); at the start the pull towards it is 0
    assert fitted.model["weight"].tolist() == [[1.625]]
    assert fitted.model["bias"].tolist() == [0.5]
    assert seen == {"learning_rate": 0.25, "mu": 2.0, "batch_size": 32, "num_steps": 1}
    assert {name: (type(a), a.tolist()) for name, a in fitted.extra.items()} == {
        "weight": (np.ndarray, [[-1.625]]),
        "bias": (np.ndarray, [-0.5]),
    }
    assert fitted.client_state["rounds"] == 4
    assert fitted.client_state["c"]["weight"].tolist() == [[-1.625]]
    # and from the second step on the pull counts: worked by hand with two steps
    two = linear().fit(
        Start(ZEROS.params, {}, payload),
        Work(1, (*task.local[:1], {**task.local[1], "steps": 2}), 1, client_state=task.client_state),
    )
    # at (1.625, 0.5): predictions 2.125, 3.75, errors 1.125, 0.75; d/dw = 1.125 + 1.5 = 2.625, d/db = 1.875
    # corrected: 2.625 + 0.5 + 2 * 1.625 = 6.375, 1.875 + 2 + 2 * 0.5 = 4.875
    assert two.model["weight"].tolist() == [[1.625 - 6.375 / 4]]
    assert two.model["bias"].tolist() == [0.5 - 4.875 / 4]


def test_a_parameter_that_the_loss_does_not_use_is_corrected_too(monkeypatch):
    class Unused(nn.Linear):
        def __init__(self):
            super().__init__(1, 1)
            self.unused = nn.Parameter(torch.ones(1))

    half = ClientHalf(
        correct=lambda gradient, *others: {name: array + 1 for name, array in gradient.items()},
        finish=lambda start, params, payload, client_state, numbers: ({}, client_state),
    )
    monkeypatch.setitem(CLIENT_HALVES, "plus_one", half)
    trainer = TorchTrainer(Unused, Split(TWO, None), loss="mse", learning_rate=0.25, device="cpu")
    start = Start({**ZEROS.params, "unused": np.ones(1, np.float32)}, {})
    model = trainer.fit(start, Work(1, ("plus_one", {}), 1)).model
    assert model["unused"].tolist() == [0.75]
    assert model["weight"].tolist() == [[1.5]]
    assert trainer.fit(start, work()).model["unused"].tolist() == [1.0]


def test_plain_training_keeps_the_client_state_that_it_was_given():
    task = Work(1, ("sgd_epochs", {}), 1, client_state={"kept": 1})
    assert linear().fit(ZEROS, task).client_state == {"kept": 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate must be > 0, found 0.0"),
        ({"momentum": 1.0}, "momentum"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"batch_size": 0}, "batch_size"),
        ({"eval_batch_size": 0}, "eval_batch_size"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm"),
        ({"threads": 0}, "threads"),
        ({"loss": "none"}, "loss must be .* cross_entropy, mse"),
        ({"optimizer": "rmsprop"}, "optimizer must be .* adam, adamw"),
        ({"optimizer": 3}, "optimizer"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum must be 0 unless optimizer is sgd"),
        ({"optimizer": torch.optim.Adagrad, "weight_decay": 0.1}, "weight_decay"),
        ({"autocast": "float16"}, "autocast must be null or bfloat16"),
        ({"device": "abacus"}, "device must be auto"),
        ({"device": "cuda:99"}, "not on this machine"),
    ],
)
def test_an_impossible_setting_is_refused_with_its_name_and_what_is_allowed(settings, message):
    with pytest.raises(ConfigError, match=message):
        TorchTrainer(mlp_small, Split(None, None), **{"device": "cpu", **settings})


def test_state_that_can_not_travel_is_refused_by_name():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"kept": 1}

        def set_extra_state(self, state):
            pass

    def with_complex():
        module = nn.Linear(1, 1)
        module.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        return module

    for model, name in (
        (partial(Extra, 1, 1), "_extra_state"),
        (with_complex, "phase"),
        (partial(nn.LazyLinear, 1), "weight"),
    ):
        with pytest.raises(ParamsError, match=name):
            TorchTrainer(model, Split(None, None), device="cpu")


def test_float64_examples_take_the_dtype_of_the_model():
    double = Examples(TWO.inputs.astype(np.float64), TWO.targets.astype(np.float64))
    assert linear(Split(double, None), learning_rate=0.25).fit(ZEROS, work()).model["weight"].tolist() == [[1.75]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_model_of_another_dtype_trains_in_it(dtype):
    trainer = TorchTrainer(
        lambda: nn.Linear(1, 1).to(dtype), Split(TWO, None), loss="mse", learning_rate=0.25, device="cpu"
    )
    zeros = {name: np.zeros_like(array) for name, array in trainer.initial(0).params.items()}
    model = trainer.fit(Start(zeros, {}), work()).model
    assert model["weight"].dtype == zeros["weight"].dtype
    assert float(model["weight"][0, 0]) == 1.75


def test_the_cnn_learns_the_digits_of_five_unequal_clients():
    clients = [TorchTrainer(cnn, digits.load(k, 5, 0), batch_size=16, device="cpu", threads=1) for k in range(5)]
    server = TorchTrainer(cnn, digits.load(None, 5, 0), device="cpu", threads=1)
    params = server.initial(0).params
    for _ in range(6):
        fits = [
            client.fit(Start(params, {}), work(seed=k, epochs=2, learning_rate=0.1)) for k, client in enumerate(clients)
        ]
        total = sum(fitted.num_examples for fitted in fits)
        params = {
            name: sum(fitted.model[name] * np.float32(fitted.num_examples / total) for fitted in fits)
            for name in params
        }
    assert server.evaluate(params).metrics["accuracy"] > 0.92
