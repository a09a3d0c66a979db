package memstream

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/codes"
)

// Retry says how streams reconnect and unary calls are repeated: full jitter up to a doubling delay, or what the server
// asks for where that is longer, until so long has passed without progress.
type Retry struct {
	// Calls bounds the repeats of a unary call while the server is unavailable. Default 10 s; less than zero repeats
	// none. A call never outlasts its own deadline.
	Calls time.Duration
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
		Calls:    cmpOr(r.Calls, 10*time.Second),
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

// backoff decides after each break of one stream, and after each failure of one unary call.
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

// reopens says whether a stream that ended so is to be opened again. One that was open and is then ended as
// UNAUTHENTICATED is: with the token of now. To be refused so at the opening is final.
func (b *backoff) reopens(err error) bool {
	var own *Error
	outdated := errors.As(err, &own) && own.Code == codes.Unauthenticated && !b.openSince.IsZero()
	return outdated || isCut(err)
}

// wait is the time to wait after a break before the next attempt.
func (b *backoff) wait(err error) time.Duration {
	now := time.Now()
	if !b.openSince.IsZero() && now.Sub(b.openSince) > b.retry.DelayMax {
		b.progressed()
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

// spent says whether the stream has been broken for longer than is allowed.
func (b *backoff) spent() bool { return time.Since(b.brokenSince) > b.allowance }

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
		reopens := b.reopens(err)
		wait := b.wait(err)
		if !reopens || b.spent() {
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
