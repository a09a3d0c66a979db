package memstream

import (
	"context"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	v1 "memstream.dev/go/memstream/v1"
)

// AnswerChange is a change of a standing query's answer since the previous change; in the first, everything has entered.
type AnswerChange struct {
	// Answer is the whole current answer.
	Answer *Answer
	// Entered are the recollections that joined the answer.
	Entered []*v1.Recollection
	// Changed are the recollections with another status, or of which the fragment has a new version: enhanced, promoted or
	// edited.
	Changed []*v1.Recollection
	// Retracted are the ids of the recollections that left the answer: others rank higher, or they were superseded,
	// forgotten, merged or erased.
	Retracted []string
}

// StandingQuery is a query whose answer is kept current, created by [RecallStream.Subscribe].
//
// The server sends the whole answer, then changes; a new connection starts with the whole answer again. Next returns the
// difference between the current answer and the one it returned before: a reconnect loses nothing, and a slow reader gets
// fewer, larger changes.
type StandingQuery struct {
	stream    *RecallStream
	query     *pendingQuery
	delivered *Answer
}

// Subscribe sends a standing query and returns when it has the first answer. ctx limits that wait; without a deadline the
// client's timeout does. The answer has no working memory, and the query does not reinforce fragments. It counts as one
// query in flight until it is closed. It fails with CAPABILITY_MISSING if the server has no standing queries.
func (s *RecallStream) Subscribe(ctx context.Context, query *v1.RecallQuery) (*StandingQuery, error) {
	asked := newPendingQuery(query)
	asked.query.Subscribe, asked.standing = true, true
	if err := s.askAndWait(ctx, asked); err != nil {
		return nil, err
	}
	return &StandingQuery{stream: s, query: asked}, nil
}

// Next waits for the next change; the first one is the whole answer. The end of ctx ends only this wait. It fails with the
// error that ended the query (MEMORY_DELETED: the memory was deleted) or the stream, or with ErrClosed.
func (q *StandingQuery) Next(ctx context.Context) (AnswerChange, error) {
	q.stream.lock()
	defer q.stream.unlock()
	for {
		if q.hasChange() {
			change := answerChange(q.delivered, q.query.answer)
			q.delivered = change.Answer
			return change, nil
		}
		if q.query.err != nil {
			return AnswerChange{}, q.query.err
		}
		if err := q.stream.waitFor(ctx, q.query.changed); err != nil {
			return AnswerChange{}, err
		}
	}
}

// Answer returns the whole current answer.
func (q *StandingQuery) Answer() *Answer {
	q.stream.lock()
	defer q.stream.unlock()
	return q.query.answer
}

// Close ends the query; a waiting Next and every later one fails with ErrClosed.
func (q *StandingQuery) Close() {
	q.stream.lock()
	defer q.stream.unlock()
	q.delivered = q.query.answer
	q.stream.cancelQuery(q.query)
	q.query.failQuery(ErrClosed)
}

// hasChange reports whether the answer differs from the delivered one in a way that a reader would notice.
func (q *StandingQuery) hasChange() bool {
	before, now := q.delivered, q.query.answer
	return before == nil || (before.Done.GetDegraded() == "") != (now.Done.GetDegraded() == "") ||
		!slices.EqualFunc(before.Recollections, now.Recollections, sameVersion)
}

func sameVersion(one, other *v1.Recollection) bool {
	return one.GetFragment().GetId() == other.GetFragment().GetId() &&
		one.GetFragment().GetEtag() == other.GetFragment().GetEtag() && one.GetStatus() == other.GetStatus()
}

// answerChange returns the change from one answer to the next; before may be nil.
func answerChange(before, now *Answer) AnswerChange {
	if before == nil {
		before = &Answer{}
	}
	change, held, holds := AnswerChange{Answer: now}, byID(before.Recollections), byID(now.Recollections)
	for _, one := range now.Recollections {
		if other := held[one.GetFragment().GetId()]; other == nil {
			change.Entered = append(change.Entered, one)
		} else if !sameVersion(one, other) {
			change.Changed = append(change.Changed, one)
		}
	}
	for _, one := range before.Recollections {
		if id := one.GetFragment().GetId(); holds[id] == nil {
			change.Retracted = append(change.Retracted, id)
		}
	}
	return change
}

func byID(recollections []*v1.Recollection) map[string]*v1.Recollection {
	found := make(map[string]*v1.Recollection, len(recollections))
	for _, one := range recollections {
		found[one.GetFragment().GetId()] = one
	}
	return found
}

// rankAnswer completes an answer with the fragments sent before. It fails if it ranks a fragment that was never sent.
func (q *pendingQuery) rankAnswer(answer *Answer) error {
	known := byID(answer.Recollections)
	var ranked []*v1.Recollection
	var missing []string
	for index, id := range answer.Done.GetRankingIds() {
		one := known[id]
		if one == nil {
			one = q.known[id]
		}
		if one == nil {
			missing = append(missing, id)
			continue
		}
		if rank := int32(index) + 1; one.GetRank() != rank {
			one = proto.CloneOf(one) // a copy, because the caller may read the delivered one
			one.Rank = rank
		}
		ranked = append(ranked, one)
	}
	if len(missing) > 0 {
		return protocolViolationError("the server ranks fragments that it has not sent: " +
			strings.Join(missing[:min(len(missing), 3)], ", "))
	}
	answer.Recollections, q.known = ranked, byID(ranked)
	return nil
}
