"""A small convolutional network for small images, such as the 8x8 digits."""

from collections.abc import Sequence

from torch import nn


def cnn(num_classes: int = 10, channels: Sequence[int] = (16, 32), in_channels: int = 1, side: int = 8) -> nn.Module:
    """3x3 convolutions, each followed by group normalisation, ReLU and 2x2 max pooling; then one linear layer.

    Group normalisation has no running statistics, so averaging clients with different data leaves nothing inconsistent.

    Args:
        num_classes: Number of outputs (logits).
        channels: Channels of each convolution; each a multiple of 4, or below 4.
        in_channels: Channels of the images.
        side: Height and width of the images in pixels, >= ``2 ** len(channels)``.

    Returns:
        Module from images of shape (n, in_channels, side, side) to logits of shape (n, num_classes).
    """
    layers: list[nn.Module] = []
    for width in channels:
        layers += [
            nn.Conv2d(in_channels, width, kernel_size=3, padding=1),
            nn.GroupNorm(min(4, width), width),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        in_channels, side = width, side // 2
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(in_channels * side * side, num_classes))
