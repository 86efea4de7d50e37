"""Conversations of several turns, token by token: with tools, in environments, over any chat template.

May import generation, pool, text, types, config and errors.
"""
