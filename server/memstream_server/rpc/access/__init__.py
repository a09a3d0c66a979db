"""Who calls, and whether they may: identities, the policy file, and the one interceptor that asks both.

Rule 1. An identity comes from a credential that was verified, never from what a request says about itself.
Rule 2. What a call needs is looked up in one table (`rules.py`); an rpc that has no entry there is refused.
Rule 3. A namespace that the table does not find is the empty one, which only a grant of every namespace covers.
Rule 4. No credential is logged, repeated in an error, or kept beyond the call it came with.
"""
