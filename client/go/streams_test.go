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

// scripted is a server whose connections do what a test says, one after the other.
type scripted struct {
	v1.UnimplementedStreamServiceServer
	observing chan func(v1.StreamService_ObserveServer) error
	recalling chan func(v1.StreamService_RecallServer) error
	watching  chan func(v1.StreamService_WatchServer) error
	asking    func(context.Context) (*v1.RecallOnceResponse, error)
	batching  func(*v1.ObserveBatchRequest) (*v1.ObserveBatchResponse, error)
}

func (s *scripted) Observe(call v1.StreamService_ObserveServer) error { return (<-s.observing)(call) }

func (s *scripted) Recall(call v1.StreamService_RecallServer) error { return (<-s.recalling)(call) }

func (s *scripted) Watch(_ *v1.WatchRequest, call v1.StreamService_WatchServer) error {
	return (<-s.watching)(call)
}

func (s *scripted) RecallOnce(ctx context.Context, _ *v1.RecallOnceRequest) (*v1.RecallOnceResponse, error) {
	return s.asking(ctx)
}

func (s *scripted) ObserveBatch(
	_ context.Context, request *v1.ObserveBatchRequest,
) (*v1.ObserveBatchResponse, error) {
	return s.batching(request)
}

// script starts a server and gives it, a memory of it, and a context that ends what hangs.
func script(t *testing.T, options ...Option) (*scripted, *Memory, context.Context) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	server := &scripted{
		observing: make(chan func(v1.StreamService_ObserveServer) error, 9),
		recalling: make(chan func(v1.StreamService_RecallServer) error, 9),
		watching:  make(chan func(v1.StreamService_WatchServer) error, 9),
	}
	listener, serving := bufconn.Listen(1<<20), grpc.NewServer()
	v1.RegisterStreamServiceServer(serving, server)
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
		client.Close() //nolint:errcheck // nothing is on it any more
		serving.Stop()
	})
	memory, err := client.Memory("ns/m")
	if err != nil {
		t.Fatal(err)
	}
	return server, memory, ctx
}

// opens reads a stream's first message and answers it.
func opens(t *testing.T, call v1.StreamService_ObserveServer, opened *v1.ObserveOpened) *v1.ObserveOpen {
	request, err := call.Recv()
	if err != nil {
		t.Error(err)
	}
	say(t, call, &v1.ObserveResponse{Message: &v1.ObserveResponse_Opened{Opened: opened}})
	return request.GetOpen()
}

func acks(t *testing.T, call v1.StreamService_ObserveServer, ack *v1.Ack) {
	say(t, call, &v1.ObserveResponse{Message: &v1.ObserveResponse_Ack{Ack: ack}})
}

func say(t *testing.T, call v1.StreamService_ObserveServer, response *v1.ObserveResponse) {
	if err := call.Send(response); err != nil {
		t.Error(err)
	}
}

func content(length int) *v1.Observation { return Text(string(slices.Repeat([]byte("x"), length))) }

func TestWhatAWindowThatHasBecomeSmallerNeverAdmitsIsRefused(t *testing.T) {
	server, memory, ctx := script(t)
	blocked := make(chan error)
	smaller := func(call v1.StreamService_ObserveServer) error {
		opened := opening(1, 1, 1, 10)
		opened.WindowBytes = 500
		opens(t, call, opened)
		<-ctx.Done()
		return nil
	}
	server.observing <- func(call v1.StreamService_ObserveServer) error {
		opened := opening(0, 0, 0, 10)
		opened.WindowBytes = 1000
		opens(t, call, opened)
		call.Recv() //nolint:errcheck // the first observation
		time.Sleep(50 * time.Millisecond)
		server.observing <- smaller
		return errCut
	}
	stream, err := memory.Observe(ctx, "p", ObserveOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Send(ctx, content(400)); err != nil {
		t.Fatal(err)
	}
	go func() {
		_, err := stream.Send(ctx, content(800))
		blocked <- err
	}()
	if err := <-blocked; !HasReason(err, v1.ErrorReason_ERROR_REASON_INVALID_FIELD) {
		t.Fatalf("it ended with %v", err)
	}
	stream.Abandon()
	if _, err := stream.Send(ctx, content(1)); !errors.Is(err, ErrClosed) {
		t.Fatalf("it was taken after the end: %v", err)
	}
}

func TestAFlushHearsUnaskedWhatIsIndexed(t *testing.T) {
	server, memory, ctx := script(t)
	indexed := make(chan struct{})
	server.observing <- func(call v1.StreamService_ObserveServer) error {
		if open := opens(t, call, opening(0, 0, 0, 10)); open.GetAckLevel() != v1.AckLevel_ACK_LEVEL_STORED {
			t.Errorf("it was opened with %v", open)
		}
		call.Recv() //nolint:errcheck // the observation
		acks(t, call, &v1.Ack{Received: 1, Stored: 1, Revision: 1})
		<-indexed
		acks(t, call, &v1.Ack{Received: 1, Stored: 1, Indexed: 1, Revision: 1})
		if request, err := call.Recv(); request.GetClose() == nil {
			t.Errorf("the client sent %v, %v", request, err)
		}
		say(t, call, &v1.ObserveResponse{Message: &v1.ObserveResponse_Closed{
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

func TestRepeatsAreSettledOnceStoredAndAFlushEndsWithTheStream(t *testing.T) {
	server, memory, ctx := script(t)
	server.observing <- func(call v1.StreamService_ObserveServer) error {
		opens(t, call, opening(0, 0, 0, 10))
		for last := int64(0); last < 2; {
			request, _ := call.Recv()
			last = request.GetBatch().GetFirstSequence() + int64(len(request.GetBatch().GetObservations())) - 1
		}
		return errCut
	}
	server.observing <- func(call v1.StreamService_ObserveServer) error {
		opens(t, call, opening(2, 2, 2, 1))
		for number := int64(1); number <= 2; number++ {
			if request, err := call.Recv(); request.GetBatch().GetFirstSequence() != number {
				t.Errorf("the client sent %v, %v, and not %d again", request, err, number)
			}
			acks(t, call, &v1.Ack{Received: 2, Stored: 2, Revision: 2, Flushed: number - 1})
			if request, err := call.Recv(); request.GetFlush().GetFlushId() != number {
				t.Errorf("the client sent %v, %v, and not flush %d", request, err, number)
			}
			acks(t, call, &v1.Ack{Received: 2, Stored: 2, Revision: 2, Flushed: number})
		}
		call.Recv() //nolint:errcheck // the close
		say(t, call, &v1.ObserveResponse{Message: &v1.ObserveResponse_Closed{
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
	if _, err := sent.Stored(ctx); err != nil { // the index may be out of reach for long
		t.Fatal(err)
	}
	if err := stream.Close(ctx); err != nil { // waits for what is stored, and nothing is said after it
		t.Fatal(err)
	}
	if err := <-flushed; !errors.Is(err, ErrClosed) {
		t.Fatalf("the flush ended with %v", err)
	}
}

func TestQueriesBeyondWhatTheNextServerTakesWait(t *testing.T) {
	server, memory, ctx := script(t)
	heard := make(chan string, 9)
	given := make(chan struct{})
	opens := func(call v1.StreamService_RecallServer, most int32) {
		call.Recv() //nolint:errcheck // the opening
		opened := &v1.RecallOpened{Limits: &v1.Limits{QueriesInFlightMax: most}}
		call.Send(&v1.RecallResponse{Message: &v1.RecallResponse_Opened{Opened: opened}}) //nolint:errcheck // is read
	}
	hears := func(call v1.StreamService_RecallServer) *v1.RecallResponse {
		request, _ := call.Recv()
		heard <- request.GetQuery().GetText()
		done := &v1.RecallDone{QueryId: request.GetQuery().GetQueryId()}
		return &v1.RecallResponse{Message: &v1.RecallResponse_Done{Done: done}}
	}
	server.recalling <- func(call v1.StreamService_RecallServer) error {
		opens(call, 4)
		for range 4 {
			hears(call)
		}
		return errCut
	}
	server.recalling <- func(call v1.StreamService_RecallServer) error {
		opens(call, 2)
		first, second := hears(call), hears(call)
		<-given
		call.Send(first)       //nolint:errcheck // is read
		call.Send(second)      //nolint:errcheck // is read
		call.Send(hears(call)) //nolint:errcheck // is read
		<-ctx.Done()
		return nil
	}
	stream, err := memory.Recall(ctx, "")
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 4)
	third, giveUp := context.WithCancel(ctx)
	for number, text := range []string{"0", "1", "2", "3"} {
		asking := ctx
		if number == 2 {
			asking = third
		}
		go func() {
			_, err := stream.Query(asking, Asking(text))
			ended <- err
		}()
		if said := <-heard; said != text {
			t.Fatalf("%q was asked, not %q", said, text)
		}
	}
	if first, second := <-heard, <-heard; first != "0" || second != "1" {
		t.Fatalf("%q and %q were asked again", first, second)
	}
	giveUp()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Fatalf("it was given up with %v", err)
	}
	select {
	case more := <-heard: // it would be refused
		t.Fatalf("%q was asked as well", more)
	case <-time.After(50 * time.Millisecond):
		close(given)
	}
	if last := <-heard; last != "3" { // and no word of what was not asked for there
		t.Fatalf("%q was asked last", last)
	}
	for range 3 {
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
	}
	stream.Abandon()
	if _, err := stream.Query(ctx, Asking("late")); !errors.Is(err, ErrClosed) {
		t.Fatalf("it was asked after the end: %v", err)
	}
}
