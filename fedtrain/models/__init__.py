"""Small models to start with. `cnn` and `mlp` need torch, `softmax` only NumPy; none is imported before it is named.

A torch model is a callable that gives a new `torch.nn.Module`; a NumPy model is a
`fedtrain.client.numpy_trainer.NumpyModel`.
"""
