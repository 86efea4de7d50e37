"""An OpenAI-compatible endpoint over the pool, whose conversations are sessions. Starlette and uvicorn serve it.

May import session, generation, text, types, config and errors.
"""
