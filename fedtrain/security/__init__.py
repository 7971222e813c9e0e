"""Who may join, and how a client proves who it is."""
