package memstream

import (
	"context"
	"sync"
)

// signal is a lock whose holders can wait for a change of the guarded state.
type signal struct {
	mu      sync.Mutex
	changed chan struct{}
}

func newSignal() signal { return signal{changed: make(chan struct{})} }

func (s *signal) lock() { s.mu.Lock() }

func (s *signal) unlock() { s.mu.Unlock() }

// notify wakes all waiters; call it with the lock held.
func (s *signal) notify() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// wait releases the lock until the next change and holds it again when it returns.
func (s *signal) wait(ctx context.Context) error { return s.waitFor(ctx, s.changed) }

// waitFor is wait for one channel, which is closed at the change.
func (s *signal) waitFor(ctx context.Context, changed <-chan struct{}) error {
	s.unlock()
	defer s.lock()
	select {
	case <-changed:
		return nil
	case <-ctx.Done():
	}
	select {
	case <-changed: // a change takes precedence over the end of the context
		return nil
	default:
		return AsError(ctx.Err())
	}
}
