"""The context of an agent's turn, as text within a budget.

Modules:
    values: blocks, messages and memories that go in; parts and omissions that come out
    position: what the next turn must know of this one, as bytes
    texts: writes the parts, and the lines of a standing answer
    layout: chooses what is new, places all parts, and compares them with the last text
"""
