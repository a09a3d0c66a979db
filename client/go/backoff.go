package memstream

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/codes"

	v1 "memstream.dev/go/memstream/v1"
)

// Retry configures how streams reconnect and unary calls are retried: exponential backoff with full jitter, at least the
// delay that the server requests, until a limit has passed without progress.
type Retry struct {
	// Calls limits the retries of a unary call while the server is unavailable. Default 10 s; a negative value disables
	// retries. A call never outlasts its own deadline.
	Calls time.Duration
	// First limits the first connection; it is short, so that a wrong address fails soon. Default 10 s.
	First time.Duration
	// Later limits each reconnection; it leaves time to restart, upgrade or move a server. Default 2 min.
	Later time.Duration
	// DelayMin is the upper bound of the first delay. Default 50 ms.
	DelayMin time.Duration
	// DelayMax is the upper bound of every delay. Default 5 s.
	DelayMax time.Duration
}

func (r Retry) orDefault() Retry {
	return Retry{
		Calls:    cmp.Or(r.Calls, 10*time.Second),
		First:    cmp.Or(r.First, 10*time.Second),
		Later:    cmp.Or(r.Later, 2*time.Minute),
		DelayMin: cmp.Or(r.DelayMin, 50*time.Millisecond),
		DelayMax: cmp.Or(r.DelayMax, 5*time.Second),
	}
}

// backoff decides when to retry one unary call or reopen one broken stream, and when to give up.
type backoff struct {
	retry       Retry
	allowance   time.Duration
	attempts    int
	brokenSince time.Time
	openSince   time.Time
	wasOpen     bool
}

func newBackoff(retry Retry) *backoff { return &backoff{retry: retry, allowance: retry.First} }

// markOpened records that the stream is open; this counts as progress once it has been open for the longest delay.
func (b *backoff) markOpened() {
	b.allowance, b.openSince, b.wasOpen = b.retry.Later, time.Now(), true
}

// markProgress records progress: earlier breaks no longer count.
func (b *backoff) markProgress() {
	b.attempts, b.brokenSince = 0, time.Time{}
}

// shouldReopen reports whether to reopen a stream after err. UNAUTHENTICATED on an open stream means that its token
// expired: it is reopened with a new one. UNAUTHENTICATED at the opening is final. So is a quota at the first opening: it
// may be reached for as long as other streams are open.
func (b *backoff) shouldReopen(err error) bool {
	var own *Error
	if !b.wasOpen && HasReason(err, v1.ErrorReason_ERROR_REASON_QUOTA_EXCEEDED) {
		return false
	}
	expired := errors.As(err, &own) && own.Code == codes.Unauthenticated && !b.openSince.IsZero()
	return expired || isCut(err)
}

// nextDelay returns the time to wait before the next attempt.
func (b *backoff) nextDelay(err error) time.Duration {
	now := time.Now()
	if !b.openSince.IsZero() && now.Sub(b.openSince) > b.retry.DelayMax {
		b.markProgress()
	}
	b.openSince = time.Time{}
	if b.brokenSince.IsZero() {
		b.brokenSince = now
	}
	ceiling := min(b.retry.DelayMax, b.retry.DelayMin<<min(b.attempts, 16))
	b.attempts++
	wait := time.Duration(rand.Float64() * float64(ceiling))
	var own *Error
	if errors.As(err, &own) {
		wait = max(wait, own.RetryAfter)
	}
	return wait
}

// isExhausted reports whether the stream has been broken for longer than its limit.
func (b *backoff) isExhausted() bool { return time.Since(b.brokenSince) > b.allowance }

// repeatUntilDone runs attempt, one connection of a stream, again after each break until it returns nil, ctx ends, or the
// error is final. It returns the last error, or the cause of the end of ctx.
func repeatUntilDone(ctx context.Context, b *backoff, attempt func() error) error {
	for {
		err := AsError(attempt())
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return endError(ctx)
		}
		reopen := b.shouldReopen(err)
		delay := b.nextDelay(err)
		if !reopen || b.isExhausted() {
			return err
		}
		select {
		case <-time.After(delay):
		case <-ctx.Done():
			return endError(ctx)
		}
	}
}

// endError returns the error of a stream whose ctx has ended: ErrClosed if it was closed or abandoned.
func endError(ctx context.Context) error {
	if errors.Is(context.Cause(ctx), ErrClosed) {
		return ErrClosed
	}
	return AsError(ctx.Err())
}
