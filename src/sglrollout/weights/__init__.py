"""Weights on their way from a trainer to engines: sources, plan, gathering, transports, the syncer, verification.

May import pool, engine, wire, types, config and errors.
"""
