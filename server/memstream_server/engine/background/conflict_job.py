"""The job that asks the LLM about one suspicion.

Rule 1. It decides only what the LLM read: the suspicion is still open, and both fragments are as they were. Then the
decision cannot fail: neither fragment is forgotten, and neither supersedes the other.
Rule 2. One answer ends it. An unclear one leaves the suspicion open.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

from memstream_server.core.events import Purpose
from memstream_server.core.suspicions import may_be_suspected
from memstream_server.engine.conflicts import Verdict, decide_suspicion
from memstream_server.engine.lifecycle import drop_expired, read_fragments
from memstream_server.engine.memory.decision import Decision
from memstream_server.ports.models import Statement

if TYPE_CHECKING:
    from memstream_server.core.values import Fragment
    from memstream_server.engine.memory.actor import Actor
    from memstream_server.engine.runtime.dependencies import Runtime, Storage
    from memstream_server.ports.journal.records import Job
    from memstream_server.ports.models import Account, ConflictJudge


async def ask_about_conflict(
    actor: Actor, job: Job, judge: ConflictJudge, account: Account, storage: Storage, runtime: Runtime
) -> None:
    """Ask, decide, and end the job in the commit of the decision. Raises ModelUnavailable, ModelRefused."""
    named = json.loads(job.payload)
    newer, older = named["newer"], named["older"]
    asked = await _read_statements(actor, newer, older, storage, runtime)
    judgement = None if asked is None else await judge.judge(*asked, account)

    async def decide(now: Actor) -> Decision:
        end = Decision(finish_jobs=(job.id,)).with_cost(account, Purpose.CONFLICT)
        if judgement is None or await _read_statements(now, newer, older, storage, runtime) != asked:
            return end
        verdict = Verdict(newer, older, judgement.decision, f"{account.model}: {judgement.reason}")
        decision, _ = await decide_suspicion(now, verdict, storage, runtime)
        return replace(decision, finish_jobs=end.finish_jobs, events=(*decision.events, *end.events))

    await actor.run(decide)


async def _read_statements(
    actor: Actor, newer: str, older: str, storage: Storage, runtime: Runtime
) -> tuple[Statement, Statement] | None:
    """The newer and the older statement.

    None if there is nothing to ask: the policy is off, the suspicion has ended, or a fragment may not be suspected now.
    """
    working = actor.working
    policy = working.record.policy.conflicts
    if not (policy.suspect and policy.ask_llm and working.suspicions.is_open(newer, older)):
        return None
    read = await read_fragments(actor, (newer, older), storage)
    found = [one for one in drop_expired(read, working.record, runtime.clock.now_us()) if may_be_suspected(one)]
    return (_statement_of(found[0]), _statement_of(found[1])) if len(found) == len((newer, older)) else None


def _statement_of(fragment: Fragment) -> Statement:
    return Statement(fragment.content, fragment.speaker, fragment.observe_time_us)
