"""The clients' half."""

from fedtrain.flower.app import client_app

app = client_app()
