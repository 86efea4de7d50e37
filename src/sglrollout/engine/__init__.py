"""Engines: the host, its client, the one adapter that touches SGLang, remote engines, and CPU support.

May import wire, types, config and errors."""
