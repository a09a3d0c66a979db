package memstream

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	v1 "memstream.dev/go/memstream/v1"
)

func TestQueuedSendEndsWithItsContext(t *testing.T) {
	server, memory, ctx := startScripted(t)
	release := make(chan struct{})
	server.observeCalls <- func(call v1.StreamService_ObserveServer) error {
		acceptOpen(t, call, openedWith(0, 0, 0, 1))
		call.Recv() //nolint:errcheck // the observation that fills the window
		<-release
		sendAck(t, call, &v1.Ack{Received: 1, Stored: 1, Revision: 1})
		<-ctx.Done()
		return nil
	}
	stream, err := memory.Observe(ctx, "p", ObserveOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Send(ctx, Text("one")); err != nil {
		t.Fatal(err)
	}
	second := make(chan *Sent)
	go func() {
		sent, err := stream.Send(ctx, Text("two"))
		if err != nil {
			t.Error(err)
		}
		second <- sent
	}()
	time.Sleep(20 * time.Millisecond) // it waits for room in the window, and the next one for its turn
	brief, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	third := make(chan error, 1)
	go func() {
		_, err := stream.Send(brief, Text("three"))
		third <- err
	}()
	select {
	case err := <-third:
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("the error is %v", err)
		}
	case <-ctx.Done():
		t.Error("the send did not end")
	}
	close(release)
	if sent := <-second; sent.Sequence != 2 || stream.ExpectedSequence() != 3 {
		t.Fatalf("%d was sent, the next number is %d", sent.Sequence, stream.ExpectedSequence())
	}
	stream.Abandon()
}

// unreachableMemory returns a memory of a server that refuses connections.
func unreachableMemory(t *testing.T) *Memory {
	t.Helper()
	refused := func(context.Context, string) (net.Conn, error) { return nil, errors.New("refused") }
	client, err := Connect("passthrough:///away", WithDialOptions(grpc.WithContextDialer(refused)),
		WithRetry(Retry{DelayMin: time.Millisecond, DelayMax: time.Millisecond}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() }) //nolint:errcheck // no call is open
	memory, err := client.Memory("ns/m")
	if err != nil {
		t.Fatal(err)
	}
	return memory
}

func TestEndOfTheContextIsReportedAsSuch(t *testing.T) {
	memory := unreachableMemory(t)
	opened := map[string]func(context.Context) error{
		"Observe": func(ctx context.Context) error {
			_, err := memory.Observe(ctx, "p", ObserveOptions{})
			return err
		},
		"Recall": func(ctx context.Context) error {
			_, err := memory.Recall(ctx, "")
			return err
		},
		"Watch": func(ctx context.Context) error {
			watch, err := memory.Watch(ctx, &v1.WatchRequest{Cursor: &v1.Cursor{}})
			if err == nil {
				_, err = watch.Next()
			}
			return err
		},
	}
	for name, open := range opened {
		t.Run(name, func(t *testing.T) {
			for range 50 { // which part notices the deadline first varies
				ctx, cancel := context.WithTimeout(context.Background(), 3*time.Millisecond)
				if err := open(ctx); !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("the error is %v", err)
				}
				cancel()
			}
		})
	}
}

func TestClosedWatchReturnsNoMoreEvents(t *testing.T) {
	watch, err := unreachableMemory(t).Watch(context.Background(), &v1.WatchRequest{Cursor: &v1.Cursor{}})
	if err != nil {
		t.Fatal(err)
	}
	watch.ahead = []WatchedEvent{{Event: &v1.Event{}}}
	watch.Close()
	if _, err := watch.Next(); !errors.Is(err, context.Canceled) {
		t.Fatalf("the error is %v", err)
	}
}

// An embedded lock would be part of the API.
func TestStreamsDoNotExportTheirLocks(t *testing.T) {
	for _, stream := range []any{&ObserveStream{}, &RecallStream{}} {
		if _, isLocker := stream.(sync.Locker); isLocker {
			t.Errorf("%T has exported Lock and Unlock", stream)
		}
	}
}
