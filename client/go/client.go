package memstream

import (
	"context"
	"crypto/tls"
	"fmt"
	"regexp"
	"strings"
	"time"

	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	v1 "memstream.dev/go/memstream/v1"
)

const routingKey = "memstream-memory"

var namePattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._~-]{0,127}$`)

// Client is a connection to a server. The generated clients it holds add the token, the routing header and, to unary
// calls without a deadline, the time limit; their unary calls are repeated while the server is unavailable, for as long
// as [Retry] says. Calls and streams fail with an *Error.
type Client struct {
	Streams       v1.StreamServiceClient
	Memories      v1.MemoryServiceClient
	Conversations v1.ConversationServiceClient
	Operations    v1.OperationServiceClient
	Server        v1.ServerServiceClient

	conn    *grpc.ClientConn
	options options
	closed  context.Context // done once the client is closed
	close   context.CancelFunc
}

type options struct {
	token     func(context.Context) (string, error)
	tls       *tls.Config
	timeout   time.Duration
	retry     Retry
	keepalive time.Duration
	dial      []grpc.DialOption
}

// Option changes how [Connect] connects.
type Option func(*options)

// WithToken sends a bearer token with every call.
func WithToken(token string) Option {
	return WithTokenSource(func(context.Context) (string, error) { return token, nil })
}

// WithTokenSource asks source for the bearer token of every call, every repeat of one and every opening of a stream, with
// the context of that call; an empty token sends none. Many goroutines call it at once, so it should keep the token until
// shortly before it expires. A stream that the server ends because its token is no longer good is opened again.
//
// When source fails, the call fails with UNAUTHENTICATED and wraps the error; an error that is a gRPC status or an *Error
// keeps its code, so that UNAVAILABLE is tried again.
func WithTokenSource(source func(context.Context) (string, error)) Option {
	return func(o *options) { o.token = source }
}

// WithTLS encrypts; certificates in the configuration make it mutual. Without it the connection is plain text.
func WithTLS(config *tls.Config) Option { return func(o *options) { o.tls = config } }

// WithTimeout bounds every unary call and query whose context has no deadline. Default 30 s.
func WithTimeout(timeout time.Duration) Option { return func(o *options) { o.timeout = timeout } }

// WithRetry says how long calls are repeated and streams try to reconnect; what is zero keeps its default.
func WithRetry(retry Retry) Option { return func(o *options) { o.retry = retry.orDefault() } }

// WithKeepalive is the time after which a silent connection is probed. Default 60 s.
func WithKeepalive(after time.Duration) Option { return func(o *options) { o.keepalive = after } }

// WithDialOptions adds options of gRPC, which win. Interceptors are added to the client's own: those of
// grpc.WithUnaryInterceptor run around the repeats of a call, those of grpc.WithChainUnaryInterceptor inside, in each one.
func WithDialOptions(dial ...grpc.DialOption) Option {
	return func(o *options) { o.dial = append(o.dial, dial...) }
}

// Connect makes a client of the server at target ("host:port", or any gRPC name). Nothing is sent yet.
func Connect(target string, given ...Option) (*Client, error) {
	chosen := options{timeout: 30 * time.Second, retry: Retry{}.orDefault(), keepalive: time.Minute}
	for _, option := range given {
		option(&chosen)
	}
	var credential credentials.TransportCredentials = insecure.NewCredentials()
	if chosen.tls != nil {
		credential = credentials.NewTLS(chosen.tls)
	}
	client := &Client{options: chosen}
	client.closed, client.close = context.WithCancel(context.Background())
	conn, err := grpc.NewClient(target, append([]grpc.DialOption{
		grpc.WithTransportCredentials(credential),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: chosen.keepalive, Timeout: 20 * time.Second}),
		// Retry soon after a restart; gRPC's own schedule waits up to two minutes.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           grpcbackoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 5 * time.Second},
			MinConnectTimeout: 5 * time.Second,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64 << 20)),
		grpc.WithChainUnaryInterceptor(client.unary),
		grpc.WithChainStreamInterceptor(client.stream),
	}, chosen.dial...)...)
	if err != nil {
		return nil, fmt.Errorf("memstream: %w", err)
	}
	client.conn = conn
	client.Streams = v1.NewStreamServiceClient(conn)
	client.Memories = v1.NewMemoryServiceClient(conn)
	client.Conversations = v1.NewConversationServiceClient(conn)
	client.Operations = v1.NewOperationServiceClient(conn)
	client.Server = v1.NewServerServiceClient(conn)
	return client, nil
}

// Close ends the connection and every call and stream on it: streams fail with ErrClosed.
func (c *Client) Close() error {
	c.close()
	return c.conn.Close()
}

// life gives a stream a context that ends with ErrClosed when the client is closed.
func (c *Client) life(ctx context.Context) (context.Context, context.CancelCauseFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	forget := context.AfterFunc(c.closed, func() { cancel(ErrClosed) })
	context.AfterFunc(ctx, func() { forget() })
	return ctx, cancel
}

// Conn is the connection, for generated clients of other services (health, reflection).
func (c *Client) Conn() *grpc.ClientConn { return c.conn }

// Memory is the memory "namespace/name", without asking whether it exists.
func (c *Client) Memory(path string) (*Memory, error) {
	namespace, name, found := strings.Cut(path, "/")
	if !found || !namePattern.MatchString(namespace) || !namePattern.MatchString(name) {
		return nil, invalid("memory", fmt.Sprintf(
			"%q is not \"namespace/name\" of letters, digits, \"-\", \"_\", \".\" and \"~\"", path))
	}
	return &Memory{Namespace: namespace, Name: name, client: c}, nil
}

// EnsureMemory makes the memory "namespace/name" with the default policy unless it exists.
func (c *Client) EnsureMemory(ctx context.Context, path string) (*Memory, error) {
	memory, err := c.Memory(path)
	if err != nil {
		return nil, err
	}
	_, err = c.Memories.CreateMemory(ctx, &v1.CreateMemoryRequest{
		Namespace: memory.Namespace, Memory: memory.Name, ExistOk: true,
	})
	if err != nil {
		return nil, err
	}
	return memory, nil
}
