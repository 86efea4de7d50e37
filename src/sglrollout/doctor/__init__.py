"""What is here, what it can do, what is wrong and how to mend it: the command ``sglrollout doctor``.

May import engine, config and errors.
"""
