package memstream

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"time"

	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	v1 "memstream.dev/go/memstream/v1"
)

const routingKey = "memstream-memory"

var namePattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._~-]{0,127}$`)

// Client is a connection to a server. The generated clients it holds add the token, the routing header and, to unary
// calls without a deadline, the time limit; their unary calls are repeated while the server is unavailable and fail
// with an *Error.
type Client struct {
	Streams       v1.StreamServiceClient
	Memories      v1.MemoryServiceClient
	Conversations v1.ConversationServiceClient
	Operations    v1.OperationServiceClient
	Server        v1.ServerServiceClient

	conn    *grpc.ClientConn
	options options
}

type options struct {
	token     string
	tls       *tls.Config
	timeout   time.Duration
	retry     Retry
	keepalive time.Duration
	dial      []grpc.DialOption
}

// Option changes how [Connect] connects.
type Option func(*options)

// WithToken sends a bearer token with every call.
func WithToken(token string) Option { return func(o *options) { o.token = token } }

// WithTLS encrypts; certificates in the configuration make it mutual. Without it the connection is plain text.
func WithTLS(config *tls.Config) Option { return func(o *options) { o.tls = config } }

// WithTimeout bounds every unary call and query whose context has no deadline. Default 30 s.
func WithTimeout(timeout time.Duration) Option { return func(o *options) { o.timeout = timeout } }

// WithRetry says how long streams try to reconnect; what is zero keeps its default.
func WithRetry(retry Retry) Option { return func(o *options) { o.retry = retry.orDefault() } }

// WithKeepalive is the time after which a silent connection is probed. Default 60 s.
func WithKeepalive(after time.Duration) Option { return func(o *options) { o.keepalive = after } }

// WithDialOptions adds options of gRPC, which win.
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
	conn, err := grpc.NewClient(target, append([]grpc.DialOption{
		grpc.WithTransportCredentials(credential),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: chosen.keepalive, Timeout: 20 * time.Second}),
		// Retry soon after a restart; gRPC's own schedule waits up to two minutes.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           grpcbackoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 5 * time.Second},
			MinConnectTimeout: 5 * time.Second,
		}),
		grpc.WithDefaultServiceConfig(serviceConfig()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64 << 20)),
		grpc.WithUnaryInterceptor(client.unary),
		grpc.WithStreamInterceptor(client.stream),
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

// Close ends the connection and every stream on it.
func (c *Client) Close() error { return c.conn.Close() }

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

func (c *Client) unary(
	ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker,
	callOptions ...grpc.CallOption,
) error {
	ctx = c.withMetadata(ctx, routeOf(request))
	request = withRequestID(request)
	if _, limited := ctx.Deadline(); !limited {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, c.options.timeout)
		defer cancel()
	}
	return AsError(invoke(ctx, method, request, reply, conn, callOptions...))
}

func (c *Client) stream(
	ctx context.Context, description *grpc.StreamDesc, conn *grpc.ClientConn, method string, streamer grpc.Streamer,
	callOptions ...grpc.CallOption,
) (grpc.ClientStream, error) {
	return streamer(c.withMetadata(ctx, ""), description, conn, method, callOptions...)
}

// withMetadata says who calls, and for which memory, for consistent-hash routing.
func (c *Client) withMetadata(ctx context.Context, route string) context.Context {
	if c.options.token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+c.options.token)
	}
	if route != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, routingKey, route)
	}
	return ctx
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

// withRequestID gives a request that can have a request_id and has none a fresh one, so that gRPC's own repeats of the
// call are harmless.
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

// serviceConfig repeats unary methods only, each of which is safe to repeat (reads, or with a request_id): a policy on
// a stream would retry it before its first answer, behind the back of the stream's own sequence numbers.
func serviceConfig() string {
	type name struct {
		Service string `json:"service"`
		Method  string `json:"method"`
	}
	var unary []name
	for _, service := range []grpc.ServiceDesc{
		v1.StreamService_ServiceDesc, v1.MemoryService_ServiceDesc, v1.ConversationService_ServiceDesc,
		v1.OperationService_ServiceDesc, v1.ServerService_ServiceDesc,
	} {
		for _, method := range service.Methods {
			unary = append(unary, name{service.ServiceName, method.MethodName})
		}
	}
	config, err := json.Marshal(map[string]any{"methodConfig": []any{map[string]any{
		"name": unary,
		"retryPolicy": map[string]any{
			"maxAttempts": 5, "initialBackoff": "0.1s", "maxBackoff": "2s", "backoffMultiplier": 2,
			"retryableStatusCodes": []string{"UNAVAILABLE", "CANCELLED"}, // CANCELLED by a server whose grace ended
		},
	}}})
	if err != nil {
		panic(err) // of constants
	}
	return string(config)
}
