"""Embeddings from any OpenAI-compatible endpoint, through the `openai` package.

Rule 1. The package's own retries are off: attempts, waits and the deadline are resilience.py's.
Rule 2. A reply that is not exactly what was asked for is a failed attempt, never a vector.
Rule 3. A refused batch is halved until the refused inputs stand alone. When nothing of a call is accepted, a
harmless text is tried before the inputs are blamed: a misconfigured endpoint must not strip a memory of vectors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime

import httpx_compat
