"""For testing a rollout loop without a GPU, a network or a model hub: small real models, and a scripted engine.

May import engine, wire, types and errors. Nothing of the library imports it.
"""

from sglrollout.testing.models import CHAT_TEMPLATE, SPECIAL_TOKENS, smollm2, tiny_model
from sglrollout.testing.scripted import Script, ScriptedEngine, hashed_tokens

__all__ = ["CHAT_TEMPLATE", "SPECIAL_TOKENS", "Script", "ScriptedEngine", "hashed_tokens", "smollm2", "tiny_model"]
