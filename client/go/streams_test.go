package memstream

import (
	"context"
	"errors"
	"net"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	v1 "memstream.dev/go/memstream/v1"
)

var errCut = status.Error(codes.Unavailable, "cut")

// scripted is a server that handles its calls with the functions of a test, one after the other.
type scripted struct {
	v1.UnimplementedStreamServiceServer
	v1.UnimplementedMemoryServiceServer
	v1.UnimplementedContextServiceServer
	observeCalls chan func(v1.StreamService_ObserveServer) error
	recallCalls  chan func(v1.StreamService_RecallServer) error
	watchCalls   chan func(v1.StreamService_WatchServer) error
	recallOnce   func(context.Context) (*v1.RecallOnceResponse, error)
	observeBatch func(*v1.ObserveBatchRequest) (*v1.ObserveBatchResponse, error)
	context      func(*v1.ContextRequest) (*v1.ContextResponse, error)
	created      chan *v1.CreateMemoryRequest
}

func (s *scripted) Observe(call v1.StreamService_ObserveServer) error {
	return (<-s.observeCalls)(call)
}

func (s *scripted) Recall(call v1.StreamService_RecallServer) error { return (<-s.recallCalls)(call) }

func (s *scripted) Watch(_ *v1.WatchRequest, call v1.StreamService_WatchServer) error {
	return (<-s.watchCalls)(call)
}

func (s *scripted) RecallOnce(ctx context.Context, _ *v1.RecallOnceRequest) (*v1.RecallOnceResponse, error) {
	return s.recallOnce(ctx)
}

func (s *scripted) ObserveBatch(
	_ context.Context, request *v1.ObserveBatchRequest,
) (*v1.ObserveBatchResponse, error) {
	return s.observeBatch(request)
}

func (s *scripted) CreateMemory(
	_ context.Context, request *v1.CreateMemoryRequest,
) (*v1.CreateMemoryResponse, error) {
	s.created <- request
	return &v1.CreateMemoryResponse{}, nil
}

func (s *scripted) Context(_ context.Context, request *v1.ContextRequest) (*v1.ContextResponse, error) {
	return s.context(request)
}

// startScripted starts a scripted server; it returns the server, a memory of it, and a context that ends a hanging test.
func startScripted(t *testing.T, options ...Option) (*scripted, *Memory, context.Context) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	server := &scripted{
		observeCalls: make(chan func(v1.StreamService_ObserveServer) error, 9),
		recallCalls:  make(chan func(v1.StreamService_RecallServer) error, 9),
		watchCalls:   make(chan func(v1.StreamService_WatchServer) error, 9),
		created:      make(chan *v1.CreateMemoryRequest, 9),
	}
	listener, serving := bufconn.Listen(1<<20), grpc.NewServer()
	v1.RegisterStreamServiceServer(serving, server)
	v1.RegisterMemoryServiceServer(serving, server)
	v1.RegisterContextServiceServer(serving, server)
	go serving.Serve(listener) //nolint:errcheck // ends with the test
	dialer := func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }
	client, err := Connect("passthrough:///scripted", append([]Option{
		WithDialOptions(grpc.WithContextDialer(dialer)), WithRetry(Retry{DelayMin: time.Millisecond}),
	}, options...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		client.Close() //nolint:errcheck // no call is open any more
		serving.Stop()
	})
	memory, err := client.Memory("ns/m")
	if err != nil {
		t.Fatal(err)
	}
	return server, memory, ctx
}

// acceptOpen reads a stream's first message and answers it. A call that the client ended, as a test does at its end, is no
// error: the test's own assertions see what is missing.
func acceptOpen(t *testing.T, call v1.StreamService_ObserveServer, opened *v1.ObserveOpened) *v1.ObserveOpen {
	request, err := call.Recv()
	if err != nil && call.Context().Err() == nil {
		t.Error(err)
	}
	sendResponse(t, call, &v1.ObserveResponse{Message: &v1.ObserveResponse_Opened{Opened: opened}})
	return request.GetOpen()
}

func sendAck(t *testing.T, call v1.StreamService_ObserveServer, ack *v1.Ack) {
	sendResponse(t, call, &v1.ObserveResponse{Message: &v1.ObserveResponse_Ack{Ack: ack}})
}

func sendResponse(t *testing.T, call v1.StreamService_ObserveServer, response *v1.ObserveResponse) {
	if err := call.Send(response); err != nil && call.Context().Err() == nil {
		t.Error(err)
	}
}

func contentOf(length int) *v1.Observation { return Text(string(slices.Repeat([]byte("x"), length))) }

func TestSendFailsIfAShrunkWindowCanNeverAdmitIt(t *testing.T) {
	server, memory, ctx := startScripted(t)
	blocked := make(chan error)
	smaller := func(call v1.StreamService_ObserveServer) error {
		opened := openedWith(1, 1, 1, 10)
		opened.WindowBytes = 500
		acceptOpen(t, call, opened)
		<-ctx.Done()
		return nil
	}
	server.observeCalls <- func(call v1.StreamService_ObserveServer) error {
		opened := openedWith(0, 0, 0, 10)
		opened.WindowBytes = 1000
		acceptOpen(t, call, opened)
		call.Recv() //nolint:errcheck // the first observation
		time.Sleep(50 * time.Millisecond)
		server.observeCalls <- smaller
		return errCut
	}
	stream, err := memory.Observe(ctx, "p", ObserveOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Send(ctx, contentOf(400)); err != nil {
		t.Fatal(err)
	}
	go func() {
		_, err := stream.Send(ctx, contentOf(800))
		blocked <- err
	}()
	if err := <-blocked; !HasReason(err, v1.ErrorReason_ERROR_REASON_INVALID_FIELD) {
		t.Fatalf("the error is %v", err)
	}
	stream.Abandon()
	if _, err := stream.Send(ctx, contentOf(1)); !errors.Is(err, ErrClosed) {
		t.Fatalf("a send after the end fails with %v", err)
	}
}

func TestFlushWaitsForUnsolicitedIndexedAcks(t *testing.T) {
	server, memory, ctx := startScripted(t)
	indexed := make(chan struct{})
	server.observeCalls <- func(call v1.StreamService_ObserveServer) error {
		if open := acceptOpen(t, call, openedWith(0, 0, 0, 10)); open.GetAckLevel() != v1.AckLevel_ACK_LEVEL_STORED {
			t.Errorf("it was opened with %v", open)
		}
		call.Recv() //nolint:errcheck // the observation
		sendAck(t, call, &v1.Ack{Received: 1, Stored: 1, Revision: 1})
		<-indexed
		sendAck(t, call, &v1.Ack{Received: 1, Stored: 1, Indexed: 1, Revision: 1})
		if request, err := call.Recv(); request.GetClose() == nil {
			t.Errorf("the client sent %v, %v", request, err)
		}
		sendResponse(t, call, &v1.ObserveResponse{Message: &v1.ObserveResponse_Closed{
			Closed: &v1.ObserveClosed{Received: 1, Stored: 1, Revision: 1},
		}})
		return nil
	}
	stream, err := memory.Observe(ctx, "p", ObserveOptions{AckLevel: v1.AckLevel_ACK_LEVEL_INDEXED})
	if err != nil {
		t.Fatal(err)
	}
	sent, err := stream.Send(ctx, Text("one"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := sent.Stored(ctx); err != nil {
		t.Fatal(err)
	}
	flushed := make(chan error)
	go func() { flushed <- stream.Flush(ctx) }()
	select {
	case err := <-flushed:
		t.Fatalf("the flush ended before it was indexed: %v", err)
	case <-time.After(50 * time.Millisecond):
		close(indexed)
	}
	if err := <-flushed; err != nil {
		t.Fatal(err)
	}
	if err := stream.Close(ctx); err != nil {
		t.Fatal(err)
	}
}

func TestRepeatsSettleWhenStoredAndCloseEndsAFlush(t *testing.T) {
	server, memory, ctx := startScripted(t)
	server.observeCalls <- func(call v1.StreamService_ObserveServer) error {
		acceptOpen(t, call, openedWith(0, 0, 0, 10))
		for last := int64(0); last < 2; {
			request, _ := call.Recv()
			last = request.GetBatch().GetFirstSequence() + int64(len(request.GetBatch().GetObservations())) - 1
		}
		return errCut
	}
	server.observeCalls <- func(call v1.StreamService_ObserveServer) error {
		acceptOpen(t, call, openedWith(2, 2, 2, 1))
		for number := int64(1); number <= 2; number++ {
			if request, err := call.Recv(); request.GetBatch().GetFirstSequence() != number {
				t.Errorf("the client sent %v, %v, not %d again", request, err, number)
			}
			sendAck(t, call, &v1.Ack{Received: 2, Stored: 2, Revision: 2, Flushed: number - 1})
			if request, err := call.Recv(); request.GetFlush().GetFlushId() != number {
				t.Errorf("the client sent %v, %v, not flush %d", request, err, number)
			}
			sendAck(t, call, &v1.Ack{Received: 2, Stored: 2, Revision: 2, Flushed: number})
		}
		call.Recv() //nolint:errcheck // the close
		sendResponse(t, call, &v1.ObserveResponse{Message: &v1.ObserveResponse_Closed{
			Closed: &v1.ObserveClosed{Received: 2, Stored: 2, Revision: 2},
		}})
		return nil
	}
	stream, err := memory.Observe(ctx, "p", ObserveOptions{AckLevel: v1.AckLevel_ACK_LEVEL_INDEXED})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Send(ctx, Text("one")); err != nil {
		t.Fatal(err)
	}
	sent, err := stream.Send(ctx, Text("two"))
	if err != nil {
		t.Fatal(err)
	}
	flushed := make(chan error)
	go func() { flushed <- stream.Flush(ctx) }()
	if _, err := sent.Stored(ctx); err != nil { // the index may be unavailable for long
		t.Fatal(err)
	}
	if err := stream.Close(ctx); err != nil { // waits until everything is stored; no acknowledgement follows
		t.Fatal(err)
	}
	if err := <-flushed; !errors.Is(err, ErrClosed) {
		t.Fatalf("the flush ended with %v", err)
	}
}

func TestQueriesOverTheNextServersLimitWait(t *testing.T) {
	server, memory, ctx := startScripted(t)
	seen := make(chan string, 9)
	given := make(chan struct{})
	opens := func(call v1.StreamService_RecallServer, most int32) {
		call.Recv() //nolint:errcheck // the opening
		opened := &v1.RecallOpened{Limits: &v1.Limits{QueriesInFlightMax: most}}
		call.Send(&v1.RecallResponse{Message: &v1.RecallResponse_Opened{Opened: opened}}) //nolint:errcheck // the client reads it
	}
	readAndAnswer := func(call v1.StreamService_RecallServer) *v1.RecallResponse {
		request, _ := call.Recv()
		seen <- request.GetQuery().GetText()
		done := &v1.RecallDone{QueryId: request.GetQuery().GetQueryId()}
		return &v1.RecallResponse{Message: &v1.RecallResponse_Done{Done: done}}
	}
	server.recallCalls <- func(call v1.StreamService_RecallServer) error {
		opens(call, 4)
		for range 4 {
			readAndAnswer(call)
		}
		return errCut
	}
	server.recallCalls <- func(call v1.StreamService_RecallServer) error {
		opens(call, 2)
		first, second := readAndAnswer(call), readAndAnswer(call)
		<-given
		call.Send(first)               //nolint:errcheck // the client reads it
		call.Send(second)              //nolint:errcheck // the client reads it
		call.Send(readAndAnswer(call)) //nolint:errcheck // the client reads it
		<-ctx.Done()
		return nil
	}
	stream, err := memory.Recall(ctx, "")
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 4)
	third, cancel := context.WithCancel(ctx)
	for number, text := range []string{"0", "1", "2", "3"} {
		asking := ctx
		if number == 2 {
			asking = third
		}
		go func() {
			_, err := stream.Query(asking, TextQuery(text))
			ended <- err
		}()
		if sent := <-seen; sent != text {
			t.Fatalf("%q was sent, not %q", sent, text)
		}
	}
	if first, second := <-seen, <-seen; first != "0" || second != "1" {
		t.Fatalf("%q and %q were resent", first, second)
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Fatalf("the cancelled query fails with %v", err)
	}
	select {
	case more := <-seen: // over the limit, the server would reject it
		t.Fatalf("%q was sent as well", more)
	case <-time.After(50 * time.Millisecond):
		close(given)
	}
	if last := <-seen; last != "3" { // and no cancel of a query that this connection never sent
		t.Fatalf("%q was sent last", last)
	}
	for range 3 {
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
	}
	stream.Abandon()
	if _, err := stream.Query(ctx, TextQuery("late")); !errors.Is(err, ErrClosed) {
		t.Fatalf("a query after the end fails with %v", err)
	}
}
