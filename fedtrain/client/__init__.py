"""The client: trainers, and the agent that connects one to a server."""
