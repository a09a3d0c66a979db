package memstream

import (
	"context"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	v1 "memstream.dev/go/memstream/v1"
)

// AnswerChange is what is new in the answer to a standing query since the change before; in the first, everything has
// entered.
type AnswerChange struct {
	// Answer is the whole of it as it is now.
	Answer *Answer
	// Entered came among the best.
	Entered []*v1.Recollection
	// Changed were there and are of another version: enhanced, promoted, edited.
	Changed []*v1.Recollection
	// Retracted are the ids of those that are among the best no more: others are better, or they were forgotten,
	// merged or erased.
	Retracted []string
}

// StandingQuery is a query that goes on being answered as the memory changes; made by [RecallStream.Subscribe].
//
// The server tells the whole answer, and then what changes in it; a new connection begins with the whole answer again.
// What is handed out is the difference between the answer now and the one handed out before: nothing is lost by a
// break, and whoever reads slowly reads less.
type StandingQuery struct {
	stream *RecallStream
	asked  *question
	handed *Answer
}

// Subscribe asks a query that goes on being answered as the memory changes, and returns once the first answer is
// there. ctx is for that one; without a deadline it gets the client's timeout. Working memory is left out, nothing is
// reinforced. It takes one of the places of queries in flight until it is closed. Fails with CAPABILITY_MISSING where
// the server has no standing queries.
func (s *RecallStream) Subscribe(ctx context.Context, query *v1.RecallQuery) (*StandingQuery, error) {
	asked := newQuestion(query)
	asked.query.Subscribe, asked.standing = true, true
	if err := s.first(ctx, asked); err != nil {
		return nil, err
	}
	return &StandingQuery{stream: s, asked: asked}, nil
}

// Next waits for the next change: the first is the answer as it is. When ctx ends, this wait alone does. It fails with
// why the query failed (MEMORY_DELETED: the memory was deleted), with what ended the stream, or with ErrClosed.
func (q *StandingQuery) Next(ctx context.Context) (AnswerChange, error) {
	q.stream.lock()
	defer q.stream.unlock()
	for {
		if q.differs() {
			change := difference(q.handed, q.asked.answer)
			q.handed = change.Answer
			return change, nil
		}
		if q.asked.err != nil {
			return AnswerChange{}, q.asked.err
		}
		if err := q.stream.waitFor(ctx, q.asked.told); err != nil {
			return AnswerChange{}, err
		}
	}
}

// Answer is the whole answer as it is now.
func (q *StandingQuery) Answer() *Answer {
	q.stream.lock()
	defer q.stream.unlock()
	return q.asked.answer
}

// Close gives the query up; a Next that waits, and every later one, fails with ErrClosed.
func (q *StandingQuery) Close() {
	q.stream.lock()
	defer q.stream.unlock()
	q.handed = q.asked.answer
	q.stream.giveUp(q.asked)
	q.asked.failed(ErrClosed)
}

// differs says whether something is new that one would want to be told.
func (q *StandingQuery) differs() bool {
	before, now := q.handed, q.asked.answer
	return before == nil || (before.Done.GetDegraded() == "") != (now.Done.GetDegraded() == "") ||
		!slices.EqualFunc(before.Recollections, now.Recollections, sameVersion)
}

func sameVersion(one, other *v1.Recollection) bool {
	return one.GetFragment().GetId() == other.GetFragment().GetId() &&
		one.GetFragment().GetEtag() == other.GetFragment().GetEtag()
}

// difference is what is new in an answer since the one before, nil where there was none.
func difference(before, now *Answer) AnswerChange {
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

// rank makes the whole answer of what is new in it. It fails where that names what was never told.
func (q *question) rank(answer *Answer) error {
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
			one = proto.CloneOf(one) // whoever has been handed it reads it
			one.Rank = rank
		}
		ranked = append(ranked, one)
	}
	if len(missing) > 0 {
		return protocolViolation("the server ranks what it has not told: " +
			strings.Join(missing[:min(len(missing), 3)], ", "))
	}
	answer.Recollections, q.known = ranked, byID(ranked)
	return nil
}
