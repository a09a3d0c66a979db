package memstream

import (
	"context"
	"crypto/rand"
	"errors"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

const servicePrefix = "/memstream.v1."

// unary intercepts every unary call. A call of another package's service gets the token and the time limit only: it may
// not be safe to repeat.
func (c *Client) unary(
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
	return c.repeat(ctx, attempt)
}

// stream intercepts every stream. It is opened once: repeats belong to the streams of this package, which number and
// count what they carry.
func (c *Client) stream(
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
	return typedStream{opened}, nil
}

// typedStream fails with an Error where a stream of gRPC fails with a status.
type typedStream struct{ grpc.ClientStream }

func (s typedStream) SendMsg(message any) error { return AsError(s.ClientStream.SendMsg(message)) }

func (s typedStream) RecvMsg(message any) error { return AsError(s.ClientStream.RecvMsg(message)) }

// repeat makes attempts of a unary call while the server is unavailable, for at most Retry.Calls after the first failure
// and never beyond the deadline of ctx. It fails with what the last attempt failed with.
func (c *Client) repeat(ctx context.Context, attempt func() error) error {
	retry := newBackoff(c.options.retry)
	var until time.Time
	for {
		err := attempt()
		if err == nil || ctx.Err() != nil || !repeatable(err) || c.conn.GetState() == connectivity.Shutdown {
			return err
		}
		if until.IsZero() {
			until = time.Now().Add(c.options.retry.Calls)
			if deadline, limited := ctx.Deadline(); limited && deadline.Before(until) {
				until = deadline
			}
		}
		wait := retry.wait(err)
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

// repeatable says whether a unary call that failed so is to be made again. All of them are safe to repeat: they read, or
// have a request_id, or change nothing the second time. CANCELLED comes from a server whose grace ended; what the caller
// cancels is over.
func repeatable(err error) bool {
	var own *Error
	return errors.As(err, &own) && (own.Code == codes.Unavailable || own.Code == codes.Canceled)
}

// withToken says who calls. The token is asked for once for each attempt, so that a repeat has the one of its own time.
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

// withRoute names the memory, for consistent-hash routing.
func withRoute(ctx context.Context, route string) context.Context {
	if route == "" {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, routingKey, route)
}

// routeOf is the memory a request names; empty where it names none, or one that no header can carry.
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

// withRequestID gives a request that can have a request_id and has none a fresh one, so that repeats of the call are
// harmless.
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
