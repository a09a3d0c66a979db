"""The engine: orders, decides, commits and publishes; between the wire above and the ports below.

Rule 1. gather (embed, score) -> decide (core) -> commit (one journal transaction) -> publish (RAM, watchers, acks).
Rule 2. RAM changes only after the commit; after a commit whose outcome is unknown, RAM is dropped and read again.
Rule 3. One actor per active memory orders all its transitions by receipt; different memories run side by side.
Rule 4. No model, index or journal call is made while another task waits for the same memory's RAM to be consistent.
"""
