"""What a person sees of a running pool: progress now; metrics, timeline and report as they come.

May import pool, engine, types, config and errors.
"""
