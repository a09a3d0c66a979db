"""Authentication, authorization and limits of callers.

Rule 1. An identity comes from a credential that was verified, never from what a request says about itself.
Rule 2. `rpc_table.py` holds what each rpc requires; an rpc without an entry is refused.
Rule 3. If a request names no namespace, its namespace is the empty one, which only a grant of every namespace covers.
Rule 4. No credential is logged, repeated in an error, or kept after its call.

admission: rate limits, and limits of concurrent calls and streams, of each principal
authorization: from a call's credentials to a principal; applies the policy before handlers run
caller: the caller of the current call, for handlers that filter lists
files: operator files that are reloaded when they change
keys: API keys
opening: from the settings to credentials, identities and policy
peers: TLS; authentication of calls between servers; the header x-forwarded-client-cert of trusted proxies
policy: the policy file
tokens: JSON web tokens
"""
