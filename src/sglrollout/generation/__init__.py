"""From prompts to completions through the pool: one sample's life, streams, and batches of groups.

May import pool, engine, wire, text, types, config and errors.
"""
