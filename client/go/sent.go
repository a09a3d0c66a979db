package memstream

import (
	"context"
	"sync"

	v1 "memstream.dev/go/memstream/v1"
)

// Sent is an observation that was numbered and will be delivered.
type Sent struct {
	// Sequence is its number.
	Sequence int64

	once     sync.Once
	done     chan struct{}
	revision int64
	outcome  *v1.ObservationOutcome
	err      error
}

func newSent(sequence int64) *Sent { return &Sent{Sequence: sequence, done: make(chan struct{})} }

// Done is closed once it is stored or refused.
func (s *Sent) Done() <-chan struct{} { return s.done }

// Stored waits until its tier decision is committed and returns the revision that did it: recalls with it as
// min_revision see it. Fails with the server's refusal of this one observation, or what ended the stream before.
func (s *Sent) Stored(ctx context.Context) (int64, error) {
	select {
	case <-s.done:
		return s.revision, s.err
	case <-ctx.Done():
		return 0, AsError(ctx.Err())
	}
}

// Outcome is what became of it once it is stored, if the stream was opened with Outcomes; else nil.
func (s *Sent) Outcome() *v1.ObservationOutcome {
	select {
	case <-s.done:
		return s.outcome
	default:
		return nil
	}
}

func (s *Sent) store(revision int64) {
	s.once.Do(func() {
		s.revision = revision
		close(s.done)
	})
}

func (s *Sent) refuse(err error) (first bool) {
	s.once.Do(func() {
		s.err, first = err, true
		close(s.done)
	})
	return first
}
