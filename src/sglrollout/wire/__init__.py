"""The channel between a client and its engine host, and every message that travels on it.

May import errors and nothing else of ours.
"""
