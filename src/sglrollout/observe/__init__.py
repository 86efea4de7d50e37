"""What a person sees of a running pool: progress, metrics, a timeline and a report.

May import pool, weights, engine, types, config and errors.
"""
