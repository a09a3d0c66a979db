package memstream

import (
	"context"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"

	v1 "memstream.dev/go/memstream/v1"
)

// holding keeps every Watch open until its client leaves.
type holding struct {
	v1.UnimplementedStreamServiceServer
}

func (holding) Watch(_ *v1.WatchRequest, call v1.StreamService_WatchServer) error {
	if err := call.Send(&v1.WatchResponse{}); err != nil {
		return err
	}
	<-call.Context().Done()
	return call.Context().Err()
}

func (holding) RecallOnce(context.Context, *v1.RecallOnceRequest) (*v1.RecallOnceResponse, error) {
	return &v1.RecallOnceResponse{}, nil
}

func TestStreamsBeyondAConnectionOpenOthers(t *testing.T) {
	server := grpc.NewServer(grpc.MaxConcurrentStreams(8))
	v1.RegisterStreamServiceServer(server, holding{})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	client, err := Connect(listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	client.conn.allowCalls(8)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	watching, stop := context.WithCancel(ctx)
	defer stop()
	for range 30 {
		call, err := client.Streams.Watch(watching, &v1.WatchRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := call.Recv(); err != nil { // it is open at the server
			t.Fatal(err)
		}
	}
	if _, err := client.Streams.RecallOnce(ctx, &v1.RecallOnceRequest{}); err != nil {
		t.Fatal(err)
	}
	if open := countCalls(client.conn); len(open) != 5 { // 7 calls each
		t.Fatalf("calls by connection: %v", open)
	}
	stop()
	for len(countCalls(client.conn)) > 1 || countCalls(client.conn)[0] > 0 {
		if ctx.Err() != nil {
			t.Fatalf("calls by connection: %v", countCalls(client.conn))
		}
		time.Sleep(time.Millisecond)
	}
	if _, err := client.Streams.RecallOnce(ctx, &v1.RecallOnceRequest{}); err != nil {
		t.Fatal(err)
	}
}

func countCalls(c *connections) []int {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	var calls []int
	for _, each := range c.open {
		calls = append(calls, each.calls)
	}
	return calls
}
