package memstream

import (
	"context"
	"crypto/tls"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	grpcbackoff "google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/proto"

	v1 "memstream.dev/go/memstream/v1"
)

const routingKey = "memstream-memory"

var namePattern = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._~-]{0,127}$`)

// Client is a connection to a server. Its generated clients add the token, the routing header and, for unary calls
// without a deadline, the timeout. They retry unary calls while the server is unavailable, within the limits of [Retry].
// Calls and streams fail with an *Error.
type Client struct {
	Streams       v1.StreamServiceClient
	Memories      v1.MemoryServiceClient
	Blocks        v1.BlockServiceClient
	Contexts      v1.ContextServiceClient
	Conversations v1.ConversationServiceClient
	Operations    v1.OperationServiceClient
	Server        v1.ServerServiceClient

	conn    *connections
	options options
	closed  context.Context // done after Close
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

// Option configures [Connect].
type Option func(*options)

// WithToken sends a bearer token with every call.
func WithToken(token string) Option {
	return WithTokenSource(func(context.Context) (string, error) { return token, nil })
}

// WithTokenSource calls source for the bearer token of each call, each retry and each opening of a stream, with the
// context of that call; for an empty token no header is sent. Goroutines call source concurrently; it should cache the
// token until shortly before it expires. If the server ends a stream because its token has expired, the client opens the
// stream again with a new token.
//
// If source fails, the call fails with UNAUTHENTICATED and wraps the error. An error that is a gRPC status or an *Error
// keeps its code, so that UNAVAILABLE is retried.
func WithTokenSource(source func(context.Context) (string, error)) Option {
	return func(o *options) { o.token = source }
}

// WithTLS encrypts the connection; certificates in config make TLS mutual. The default is plain text.
func WithTLS(config *tls.Config) Option { return func(o *options) { o.tls = config } }

// WithTimeout limits each unary call and query whose context has no deadline. Default 30 s.
func WithTimeout(timeout time.Duration) Option { return func(o *options) { o.timeout = timeout } }

// WithRetry sets how long calls are retried and streams try to reconnect; zero fields keep their defaults.
func WithRetry(retry Retry) Option { return func(o *options) { o.retry = retry.orDefault() } }

// WithKeepalive sets the idle time after which the client pings the server. Default 60 s.
func WithKeepalive(after time.Duration) Option { return func(o *options) { o.keepalive = after } }

// WithDialOptions adds gRPC options; they override the client's own. Interceptors are added to the client's own: one of
// grpc.WithUnaryInterceptor runs once around all attempts of a call, one of grpc.WithChainUnaryInterceptor in each attempt.
func WithDialOptions(dial ...grpc.DialOption) Option {
	return func(o *options) { o.dial = append(o.dial, dial...) }
}

// pingTimeout is how long a server may take to answer a ping. A variable for the tests.
var pingTimeout = 20 * time.Second

var (
	// grpcName matches names of gRPC's resolvers.
	grpcName = regexp.MustCompile(`^(dns|unix|unix-abstract|ipv4|ipv6|vsock|xds|google-c2p|passthrough):.*\D`)
	address  = regexp.MustCompile(`^(?:\[[0-9A-Fa-f:.%]+\]|[^\s:/?#@\[\]\\]+)(?::([0-9]{1,5}))?$`)
)

// isTarget reports whether gRPC can resolve target. A name of an application's own resolver has "://".
func isTarget(target string) bool {
	if grpcName.MatchString(target) || strings.Contains(target, "://") {
		return true
	}
	found := address.FindStringSubmatch(target)
	if found == nil || found[1] == "" {
		return found != nil
	}
	port, err := strconv.Atoi(found[1])
	return err == nil && port > 0 && port < 65536
}

// Connect returns a client of the server at target ("host:port", or any gRPC target name). It does not dial yet.
func Connect(target string, given ...Option) (*Client, error) {
	if target == "" {
		return nil, invalidField("target", "is empty: name the server, as in 127.0.0.1:7700")
	}
	if strings.HasPrefix(target, "http://") || strings.HasPrefix(target, "https://") {
		return nil, invalidField("target", fmt.Sprintf("%q is a URL: write host:port of the gRPC port", target))
	}
	if !isTarget(target) {
		return nil, invalidField("target", fmt.Sprintf("%q is no address: write host:port, as in 127.0.0.1:7700", target))
	}
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
	dial := append([]grpc.DialOption{
		grpc.WithTransportCredentials(credential),
		grpc.WithUserAgent("memstream-go"), // as the server's operator sees it
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: chosen.keepalive, Timeout: pingTimeout}),
		// Retry soon after a restart; gRPC's own schedule waits up to two minutes.
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           grpcbackoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 5 * time.Second},
			MinConnectTimeout: 5 * time.Second,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64 << 20)),
		grpc.WithChainUnaryInterceptor(client.interceptUnary),
		grpc.WithChainStreamInterceptor(client.interceptStream),
	}, chosen.dial...)
	conn, err := newConnections(func() (*grpc.ClientConn, error) { return grpc.NewClient(target, dial...) })
	if err != nil {
		return nil, fmt.Errorf("memstream: %w", err)
	}
	client.conn = conn
	client.Streams = v1.NewStreamServiceClient(conn)
	client.Memories = v1.NewMemoryServiceClient(conn)
	client.Blocks = v1.NewBlockServiceClient(conn)
	client.Contexts = v1.NewContextServiceClient(conn)
	client.Conversations = v1.NewConversationServiceClient(conn)
	client.Operations = v1.NewOperationServiceClient(conn)
	client.Server = v1.NewServerServiceClient(conn)
	return client, nil
}

// Close ends the connections and all their calls and streams; streams fail with ErrClosed.
func (c *Client) Close() error {
	c.close()
	return c.conn.Close()
}

// streamContext returns a context for a stream; Close of the client cancels it with ErrClosed.
func (c *Client) streamContext(ctx context.Context) (context.Context, context.CancelCauseFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(c.closed, func() { cancel(ErrClosed) })
	context.AfterFunc(ctx, func() { stop() })
	return ctx, cancel
}

// Conn returns the first connection, for generated clients of other services (health, reflection).
func (c *Client) Conn() *grpc.ClientConn { return c.conn.first() }

// Memory returns the memory "namespace/name" without checking that it exists.
func (c *Client) Memory(path string) (*Memory, error) {
	namespace, name, err := splitPath("memory", path)
	if err != nil {
		return nil, err
	}
	return &Memory{Namespace: namespace, Name: name, client: c}, nil
}

// splitPath returns namespace and name of "namespace/name".
func splitPath(field, path string) (string, string, error) {
	namespace, name, found := strings.Cut(path, "/")
	if !found {
		return "", "", invalidField(field, fmt.Sprintf("%q has no \"/\": write \"namespace/name\"", path))
	}
	for _, part := range [][2]string{{"namespace", namespace}, {"name", name}} {
		if !namePattern.MatchString(part[1]) {
			return "", "", invalidField(field, fmt.Sprintf("the %s of %q must have 1 to 128 letters, digits, \"-\", \"_\", \".\" "+
				"and \"~\", and begin with a letter or a digit", part[0], path))
		}
	}
	return namespace, name, nil
}

// CreateOptions configures [Client.CreateMemory]; zero fields take the server's defaults.
type CreateOptions struct {
	// Kind says which tiers the memory has. Default: a hybrid memory, with all of them.
	Kind v1.MemoryKind
	// Profile is the set of defaults of the policy. It takes precedence over Policy.Profile.
	Profile v1.Profile
	// Policy sets fields of the policy; unset ones take the profile's defaults.
	Policy *v1.Policy
	// Labels are names and values of your own.
	Labels map[string]string
	// ExistOK accepts an existing memory if its kind, policy fields and labels equal the given ones; what is not given is
	// not compared. The error of another one has the reason MEMORY_EXISTS and names the differences.
	ExistOK bool
}

// CreateMemory creates the memory "namespace/name".
func (c *Client) CreateMemory(ctx context.Context, path string, given CreateOptions) (*Memory, error) {
	memory, err := c.Memory(path)
	if err != nil {
		return nil, err
	}
	policy := given.Policy
	if given.Profile != v1.Profile_PROFILE_UNSPECIFIED {
		policy = &v1.Policy{}
		proto.Merge(policy, given.Policy)
		policy.Profile = given.Profile
	}
	_, err = c.Memories.CreateMemory(ctx, &v1.CreateMemoryRequest{
		Namespace: memory.Namespace, Memory: memory.Name, Kind: given.Kind, Policy: policy, Labels: given.Labels,
		ExistOk: given.ExistOK,
	})
	if err != nil {
		return nil, err
	}
	return memory, nil
}

// EnsureMemory creates the memory "namespace/name" with the default policy unless it exists.
func (c *Client) EnsureMemory(ctx context.Context, path string) (*Memory, error) {
	return c.CreateMemory(ctx, path, CreateOptions{ExistOK: true})
}
