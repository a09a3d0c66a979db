package memstream

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"
)

// Retry says how streams reconnect: full jitter up to a doubling delay, until so long has passed without progress.
type Retry struct {
	// First bounds the first opening: a wrong address is to be told soon. Default 10 s.
	First time.Duration
	// Later bounds every reconnection: a server is restarted, upgraded or moved meanwhile. Default 2 min.
	Later time.Duration
	// DelayMin is the bound of the first delay. Default 50 ms.
	DelayMin time.Duration
	// DelayMax bounds every delay. Default 5 s.
	DelayMax time.Duration
}

func (r Retry) orDefault() Retry {
	return Retry{
		First:    cmpOr(r.First, 10*time.Second),
		Later:    cmpOr(r.Later, 2*time.Minute),
		DelayMin: cmpOr(r.DelayMin, 50*time.Millisecond),
		DelayMax: cmpOr(r.DelayMax, 5*time.Second),
	}
}

func cmpOr(given, otherwise time.Duration) time.Duration {
	if given == 0 {
		return otherwise
	}
	return given
}

// backoff decides after each break of one stream.
type backoff struct {
	retry       Retry
	allowance   time.Duration
	attempts    int
	brokenSince time.Time
	openSince   time.Time
}

func newBackoff(retry Retry) *backoff { return &backoff{retry: retry, allowance: retry.First} }

// opened: the stream is open; that counts as progress once it has stayed so for the longest delay.
func (b *backoff) opened() {
	b.allowance, b.openSince = b.retry.Later, time.Now()
}

// progressed: the stream did what it is for, and breaks before do not count any more.
func (b *backoff) progressed() {
	b.attempts, b.brokenSince = 0, time.Time{}
}

// delay is the time to wait before opening again; false gives up.
func (b *backoff) delay(err error) (time.Duration, bool) {
	now := time.Now()
	if !b.openSince.IsZero() && now.Sub(b.openSince) > b.retry.DelayMax {
		b.progressed()
	}
	b.openSince = time.Time{}
	if b.brokenSince.IsZero() {
		b.brokenSince = now
	}
	if !isCut(err) || now.Sub(b.brokenSince) > b.allowance {
		return 0, false
	}
	ceiling := min(b.retry.DelayMax, b.retry.DelayMin<<min(b.attempts, 16))
	b.attempts++
	wait := time.Duration(rand.Float64() * float64(ceiling))
	var own *Error
	if errors.As(err, &own) {
		wait = max(wait, own.RetryAfter)
	}
	return wait, true
}

// persist runs attempt, one connection of a stream, again after each break until it returns nil, ctx ends, or the
// break is final. Fails with the last break, or with what ended ctx.
func persist(ctx context.Context, b *backoff, attempt func() error) error {
	for {
		err := AsError(attempt())
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return ended(ctx)
		}
		wait, again := b.delay(err)
		if !again {
			return err
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return ended(ctx)
		}
	}
}

// ended is what a stream fails with whose ctx is over: ErrClosed where it was closed or abandoned.
func ended(ctx context.Context) error {
	if errors.Is(context.Cause(ctx), ErrClosed) {
		return ErrClosed
	}
	return AsError(ctx.Err())
}
