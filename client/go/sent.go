package memstream

import (
	"context"
	"sync"

	v1 "memstream.dev/go/memstream/v1"
)

// Sent is a numbered observation that will be delivered.
type Sent struct {
	// Sequence is the observation's number.
	Sequence int64

	once     sync.Once
	done     chan struct{}
	revision int64
	outcome  *v1.ObservationOutcome
	err      error
}

func newSent(sequence int64) *Sent { return &Sent{Sequence: sequence, done: make(chan struct{})} }

// Done returns a channel that is closed when the observation is stored or rejected.
func (s *Sent) Done() <-chan struct{} { return s.done }

// Stored waits until the observation's tier decision is committed and returns the revision of that commit: recalls with it
// as min_revision see the observation. It fails with the server's rejection of this observation, or with the error that
// ended the stream before it was stored.
func (s *Sent) Stored(ctx context.Context) (int64, error) {
	select {
	case <-s.done:
		return s.revision, s.err
	case <-ctx.Done():
		return 0, AsError(ctx.Err())
	}
}

// Outcome returns the outcome of a stored observation; nil if it is pending, or the stream was opened without Outcomes.
func (s *Sent) Outcome() *v1.ObservationOutcome {
	select {
	case <-s.done:
		return s.outcome
	default:
		return nil
	}
}

func (s *Sent) markStored(revision int64) {
	s.once.Do(func() {
		s.revision = revision
		close(s.done)
	})
}

func (s *Sent) markFailed(err error) (first bool) {
	s.once.Do(func() {
		s.err, first = err, true
		close(s.done)
	})
	return first
}
