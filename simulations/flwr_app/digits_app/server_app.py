"""The server's half."""

from fedtrain.flower.app import server_app

app = server_app()
