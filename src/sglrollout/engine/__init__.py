"""The engine's side of the channel: the host, its client, the one adapter that touches SGLang, and CPU support.

May import wire, types, config and errors."""
