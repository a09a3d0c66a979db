package memstream

import (
	"context"
	"crypto/rand"
	"errors"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

const servicePrefix = "/memstream.v1."

// interceptUnary intercepts every unary call. A call to a service outside of memstream.v1 gets only the token and the
// timeout: a retry may not be safe.
func (c *Client) interceptUnary(
	ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker,
	callOptions ...grpc.CallOption,
) error {
	if _, limited := ctx.Deadline(); !limited {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.options.timeout)
		defer cancel()
	}
	own := strings.HasPrefix(method, servicePrefix)
	if own {
		ctx = withRoute(ctx, routeOf(request))
		request = withRequestID(request)
	}
	attempt := func() error {
		authorized, err := c.withToken(ctx)
		if err != nil {
			return err
		}
		return AsError(invoke(authorized, method, request, reply, conn, callOptions...))
	}
	if !own {
		return attempt()
	}
	return c.retryCall(ctx, attempt)
}

// interceptStream intercepts every stream. It does not retry: the streams of this package resend their own messages.
func (c *Client) interceptStream(
	ctx context.Context, description *grpc.StreamDesc, conn *grpc.ClientConn, method string, streamer grpc.Streamer,
	callOptions ...grpc.CallOption,
) (grpc.ClientStream, error) {
	ctx, err := c.withToken(ctx)
	if err != nil {
		return nil, err
	}
	opened, err := streamer(ctx, description, conn, method, callOptions...)
	if err != nil {
		return nil, AsError(err)
	}
	return errorStream{opened}, nil
}

// errorStream turns the status errors of a gRPC stream into an Error.
type errorStream struct{ grpc.ClientStream }

func (s errorStream) SendMsg(message any) error { return AsError(s.ClientStream.SendMsg(message)) }

func (s errorStream) RecvMsg(message any) error { return AsError(s.ClientStream.RecvMsg(message)) }

// retryCall repeats attempt, a unary call, while the server is unavailable, for at most Retry.Calls after the first
// failure and never beyond the deadline of ctx. It returns the error of the last attempt.
func (c *Client) retryCall(ctx context.Context, attempt func() error) error {
	retry := newBackoff(c.options.retry)
	var until time.Time
	for {
		err := attempt()
		if err == nil || !isRetryable(err) {
			return err
		}
		if c.closed.Err() != nil {
			return ErrClosed
		}
		if ctx.Err() != nil {
			return AsError(ctx.Err())
		}
		if until.IsZero() {
			until = time.Now().Add(c.options.retry.Calls)
			if deadline, limited := ctx.Deadline(); limited && deadline.Before(until) {
				until = deadline
			}
		}
		wait := retry.nextDelay(err)
		if time.Until(until) <= wait {
			return err
		}
		select {
		case <-time.After(wait):
		case <-c.closed.Done():
			return ErrClosed
		case <-ctx.Done():
			return AsError(ctx.Err())
		}
	}
}

// isRetryable reports whether to retry a unary call after err. All of them are safe to repeat: they read, have a
// request_id, or are idempotent. A server whose grace period ended sends CANCELLED; retryCall stops before if the caller
// cancelled the call.
func isRetryable(err error) bool {
	var own *Error
	return errors.As(err, &own) && (own.Code == codes.Unavailable || own.Code == codes.Canceled)
}

// withToken adds the bearer token. It calls the token source for each attempt, so that a retry has a current token.
func (c *Client) withToken(ctx context.Context) (context.Context, error) {
	if c.options.token == nil {
		return ctx, nil
	}
	token, err := c.options.token(ctx)
	if err != nil {
		return nil, tokenError(ctx, err)
	}
	if token == "" {
		return ctx, nil
	}
	return metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token), nil
}

// withRoute adds the routing header with the memory's name, for consistent-hash routing.
func withRoute(ctx context.Context, route string) context.Context {
	if route == "" {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, routingKey, route)
}

// routeOf returns the memory that a request names; empty if it names none, or one that no header can carry.
func routeOf(request any) string {
	named, ok := request.(interface {
		GetNamespace() string
		GetMemory() string
	})
	if !ok || !namePattern.MatchString(named.GetNamespace()) || !namePattern.MatchString(named.GetMemory()) {
		return ""
	}
	return named.GetNamespace() + "/" + named.GetMemory()
}

// withRequestID sets a new request_id if the request has the field and it is empty, so that retries of the call are
// idempotent.
func withRequestID(request any) any {
	message, ok := request.(proto.Message)
	if !ok {
		return request
	}
	field := message.ProtoReflect().Descriptor().Fields().ByName("request_id")
	if field == nil || message.ProtoReflect().Has(field) {
		return request
	}
	named := proto.Clone(message)
	named.ProtoReflect().Set(field, protoreflect.ValueOfString(rand.Text()))
	return named
}
