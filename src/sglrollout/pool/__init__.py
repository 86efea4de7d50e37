"""Engines together: which are up or come back, how much each may take, and which one takes the next sample.

May import engine, wire, types, config and errors.
"""
