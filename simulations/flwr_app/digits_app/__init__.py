"""Handwritten digits: a Flower app made of fedtrain."""
