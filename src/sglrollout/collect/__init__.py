"""What a training loop takes from rollouts: rewarded, filtered groups in batches, within a bound on staleness.

May import generation, pool, observe, text, types, config and errors.
"""
