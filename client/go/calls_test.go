package memstream

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	v1 "memstream.dev/go/memstream/v1"
)

var quickRetry = WithRetry(Retry{DelayMin: time.Millisecond, DelayMax: 2 * time.Millisecond, Calls: time.Minute})

// statusError returns the error of a status with details.
func statusError(t *testing.T, code codes.Code, details ...protoadapt.MessageV1) error {
	t.Helper()
	failure, err := status.New(code, "message").WithDetails(details...)
	if err != nil {
		t.Fatal(err)
	}
	return failure.Err()
}

func bearerOf(ctx context.Context) string {
	given, _ := metadata.FromIncomingContext(ctx)
	if tokens := given.Get("authorization"); len(tokens) == 1 {
		return tokens[0]
	}
	return fmt.Sprint(given.Get("authorization"))
}

// receive returns the next value of a channel, and fails when the context ends.
func receive(t *testing.T, ctx context.Context, from <-chan string) string {
	t.Helper()
	select {
	case one := <-from:
		return one
	case <-ctx.Done():
		t.Fatal("nothing was received")
		return ""
	}
}

func TestCallRetriesAreLimitedByTimeNotByCount(t *testing.T) {
	for _, code := range []codes.Code{codes.Unavailable, codes.Canceled} {
		t.Run(code.String(), func(t *testing.T) {
			server, memory, ctx := startScripted(t, quickRetry)
			tries := 0
			server.recallOnce = func(context.Context) (*v1.RecallOnceResponse, error) {
				if tries++; tries < 40 {
					return nil, status.Error(code, "away")
				}
				return &v1.RecallOnceResponse{}, nil
			}
			if _, err := memory.RecallOnce(ctx, TextQuery("tea")); err != nil || tries != 40 {
				t.Fatalf("after %d tries: %v", tries, err)
			}
		})
	}
}

func TestCallIsNotRetriedIfARetryCannotHelp(t *testing.T) {
	soon := &errdetails.RetryInfo{RetryDelay: durationpb.New(time.Hour)}
	cases := map[string]struct {
		answer  error
		options []Option
	}{
		"rejected":              {answer: statusError(t, codes.InvalidArgument)},
		"exhausted":             {answer: statusError(t, codes.ResourceExhausted)},
		"a defect":              {answer: statusError(t, codes.Internal)},
		"wait beyond the limit": {answer: statusError(t, codes.Unavailable, protoadapt.MessageV1Of(soon))},
		"retries are off":       {answer: statusError(t, codes.Unavailable), options: []Option{WithRetry(Retry{Calls: -1})}},
	}
	for name, one := range cases {
		t.Run(name, func(t *testing.T) {
			server, memory, ctx := startScripted(t, append([]Option{quickRetry}, one.options...)...)
			tries := 0
			server.recallOnce = func(context.Context) (*v1.RecallOnceResponse, error) {
				tries++
				return nil, one.answer
			}
			_, err := memory.RecallOnce(ctx, TextQuery("tea"))
			if status.Code(err) != status.Code(one.answer) || tries != 1 {
				t.Fatalf("after %d tries: %v", tries, err)
			}
		})
	}
}

func TestRetryWaitsAsLongAsTheServerRequests(t *testing.T) {
	server, memory, ctx := startScripted(t, quickRetry)
	asked := 30 * time.Millisecond
	var at []time.Time
	server.recallOnce = func(context.Context) (*v1.RecallOnceResponse, error) {
		if at = append(at, time.Now()); len(at) == 1 {
			wait := &errdetails.RetryInfo{RetryDelay: durationpb.New(asked)}
			return nil, statusError(t, codes.Unavailable, protoadapt.MessageV1Of(wait))
		}
		return &v1.RecallOnceResponse{}, nil
	}
	if _, err := memory.RecallOnce(ctx, TextQuery("tea")); err != nil {
		t.Fatal(err)
	}
	if waited := at[1].Sub(at[0]); waited < asked {
		t.Fatalf("the retry waited %v", waited)
	}
}

func TestContextReturnsTheTextOfATurn(t *testing.T) {
	server, memory, ctx := startScripted(t, quickRetry)
	tries := 0
	server.context = func(request *v1.ContextRequest) (*v1.ContextResponse, error) {
		if tries++; tries == 1 {
			return nil, status.Error(codes.Unavailable, "away")
		}
		if request.GetQuestion() == "" {
			return nil, statusError(t, codes.InvalidArgument)
		}
		parts := []*v1.ContextPart{{Text: string(request.GetAfter()) + "\n\n"}, {Text: "user: " + request.GetQuestion() + "\n\n"}}
		return &v1.ContextResponse{Parts: parts, Position: []byte("p1")}, nil
	}
	turn, err := memory.client.Context(ctx, &v1.ContextRequest{Question: "tea?", After: []byte("p0")})
	if err != nil || turn.Text() != "p0\n\nuser: tea?\n\n" || string(turn.GetPosition()) != "p1" || tries != 2 {
		t.Fatal(turn, err, tries)
	}
	if _, err = memory.client.Context(ctx, &v1.ContextRequest{}); status.Code(err) != codes.InvalidArgument {
		t.Fatal(err)
	}
}

func TestRecallOnceAsksSeveralMemories(t *testing.T) {
	server, memory, ctx := startScripted(t, quickRetry)
	server.recallOnce = func(context.Context) (*v1.RecallOnceResponse, error) {
		found := []*v1.Recollection{{Memory: "user/bob", Fragment: &v1.Fragment{Id: "a"}}}
		return &v1.RecallOnceResponse{Recollections: &v1.Recollections{Recollections: found}}, nil
	}
	query := TextQuery("tea")
	if _, err := memory.client.RecallOnce(ctx, query); err == nil {
		t.Fatal("a query without scopes was sent")
	}
	query.Scopes = []*v1.RecallScope{{Memories: &v1.RecallScope_Memory{Memory: "user/bob"}}}
	answer, err := memory.client.RecallOnce(ctx, query)
	if err != nil || answer.Recollections[0].GetMemory() != "user/bob" {
		t.Fatal(answer, err)
	}
}

var ends = map[string]struct {
	end  func(*Memory, context.CancelFunc)
	want error
}{
	"its context":   {func(_ *Memory, cancel context.CancelFunc) { cancel() }, context.Canceled},
	"closed client": {func(memory *Memory, _ context.CancelFunc) { memory.client.Close() }, ErrClosed}, //nolint:errcheck
}

func TestRetriesEndWithTheCall(t *testing.T) {
	for name, one := range ends {
		t.Run(name, func(t *testing.T) {
			server, memory, ctx := startScripted(t, WithRetry(Retry{DelayMin: time.Hour, DelayMax: time.Hour, Calls: 1000 * time.Hour}),
				WithTimeout(2000*time.Hour))
			ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
			defer cancel()
			var once sync.Once
			server.recallOnce = func(context.Context) (*v1.RecallOnceResponse, error) {
				once.Do(func() { time.AfterFunc(20*time.Millisecond, func() { one.end(memory, cancel) }) })
				return nil, errCut
			}
			if _, err := memory.RecallOnce(ctx, TextQuery("tea")); !errors.Is(err, one.want) {
				t.Fatalf("the error is %v", err)
			}
		})
	}
}

func TestEndOfACallIsReportedInsteadOfItsLastAttempt(t *testing.T) {
	for name, one := range ends {
		t.Run(name, func(t *testing.T) {
			var end func()
			server, memory, ctx := startScripted(t, WithDialOptions(grpc.WithChainUnaryInterceptor(
				func(ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker,
					options ...grpc.CallOption) error {
					err := invoke(ctx, method, request, reply, conn, options...)
					end()
					return err
				})))
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			end = func() { one.end(memory, cancel) }
			server.recallOnce = func(context.Context) (*v1.RecallOnceResponse, error) { return nil, errCut }
			if _, err := memory.RecallOnce(ctx, TextQuery("tea")); !errors.Is(err, one.want) {
				t.Fatalf("the error is %v", err)
			}
		})
	}
}

func TestRetriesKeepTheRequestID(t *testing.T) {
	server, memory, ctx := startScripted(t, quickRetry)
	var ids []string
	server.observeBatch = func(request *v1.ObserveBatchRequest) (*v1.ObserveBatchResponse, error) {
		if ids = append(ids, request.GetRequestId()); len(ids) < 3 {
			return nil, errCut
		}
		return &v1.ObserveBatchResponse{}, nil
	}
	if _, err := memory.ObserveBatch(ctx, "", Text("tea")); err != nil {
		t.Fatal(err)
	}
	if len(ids) != 3 || ids[0] == "" || ids[1] != ids[0] || ids[2] != ids[0] {
		t.Fatalf("the request ids are %q", ids)
	}
}

// countingTokens returns a token source that returns a new token each time.
func countingTokens(given *atomic.Int64) Option {
	return WithTokenSource(func(context.Context) (string, error) { return fmt.Sprint("t", given.Add(1)), nil })
}

func TestEachAttemptUsesANewToken(t *testing.T) {
	var given atomic.Int64
	server, memory, ctx := startScripted(t, quickRetry, countingTokens(&given))
	var seen []string
	server.recallOnce = func(ctx context.Context) (*v1.RecallOnceResponse, error) {
		if seen = append(seen, bearerOf(ctx)); len(seen) < 3 {
			return nil, errCut
		}
		return &v1.RecallOnceResponse{}, nil
	}
	if _, err := memory.RecallOnce(ctx, TextQuery("tea")); err != nil {
		t.Fatal(err)
	}
	if want := []string{"Bearer t1", "Bearer t2", "Bearer t3"}; !slices.Equal(seen, want) {
		t.Fatalf("the tokens were %q", seen)
	}
}

func TestStreamIsReopenedWithANewTokenAfterExpiry(t *testing.T) {
	outdated := status.Error(codes.Unauthenticated, "the token has expired")
	streams := map[string]func(*testing.T, context.Context, *scripted, *Memory, chan<- string) error{
		"Observe": func(t *testing.T, ctx context.Context, server *scripted, memory *Memory, seen chan<- string) error {
			server.observeCalls <- func(call v1.StreamService_ObserveServer) error {
				seen <- bearerOf(call.Context())
				acceptOpen(t, call, openedWith(0, 0, 0, 9))
				return outdated
			}
			server.observeCalls <- func(call v1.StreamService_ObserveServer) error {
				seen <- bearerOf(call.Context())
				acceptOpen(t, call, openedWith(0, 0, 0, 9))
				<-ctx.Done()
				return nil
			}
			stream, err := memory.Observe(ctx, "p", ObserveOptions{})
			if err == nil {
				t.Cleanup(stream.Abandon)
			}
			return err
		},
		"Recall": func(t *testing.T, ctx context.Context, server *scripted, memory *Memory, seen chan<- string) error {
			for _, end := range []error{outdated, nil} {
				server.recallCalls <- func(call v1.StreamService_RecallServer) error {
					seen <- bearerOf(call.Context())
					call.Recv()                                                                                   //nolint:errcheck // the opening
					call.Send(&v1.RecallResponse{Message: &v1.RecallResponse_Opened{Opened: &v1.RecallOpened{}}}) //nolint:errcheck
					if end == nil {
						<-ctx.Done()
					}
					return end
				}
			}
			stream, err := memory.Recall(ctx, "")
			if err == nil {
				t.Cleanup(stream.Abandon)
			}
			return err
		},
		"Watch": func(t *testing.T, ctx context.Context, server *scripted, memory *Memory, seen chan<- string) error {
			mark := &v1.WatchResponse{Message: &v1.WatchResponse_Progress{Progress: &v1.WatchProgress{Cursor: &v1.Cursor{}}}}
			event := &v1.WatchResponse{Message: &v1.WatchResponse_Events{Events: &v1.WatchEvents{Events: []*v1.Event{{}}}}}
			server.watchCalls <- func(call v1.StreamService_WatchServer) error {
				seen <- bearerOf(call.Context())
				call.Send(mark) //nolint:errcheck // the assertion below sees a failure
				return outdated
			}
			server.watchCalls <- func(call v1.StreamService_WatchServer) error {
				seen <- bearerOf(call.Context())
				return call.Send(event)
			}
			watch, err := memory.Watch(ctx, &v1.WatchRequest{Cursor: &v1.Cursor{}})
			if err == nil {
				_, err = watch.Next()
			}
			return err
		},
	}
	for name, run := range streams {
		t.Run(name, func(t *testing.T) {
			var given atomic.Int64
			server, memory, ctx := startScripted(t, quickRetry, countingTokens(&given))
			seen := make(chan string, 9)
			if err := run(t, ctx, server, memory, seen); err != nil {
				t.Fatal(err)
			}
			if first, second := receive(t, ctx, seen), receive(t, ctx, seen); first != "Bearer t1" || second != "Bearer t2" {
				t.Fatalf("the tokens were %q and %q", first, second)
			}
		})
	}
}

func TestStreamIsNotReopenedIfItsOpeningWasRejected(t *testing.T) {
	var given atomic.Int64
	server, memory, ctx := startScripted(t, quickRetry, countingTokens(&given))
	refused := status.Error(codes.Unauthenticated, "who?")
	server.observeCalls <- func(v1.StreamService_ObserveServer) error { return refused }
	server.recallCalls <- func(v1.StreamService_RecallServer) error { return refused }
	server.watchCalls <- func(v1.StreamService_WatchServer) error { return refused }
	_, observed := memory.Observe(ctx, "p", ObserveOptions{})
	_, recalled := memory.Recall(ctx, "")
	watch, err := memory.Watch(ctx, &v1.WatchRequest{Cursor: &v1.Cursor{}})
	if err != nil {
		t.Fatal(err)
	}
	_, watched := watch.Next()
	for _, err := range []error{observed, recalled, watched} {
		if status.Code(err) != codes.Unauthenticated {
			t.Errorf("the error is %v", err)
		}
	}
	if given.Load() != 3 {
		t.Errorf("the token source was called %d times", given.Load())
	}
}

func TestFailingTokenSourceFailsTheCall(t *testing.T) {
	broken := errors.New("the vault is sealed")
	cases := map[string]struct {
		fails error
		code  codes.Code
		tries int64
	}{
		"permanent":   {broken, codes.Unauthenticated, 1},
		"with a code": {status.Error(codes.PermissionDenied, "no"), codes.PermissionDenied, 1},
		"transient":   {status.Error(codes.Unavailable, "away"), codes.OK, 3},
	}
	for name, one := range cases {
		t.Run(name, func(t *testing.T) {
			var tries atomic.Int64
			source := WithTokenSource(func(context.Context) (string, error) {
				if tries.Add(1) > 2 {
					return "good", nil
				}
				return "", one.fails
			})
			server, memory, ctx := startScripted(t, quickRetry, source)
			server.recallOnce = func(context.Context) (*v1.RecallOnceResponse, error) { return &v1.RecallOnceResponse{}, nil }
			_, err := memory.RecallOnce(ctx, TextQuery("tea"))
			if status.Code(err) != one.code || tries.Load() != one.tries {
				t.Fatalf("after %d tries: %v", tries.Load(), err)
			}
			if err != nil && !errors.Is(err, one.fails) {
				t.Fatalf("%v does not wrap the cause", err)
			}
		})
	}
}

func TestCallersInterceptorsAreAdded(t *testing.T) {
	var unary, inner, streams atomic.Int64
	server, memory, ctx := startScripted(t, quickRetry, WithToken("good"), WithDialOptions(
		grpc.WithUnaryInterceptor(func(ctx context.Context, method string, request, reply any, conn *grpc.ClientConn,
			invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
			unary.Add(1)
			return invoke(ctx, method, request, reply, conn, options...)
		}),
		grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, request, reply any, conn *grpc.ClientConn,
			invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
			inner.Add(1)
			return invoke(ctx, method, request, reply, conn, options...)
		}),
		grpc.WithStreamInterceptor(func(ctx context.Context, description *grpc.StreamDesc, conn *grpc.ClientConn,
			method string, streamer grpc.Streamer, options ...grpc.CallOption) (grpc.ClientStream, error) {
			streams.Add(1)
			return streamer(ctx, description, conn, method, options...)
		}),
	))
	seen := make(chan string, 9)
	server.recallOnce = func(ctx context.Context) (*v1.RecallOnceResponse, error) {
		seen <- bearerOf(ctx)
		if len(seen) < 3 {
			return nil, errCut
		}
		return &v1.RecallOnceResponse{}, nil
	}
	server.observeCalls <- func(call v1.StreamService_ObserveServer) error {
		seen <- bearerOf(call.Context())
		acceptOpen(t, call, openedWith(0, 0, 0, 9))
		<-ctx.Done()
		return nil
	}
	if _, err := memory.RecallOnce(ctx, TextQuery("tea")); err != nil {
		t.Fatal(err)
	}
	stream, err := memory.Observe(ctx, "p", ObserveOptions{})
	if err != nil {
		t.Fatal(err)
	}
	stream.Abandon()
	for range 4 {
		if token := <-seen; token != "Bearer good" {
			t.Errorf("the token is %q", token)
		}
	}
	if unary.Load() != 1 || inner.Load() != 3 || streams.Load() != 1 {
		t.Errorf("the interceptors ran %d, %d and %d times", unary.Load(), inner.Load(), streams.Load())
	}
}

func TestErrorKeepsTheDetailsOfItsStatus(t *testing.T) {
	info := &errdetails.ErrorInfo{Domain: "memstream.dev", Reason: "INVALID_FIELD"}
	help := &errdetails.Help{Links: []*errdetails.Help_Link{{Description: "a detail type that this package does not know"}}}
	server, memory, ctx := startScripted(t, quickRetry)
	server.recallOnce = func(context.Context) (*v1.RecallOnceResponse, error) {
		return nil, statusError(t, codes.InvalidArgument, protoadapt.MessageV1Of(info), protoadapt.MessageV1Of(help))
	}
	server.observeCalls <- func(v1.StreamService_ObserveServer) error {
		return statusError(t, codes.InvalidArgument, protoadapt.MessageV1Of(info), protoadapt.MessageV1Of(help))
	}
	_, called := memory.RecallOnce(ctx, TextQuery("tea"))
	_, opened := memory.Observe(ctx, "p", ObserveOptions{})
	for name, err := range map[string]error{"call": called, "stream": opened, "wrapped": fmt.Errorf("recall: %w", called)} {
		grpcStatus, ok := status.FromError(err)
		if !ok || grpcStatus.Code() != codes.InvalidArgument || len(grpcStatus.Details()) != 2 {
			t.Fatalf("%s: %v has the details %v", name, err, grpcStatus.Details())
		}
		kept, ok := grpcStatus.Details()[1].(*errdetails.Help)
		if !ok || kept.GetLinks()[0].GetDescription() != help.GetLinks()[0].GetDescription() {
			t.Errorf("%s: %v", name, grpcStatus.Details())
		}
		var own *Error
		if !errors.As(err, &own) || own.Reason != v1.ErrorReason_ERROR_REASON_INVALID_FIELD {
			t.Errorf("%s: %v is not an Error with its reason", name, err)
		}
	}
}

func TestErrorOfThePackageHasDetails(t *testing.T) {
	_, memory, _ := startScripted(t)
	_, err := memory.client.Memory("no slash")
	details := status.Convert(err).Details()
	if len(details) != 2 {
		t.Fatalf("the details are %v", details)
	}
	if info, ok := details[0].(*errdetails.ErrorInfo); !ok || info.GetReason() != "INVALID_FIELD" {
		t.Errorf("the detail is %v", details[0])
	}
	if bad, ok := details[1].(*errdetails.BadRequest); !ok || bad.GetFieldViolations()[0].GetField() != "memory" {
		t.Errorf("the detail is %v", details[1])
	}
}

func TestConnectRefusesWhatIsNoTarget(t *testing.T) {
	for _, target := range []string{
		"", "http://127.0.0.1:7700", "https://memory.example", "a b:1", "host:", "host:port", "host:0", "host:65536", ":7700",
		"host/x", "::1", "a:1:2", "u@h:1", "127.0.0.1:7700 ",
	} {
		client, err := Connect(target)
		var failure *Error
		if client != nil || !errors.As(err, &failure) || failure.Code != codes.InvalidArgument {
			t.Errorf("%q: %v", target, err)
		}
	}
}

func TestConnectTakesAddressesAndNamesOfResolvers(t *testing.T) {
	for _, target := range []string{
		"127.0.0.1:7700", "memory.example", "[::1]:7700", "my_host:1", "dns:///memory:7700", "unix:/run/m.sock", "dns:7700",
	} {
		client, err := Connect(target)
		if err != nil {
			t.Errorf("%q: %v", target, err)
			continue
		}
		client.Close() //nolint:errcheck // no call is open
	}
}

func TestCreateMemorySendsWhatIsGiven(t *testing.T) {
	server, memory, ctx := startScripted(t)
	limit := int32(7)
	policy := &v1.Policy{Recall: &v1.RecallPolicy{Limit: &limit}}
	made, err := memory.client.CreateMemory(ctx, "ns/new", CreateOptions{
		Kind: v1.MemoryKind_MEMORY_KIND_LONG_TERM, Profile: v1.Profile_PROFILE_DBGPT, Policy: policy,
		Labels: map[string]string{"team": "core"},
	})
	if err != nil || made.String() != "ns/new" {
		t.Fatal(made, err)
	}
	sent := <-server.created
	if sent.GetKind() != v1.MemoryKind_MEMORY_KIND_LONG_TERM || sent.GetPolicy().GetProfile() != v1.Profile_PROFILE_DBGPT ||
		sent.GetPolicy().GetRecall().GetLimit() != limit || sent.GetLabels()["team"] != "core" || sent.GetExistOk() {
		t.Errorf("sent %v", sent)
	}
	if policy.GetProfile() != v1.Profile_PROFILE_UNSPECIFIED {
		t.Error("the caller's policy was changed")
	}
	if _, err := memory.client.EnsureMemory(ctx, "ns/new"); err != nil {
		t.Fatal(err)
	}
	if sent := <-server.created; !sent.GetExistOk() || sent.GetPolicy() != nil {
		t.Errorf("sent %v", sent)
	}
}

func TestClosingTheClientEndsItsStreams(t *testing.T) {
	server, memory, ctx := startScripted(t)
	server.observeCalls <- func(call v1.StreamService_ObserveServer) error {
		acceptOpen(t, call, openedWith(0, 0, 0, 9))
		<-call.Context().Done()
		return nil
	}
	server.recallCalls <- func(call v1.StreamService_RecallServer) error {
		call.Recv()                                                                                   //nolint:errcheck // the opening
		call.Send(&v1.RecallResponse{Message: &v1.RecallResponse_Opened{Opened: &v1.RecallOpened{}}}) //nolint:errcheck
		<-call.Context().Done()
		return nil
	}
	observing, err := memory.Observe(ctx, "p", ObserveOptions{})
	if err != nil {
		t.Fatal(err)
	}
	recalling, err := memory.Recall(ctx, "")
	if err != nil {
		t.Fatal(err)
	}
	watch, err := memory.Watch(ctx, &v1.WatchRequest{Cursor: &v1.Cursor{}})
	if err != nil {
		t.Fatal(err)
	}
	memory.client.Close() //nolint:errcheck // the assertions below see its effect
	for _, over := range []chan struct{}{observing.ended, recalling.ended} {
		select {
		case <-over:
		case <-ctx.Done():
			t.Fatal("the stream did not end")
		}
	}
	_, sent := observing.Send(ctx, Text("tea"))
	_, asked := recalling.Query(ctx, TextQuery("tea"))
	_, watched := watch.Next()
	for _, err := range []error{sent, asked, watched} {
		if !errors.Is(err, ErrClosed) {
			t.Errorf("the error is %v", err)
		}
	}
}
