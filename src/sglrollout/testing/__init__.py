"""For testing a rollout loop without a GPU, a network or a model hub.

Small real models, engines that are scripted or simulated, and a virtual clock for them.

May import engine, wire, types and errors. Nothing of the library imports it.
"""

from sglrollout.testing.models import CHAT_TEMPLATE, SPECIAL_TOKENS, smollm2, tiny_model
from sglrollout.testing.scripted import Script, ScriptedEngine, hashed_tokens
from sglrollout.testing.simulated import NumTokens, SimulatedEngine
from sglrollout.testing.virtual_time import DeadlockError, run_virtually

__all__ = [
    "CHAT_TEMPLATE",
    "SPECIAL_TOKENS",
    "DeadlockError",
    "NumTokens",
    "Script",
    "ScriptedEngine",
    "SimulatedEngine",
    "hashed_tokens",
    "run_virtually",
    "smollm2",
    "tiny_model",
]
